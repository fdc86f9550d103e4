"""KV memory of an engine: pools, who else may map them, and copies in and out of them."""
