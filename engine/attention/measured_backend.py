"""Several backends of a device behind one: each step's decode rows and prompts go to the one measured fastest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionRows, Capabilities, GraphSelectionMode
from engine.attention.device_backend import DeviceBackend, StepPlan, decode_rows, device_rows
from engine.attention.table import Heads, Kind, Table


@dataclass(slots=True)
class ChosenPart:
    backend: DeviceBackend
    part: Any


class MeasuredBackend(DeviceBackend):
    """Triton's kernels and FlashInfer, which share the pool and its layout.

    A decode graph's rows have lengths that are not known when it is captured. Where each backend is the faster one for
    some lengths of so many rows, the graph exists twice, and each step replays the one that suits its rows.
    """

    name = "triton+flashinfer"
    capabilities = Capabilities(
        cuda=True,
        mixed_batches=True,
        decode_graph=True,
        prefill_graph=True,
        device_rows=True,
    )
    most_graph_plans = 2

    def __init__(self, triton: DeviceBackend, flashinfer: DeviceBackend, table: Table, heads: Heads) -> None:
        self.triton, self.flashinfer, self.table, self.heads = triton, flashinfer, table, heads
        self.backends: dict[str, DeviceBackend] = {triton.name: triton, flashinfer.name: flashinfer}

    def _fastest(self, kind: Kind, rows: int, tokens: int, among: Collection[str]) -> DeviceBackend:
        return self.backends[self.table.fastest(kind, among, self.heads, rows, tokens)]

    def _of_decode(self, rows: AttentionRows, count: int, among: Collection[str]) -> DeviceBackend:
        seen = sum(rows.starts[: rows.num_decode]) // max(1, rows.num_decode) + 1
        return self._fastest("decode", count, seen, among)

    def _of_prefill(self, rows: AttentionRows, first: int) -> DeviceBackend:
        count = max(1, len(rows.lengths) - first)
        return self._fastest("prefill", count, sum(rows.lengths[first:]) // count, self.backends)

    def admits(self, *, selection_mode: GraphSelectionMode) -> bool:
        return self.triton.admits(selection_mode=selection_mode)

    def list_rows(self, rows: AttentionRows) -> None:
        first = decode_rows(rows)
        chosen = [self._of_decode(rows, first, self.backends)] if first else []
        if first < device_rows(rows).num_rows:
            chosen.append(self._of_prefill(rows, first))
        for backend in dict.fromkeys(chosen):
            backend.list_rows(rows)

    def plan_lasts(self, rows: AttentionRows) -> StepPlan:
        """By Triton's kernels: a plan of FlashInfer's would take the place of the one it has of these rows."""
        plan: StepPlan = self.triton.plan_lasts(rows)  # type: ignore[assignment]  # it has one
        return StepPlan(plan.num_decode, ChosenPart(self.triton, plan.decode), None)

    def plan_decode(self, rows: AttentionRows, count: int) -> ChosenPart:
        backend = self._of_decode(rows, count, self.backends)
        return ChosenPart(backend, backend.plan_decode(rows, count))

    def plan_prefill(self, rows: AttentionRows, first: int) -> ChosenPart:
        backend = self._of_prefill(rows, first)
        return ChosenPart(backend, backend.plan_prefill(rows, first))

    def graph_plan(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> StepPlan:
        """Of Triton's kernels, which every kind of graph may hold."""
        return self._chosen(self.triton, rows, selection_mode)

    def graph_plans(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> list[StepPlan]:
        if selection_mode is not GraphSelectionMode.DECODE_GRAPH:
            return [self.graph_plan(rows, selection_mode=selection_mode)]
        device = device_rows(rows)
        names = self.table.winners("decode", self.backends, self.heads, device.num_rows, device.max_kv)
        return [self._chosen(self.backends[name], rows, selection_mode) for name in names]

    def _chosen(self, backend: DeviceBackend, rows: AttentionRows, selection_mode: GraphSelectionMode) -> StepPlan:
        plan = backend.graph_plan(rows, selection_mode=selection_mode)
        return StepPlan(
            plan.num_decode,
            None if plan.decode is None else ChosenPart(backend, plan.decode),
            None if plan.prefill is None else ChosenPart(backend, plan.prefill),
        )

    def pick(self, plans: Sequence[StepPlan], rows: AttentionRows) -> int:
        if len(plans) == 1:
            return 0
        names = [plan.decode.backend.name for plan in plans if isinstance(plan.decode, ChosenPart)]
        return names.index(self._of_decode(rows, plans[0].num_decode, names).name)

    def begin(self, plan: StepPlan) -> None:
        if isinstance(plan.decode, ChosenPart):
            plan.decode.backend.begin(StepPlan(plan.num_decode, plan.decode.part, None))

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
