"""The engine: scheduler, KV cache, model runner and sampling of one rank. Importing this package imports no torch."""
