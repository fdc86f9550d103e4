"""A name for a model's contents, by which servers recognise that they hold the same one, and KV is kept apart."""

from __future__ import annotations

import json
from dataclasses import asdict

import xxhash

from engine.models.config import ModelConfig

# The servers' settings, which pairs compare by themselves (dtype) or need not share
_SETTINGS = {"checkpoint_dtype", "max_model_len", "pad_token_id"}


def model_fingerprint(config: ModelConfig, weights: str) -> str:
    """32 hex digits (XXH3-128) over all facts of the configuration that have a say in what the model computes and where
    it ends, and over `weights`: the digest of every byte of them, or how they were made up.

    Nothing of it depends on the device, the number of ranks or how the weights are spread over files.
    """
    facts = {name: value for name, value in asdict(config).items() if name not in _SETTINGS}
    return xxhash.xxh3_128_hexdigest(json.dumps([facts, weights], sort_keys=True).encode())
