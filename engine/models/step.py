"""What a forward pass knows of its step besides the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.layers.override import Override


@dataclass(slots=True)
class ForwardStep:
    """One step's attention: the backend, its plan, and the KV pool of every layer."""

    backend: AttentionBackend
    plan: Any  # of the backend, for this step's rows
    pools: Sequence[Any]  # per layer: the backend's handle of its KV pool
    cos: torch.Tensor  # [tokens, head_dim / 2]
    sin: torch.Tensor
    slots: torch.Tensor | None  # int64 [tokens] where a device's kernel stores KV; None: the backend's plan knows
    on_layer: Callable[[int], None] | None  # called when the layer's KV of all tokens is in its pool
    override: Override | None = None  # what requests bring in place of their tokens' embeddings
