"""What backends on a device have in common: a step's decode rows and its prompts' chunks are planned and run apart."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionBackend, AttentionRows, DeviceRows, GraphSelectionMode


@dataclass(slots=True)
class StepPlan:
    """The first `num_decode` tokens and rows are decode rows; the others are chunks."""

    num_decode: int
    decode: Any | None  # of `plan_decode`; None: no such rows
    prefill: Any | None  # of `plan_prefill`


def device_rows(rows: AttentionRows) -> DeviceRows:
    """The step's rows on the device, which such backends need."""
    if rows.device is None:
        raise ValueError("this attention backend reads DeviceRows")
    return rows.device


def decode_rows(rows: AttentionRows) -> int:
    """How many of the step's rows on the device, from the first on, are decode rows. Where no row is a chunk, rows that
    only pad are, too."""
    return device_rows(rows).num_tokens if 0 < rows.num_decode == len(rows.lengths) else rows.num_decode


class DeviceBackend(AttentionBackend):
    """Reads DeviceRows, and attends straight from the pool."""

    def list_rows(self, rows: AttentionRows) -> None:
        """Once per step, before its parts are planned: what they share."""

    @abstractmethod
    def plan_decode(self, rows: AttentionRows, count: int) -> Any:
        """For the first `count` rows, of one token each; those beyond the host's lists only pad."""

    @abstractmethod
    def plan_prefill(self, rows: AttentionRows, first: int) -> Any:
        """For the rows from `first` on."""

    @abstractmethod
    def attend_decode(
        self, part: Any, layer: torch.Tensor, q: torch.Tensor, window: int | None, out: torch.Tensor
    ) -> None:
        """q, out: [decode rows, heads, head_dim]."""

    @abstractmethod
    def attend_prefill(
        self, part: Any, layer: torch.Tensor, q: torch.Tensor, window: int | None, first: int, out: torch.Tensor
    ) -> None:
        """q, out: [tokens of the step, heads, head_dim], of which those from `first` on are the chunks'."""

    def bind(self, pool: torch.Tensor) -> torch.Tensor:
        return pool

    def plan(self, rows: AttentionRows) -> StepPlan:
        decode = decode_rows(rows)
        self.list_rows(rows)
        return StepPlan(
            decode,
            self.plan_decode(rows, decode) if decode else None,
            self.plan_prefill(rows, decode) if decode < device_rows(rows).num_rows else None,
        )

    def graph_plan(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> StepPlan:
        if selection_mode is GraphSelectionMode.EAGER or not self.admits(selection_mode=selection_mode):
            raise NotImplementedError(f"attention backend {self.name} cannot be captured in a {selection_mode.value}")
        return self.plan(rows)

    def attend(
        self, plan: StepPlan, layer: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        tokens, heads, dim = q.shape
        out = q.new_empty(tokens, heads, dim)
        count = plan.num_decode
        if plan.decode is not None:
            self.attend_decode(plan.decode, layer, q[:count], window, out[:count])
        if plan.prefill is not None:
            self.attend_prefill(plan.prefill, layer, q, window, count, out)
        return out.view(tokens, heads * dim)
