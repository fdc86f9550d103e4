"""What an attention backend is given and what it must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Everything defaults to False: a backend states what it has been tested for."""

    cpu: bool = False
    cuda: bool = False
    sliding_window: bool = False
    mixed_batches: bool = False  # decode rows and prefill chunks in one call
    decode_graph: bool = False  # its decode path may be captured in a CUDA graph
    prefill_graph: bool = False


@dataclass(slots=True)
class AttentionRows:
    """The rows of one step: row i computes tokens [starts[i], starts[i] + lengths[i])."""

    starts: list[int]  # tokens of the row that are in the pool already
    lengths: list[int]  # tokens computed in this step; decode rows (length 1) come first
    block_tables: list[list[int]]  # physical blocks, covering starts[i] + lengths[i] tokens
    num_decode: int  # leading rows of length 1


class AttentionBackend(ABC):
    """Writes keys and values into the paged pool and attends over it.

    One instance serves all layers of a model. `bind` is called once per layer when the pool is allocated; per step,
    `plan` once, then for each layer `write` and `attend`.
    """

    name: str
    capabilities: Capabilities

    @abstractmethod
    def bind(self, pool: torch.Tensor) -> Any:
        """The backend's handle of a layer's pool [num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim]."""

    @abstractmethod
    def plan(self, rows: AttentionRows) -> Any:
        """Everything about the step's rows that all layers share; passed to `write` and `attend`."""

    @abstractmethod
    def write(self, plan: Any, layer: Any, kv: torch.Tensor) -> None:
        """Store the step's kv [tokens, 2 * num_kv_heads, head_dim]: all key heads, then all value heads."""

    @abstractmethod
    def attend(self, plan: Any, layer: Any, q: torch.Tensor, kv: torch.Tensor, window: int | None) -> torch.Tensor:
        """Causal attention of q [tokens, num_heads, head_dim] over the pool, after `write` of the same layer.

        kv is what `write` was given, for use where a row has no earlier tokens. With a window, a token sees
        itself and the window - 1 tokens before it. Returns [tokens, num_heads * head_dim].
        """
