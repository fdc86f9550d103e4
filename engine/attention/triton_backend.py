"""Attention of the Triton kernels: rows are read on the device, so that steps and graphs need nothing of the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionRows, BatchLimits, Capabilities, GraphSelectionMode
from engine.attention.device_backend import DeviceBackend, StepPlan, device_rows
from kernels import jit
from kernels.decode_attention import decode_attention, scratch_for
from kernels.prefill_attention import prefill_attention

_PREFILL_GRAPH_DEVICES = ((9, 0),)  # compute capabilities on which replayed prompts have been tested
MOST_ROWS = 8192  # of a step; the kernels' searches are made for no more


@dataclass(slots=True)
class DecodePart:
    block_tables: torch.Tensor  # int32 [rows, width]
    kv_lens: torch.Tensor  # int32 [rows]


@dataclass(slots=True)
class PrefillPart:
    block_tables: torch.Tensor  # int32 [rows, width]
    kv_lens: torch.Tensor  # int32 [rows]
    cu_seqlens: torch.Tensor  # int32 [rows + 1] among all tokens of the step


class TritonBackend(DeviceBackend):
    """On CUDA devices; on the CPU in Triton's interpreter, for tests. See kernels/decode_attention.py and
    kernels/prefill_attention.py."""

    name = "triton"
    capabilities = Capabilities(
        cpu=jit.available("cpu"),
        cuda=True,
        sliding_window=True,
        mixed_batches=True,
        decode_graph=True,
        prefill_graph=True,
        device_rows=True,
    )

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, device: torch.device, limits: BatchLimits
    ) -> None:
        """Only where `unavailable` has no reason against it."""
        self.device = device
        self.scratch = scratch_for(limits.max_rows, num_heads, num_kv_heads, head_dim, device)

    @staticmethod
    def unavailable(head_dim: int, device: torch.device) -> str:
        """Why the kernels cannot run such a model on the device; empty where they can."""
        if not jit.available(device):
            return "needs Triton and a CUDA device"
        if head_dim % 16 or head_dim > 256:
            return f"needs heads of a multiple of 16 up to 256 (this model: {head_dim})"
        return ""

    def admits(self, *, selection_mode: GraphSelectionMode) -> bool:
        if selection_mode is GraphSelectionMode.PREFILL_GRAPH and self.device.type == "cuda":
            return torch.cuda.get_device_capability(self.device) in _PREFILL_GRAPH_DEVICES
        return super().admits(selection_mode=selection_mode)

    def plan_lasts(self, rows: AttentionRows) -> StepPlan:
        count = device_rows(rows).num_rows
        return StepPlan(count, self.plan_decode(rows, count), None)

    def plan_decode(self, rows: AttentionRows, count: int) -> DecodePart:
        device = device_rows(rows)
        return DecodePart(device.block_tables[:count], device.kv_lens[:count])

    def plan_prefill(self, rows: AttentionRows, first: int) -> PrefillPart:
        device = device_rows(rows)
        return PrefillPart(device.block_tables[first:], device.kv_lens[first:], device.cu_seqlens[first:])

    def attend_decode(
        self, part: DecodePart, layer: torch.Tensor, q: torch.Tensor, window: int | None, out: torch.Tensor
    ) -> None:
        decode_attention(q, layer, part.block_tables, part.kv_lens, window or 0, out=out, scratch=self.scratch)

    def attend_prefill(
        self, part: PrefillPart, layer: torch.Tensor, q: torch.Tensor, window: int | None, first: int, out: torch.Tensor
    ) -> None:
        prefill_attention(q, layer, part.block_tables, part.cu_seqlens, part.kv_lens, window or 0, out=out)
