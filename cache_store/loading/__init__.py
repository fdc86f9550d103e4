"""D's side: loads of staged KV, from the first handshake to the last verified block."""
