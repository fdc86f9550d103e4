"""KV blocks of one engine: who holds them, and which prefixes they contain. Pure bookkeeping, no tensors."""
