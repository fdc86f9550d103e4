"""Prefill CUDA graphs: the whole forward of a batch of short prompts, captured once per token bucket.

`gate` says at start-up whether there can be graphs, `decision` per batch whether one fits, `metadata` and `staging` lay
out what a replay reads, `scratch` holds the blocks that padding writes to, `runner` captures and replays.
"""
