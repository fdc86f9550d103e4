"""What a forward pass knows of its step besides the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.layers.override import Override


@dataclass(slots=True)
class LastTokens:
    """The last token of every row, where nothing else of the stream is asked for: the last layer then writes the KV of
    all tokens, and computes the rest for these alone. A prompt's last layer costs little more than its products of keys
    and values, which is one part in `num_layers` of the whole pass."""

    tokens: torch.Tensor  # int64 or int32 [rows], ascending: their indices among the step's tokens
    plan: Any | None  # the backend's, of these tokens alone; None: it attends for all


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
    lasts: LastTokens | None = None  # None: the stream of every token is asked for
    override: Override | None = None  # what requests bring in place of their tokens' embeddings
