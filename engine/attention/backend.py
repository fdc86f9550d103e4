"""What an attention backend is given and what it must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch


class GraphSelectionMode(StrEnum):
    """What a plan is for: one eager step, or the replays of a captured graph."""

    EAGER = "eager"
    DECODE_GRAPH = "decode_graph"
    PREFILL_GRAPH = "prefill_graph"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Everything defaults to False: a backend states what it has been tested for."""

    cpu: bool = False
    cuda: bool = False
    sliding_window: bool = False
    mixed_batches: bool = False  # decode rows and prefill chunks in one call
    decode_graph: bool = False  # its decode path may be captured in a CUDA graph
    prefill_graph: bool = False
    device_rows: bool = False  # reads DeviceRows, and leaves the writing of keys and values to the fused QKV kernel


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest step, for which a backend of a device allocates its scratch memory once."""

    max_rows: int
    max_tokens: int
    max_blocks: int  # entries of one row's block table


@dataclass(slots=True)
class DeviceRows:
    """The rows of a step on the device.

    Every tensor may be a view of a larger buffer, and in a captured graph keeps its address. Shapes are those of the
    padded batch; a row that only pads has kv_lens 0 and slots -1, and its entries of the block table are 0.
    """

    cu_seqlens: torch.Tensor  # int32 [rows + 1] first token of each row among the step's tokens, and their number
    cu_kv_seqlens: torch.Tensor  # int32 [rows + 1] the same for tokens seen, those of this step included
    kv_lens: torch.Tensor  # int32 [rows] tokens seen by each row's last token
    slots: torch.Tensor  # int64 [tokens] block * block_size + offset where a token's KV is stored; -1: nowhere
    block_tables: torch.Tensor  # int32 [rows, width]; the stride of rows may be larger than the width
    max_q: int  # no row computes more tokens than this
    max_kv: int  # no row sees more tokens than this

    @property
    def num_rows(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]


@dataclass(slots=True)
class AttentionRows:
    """The rows of one step: row i computes tokens [starts[i], starts[i] + lengths[i])."""

    starts: list[int]  # tokens of the row that are in the pool already
    lengths: list[int]  # tokens computed in this step; decode rows (length 1) come first
    block_tables: list[list[int]]  # physical blocks, covering starts[i] + lengths[i] tokens
    num_decode: int  # leading rows of length 1
    device: DeviceRows | None = None  # for backends with `device_rows`; it counts padded rows, the lists above do not


class AttentionBackend(ABC):
    """Writes keys and values into the paged pool and attends over it.

    One instance serves all layers of a model. `bind` is called once per layer when the pool is allocated; per step,
    `plan` once, then for each layer `write` and `attend`. Where `device_rows` is among the capabilities `write` is
    not called: the kernel that rotates queries and keys stores keys and values too.
    """

    name: str
    capabilities: Capabilities
    most_graph_plans: int = 1  # that `graph_plans` gives

    @abstractmethod
    def bind(self, pool: torch.Tensor) -> Any:
        """The backend's handle of a layer's pool [num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim]."""

    @abstractmethod
    def plan(self, rows: AttentionRows) -> Any:
        """Everything about the step's rows that all layers share; passed to `write` and `attend`."""

    def plan_lasts(self, rows: AttentionRows) -> Any | None:
        """A plan for `attend` alone, of the last token of every row: q [rows, num_heads, head_dim]. It may stand beside
        the plan of the same rows. None: there is none, and `attend` is called with all tokens."""
        return None

    def admits(self, *, selection_mode: GraphSelectionMode) -> bool:
        """Whether its calls may be part of a graph of that kind."""
        match selection_mode:
            case GraphSelectionMode.EAGER:
                return True
            case GraphSelectionMode.DECODE_GRAPH:
                return self.capabilities.decode_graph
            case GraphSelectionMode.PREFILL_GRAPH:
                return self.capabilities.prefill_graph
        raise ValueError(f"{selection_mode!r} is no selection mode")

    def graph_plan(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> Any:
        """A plan that a graph is captured with. rows.device holds the graph's own buffers, whose contents change
        from replay to replay while rows and tokens stay as many; max_q and max_kv bound all of them, and the host
        lists are those of the capture alone. Only where `admits` says so.
        """
        raise NotImplementedError(f"attention backend {self.name} cannot be captured in a {selection_mode.value}")

    def graph_plans(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> list[Any]:
        """The plans of as many graphs, of which `pick` chooses one for each replay."""
        return [self.graph_plan(rows, selection_mode=selection_mode)]

    def pick(self, plans: Sequence[Any], rows: AttentionRows) -> int:
        """Which of `plans`, those of one `graph_plans`, suits a step's rows best: the host lists tell. An index."""
        return 0

    def begin(self, plan: Any) -> None:  # noqa: B027 - most backends have nothing to do
        """At the beginning of a graph with `plan`, and recorded with it: launches on rows.device that all layers share.
        The rows have been filled."""

    def refresh(self, plan: Any, rows: AttentionRows) -> None:  # noqa: B027 - most backends have nothing to do
        """Before each replay of a graph with `plan`: what has to be planned for the step's rows on the host, whose
        lists are the step's own, without padding. rows.device need not be filled yet."""

    def write(self, plan: Any, layer: Any, kv: torch.Tensor) -> None:
        """Store the step's kv [tokens, 2 * num_kv_heads, head_dim]: all key heads, then all value heads."""
        raise NotImplementedError(f"attention backend {self.name} leaves writing to the fused kernel")

    @abstractmethod
    def attend(self, plan: Any, layer: Any, q: torch.Tensor, kv: torch.Tensor, window: int | None) -> torch.Tensor:
        """Causal attention of q [tokens, num_heads, head_dim] over the pool, after `write` of the same layer.

        kv is what `write` was given, for use where a row has no earlier tokens; rows of both may lie apart. With a
        window, a token sees itself and the window - 1 tokens before it. Returns [tokens, num_heads * head_dim].
        """
