"""How fast the cache store moves KV from one process to another on this machine: `python -m bench.kv_transfer`."""
