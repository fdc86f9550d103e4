"""Which prefixes the servers hold: hashes of prompts' blocks, the index of them, and the streams that feed it."""
