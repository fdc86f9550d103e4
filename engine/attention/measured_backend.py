"""Several backends of a device behind one: each step's decode rows and prompts go to the one measured fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionRows, Capabilities, GraphSelectionMode
from engine.attention.device_backend import DeviceBackend, StepPlan, device_rows
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.table import Kind, Table
from engine.attention.triton_backend import TritonBackend


@dataclass(slots=True)
class ChosenPart:
    backend: DeviceBackend
    part: Any


class MeasuredBackend(DeviceBackend):
    """Triton's kernels and FlashInfer, which share the pool and its layout.

    A decode graph's rows have lengths that are not known when it is captured: it is of the backend that is faster for
    so many rows over the lengths of the table.
    """

    name = "triton+flashinfer"
    capabilities = Capabilities(
        cuda=True,
        mixed_batches=True,
        decode_graph=True,
        prefill_graph=True,
        device_rows=True,
    )

    def __init__(
        self, triton: TritonBackend, flashinfer: FlashInferBackend, table: Table, *, head_dim: int, group: int
    ) -> None:
        self.triton, self.flashinfer, self.table = triton, flashinfer, table
        self.head_dim, self.group = head_dim, group
        self.backends: dict[str, DeviceBackend] = {triton.name: triton, flashinfer.name: flashinfer}
        self.refreshes = table.chosen_for_graphs(flashinfer.name, self.backends, head_dim=head_dim, group=group)

    def _choose(self, kind: Kind, rows: int, tokens: int) -> DeviceBackend:
        name = self.table.fastest(
            kind, self.backends, head_dim=self.head_dim, group=self.group, rows=rows, tokens=tokens
        )
        return self.backends[name]

    def admits(self, *, selection_mode: GraphSelectionMode) -> bool:
        return self.triton.admits(selection_mode=selection_mode)

    def plan_decode(self, rows: AttentionRows, count: int) -> ChosenPart:
        seen = sum(rows.starts[: rows.num_decode]) // max(1, rows.num_decode) + 1
        backend = self._choose("decode", count, seen)
        return ChosenPart(backend, backend.plan_decode(rows, count))

    def plan_prefill(self, rows: AttentionRows, first: int) -> ChosenPart:
        count = max(1, len(rows.lengths) - first)
        backend = self._choose("prefill", count, sum(rows.lengths[first:]) // count)
        return ChosenPart(backend, backend.plan_prefill(rows, first))

    def graph_plan(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> StepPlan:
        backend: DeviceBackend = self.triton
        if selection_mode is GraphSelectionMode.DECODE_GRAPH:
            count = device_rows(rows).num_rows
            name = self.table.fastest_of_rows(
                "decode", self.backends, head_dim=self.head_dim, group=self.group, rows=count
            )
            backend = self.backends[name]
        plan = backend.graph_plan(rows, selection_mode=selection_mode)
        return StepPlan(
            plan.num_decode,
            None if plan.decode is None else ChosenPart(backend, plan.decode),
            None if plan.prefill is None else ChosenPart(backend, plan.prefill),
        )

    def refresh(self, plan: StepPlan, rows: AttentionRows) -> None:
        assert isinstance(plan.decode, ChosenPart)
        plan.decode.backend.refresh(StepPlan(plan.num_decode, plan.decode.part, None), rows)

    def attend_decode(
        self, part: ChosenPart, layer: torch.Tensor, q: torch.Tensor, window: int | None, out: torch.Tensor
    ) -> None:
        part.backend.attend_decode(part.part, layer, q, window, out)

    def attend_prefill(
        self, part: ChosenPart, layer: torch.Tensor, q: torch.Tensor, window: int | None, first: int, out: torch.Tensor
    ) -> None:
        part.backend.attend_prefill(part.part, layer, q, window, first, out)
