"""Attention over the paged KV pool, by backend."""
