"""Paged attention in plain PyTorch: the CPU backend, and the reference for the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, AttentionRows, Capabilities


@dataclass(slots=True)
class TorchPlan:
    blocks: torch.Tensor  # [tokens] block of each token's slot
    offsets: torch.Tensor  # [tokens] position inside it
    rows: AttentionRows
    tables: list[torch.Tensor]  # per row [blocks]
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)


class TorchBackend(AttentionBackend):
    name = "torch"
    capabilities = Capabilities(cpu=True, cuda=True, sliding_window=True, mixed_batches=True)

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size

    def plan(self, rows: AttentionRows, device: torch.device) -> TorchPlan:
        size = self.block_size
        blocks: list[int] = []
        offsets: list[int] = []
        for start, length, table in zip(rows.starts, rows.lengths, rows.block_tables, strict=True):
            for position in range(start, start + length):
                blocks.append(table[position // size])
                offsets.append(position % size)
        tables = [
            torch.tensor(table[: (start + length + size - 1) // size], device=device)
            for start, length, table in zip(rows.starts, rows.lengths, rows.block_tables, strict=True)
        ]
        return TorchPlan(
            torch.tensor(blocks, device=device), torch.tensor(offsets, device=device), rows, tables
        )

    def write(self, plan: TorchPlan, pool: torch.Tensor, kv: torch.Tensor) -> None:
        slots = pool.permute(0, 3, 1, 2, 4)  # [blocks, block_size, 2, kv_heads, head_dim]
        slots[plan.blocks, plan.offsets] = kv.view(-1, 2, self.num_kv_heads, self.head_dim)

    def attend(
        self, plan: TorchPlan, pool: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        first = 0
        for row, (start, length) in enumerate(zip(plan.rows.starts, plan.rows.lengths, strict=True)):
            total = start + length
            held = pool[plan.tables[row]]  # [blocks, 2, kv_heads, block_size, head_dim]
            held = held.permute(1, 2, 0, 3, 4).reshape(2, self.num_kv_heads, -1, self.head_dim)[:, :, :total]
            key, value = held
            mask = self._mask(plan, row, window)
            result = F.scaled_dot_product_attention(
                q[first : first + length].transpose(0, 1).unsqueeze(0),
                key.unsqueeze(0),
                value.unsqueeze(0),
                attn_mask=mask,
                enable_gqa=True,
            )  # [1, heads, length, head_dim]
            out[first : first + length] = result[0].transpose(0, 1)
            first += length
        return out.view(out.shape[0], -1)

    def _mask(self, plan: TorchPlan, row: int, window: int | None) -> torch.Tensor:
        """[length, total], True where the token may look."""
        mask = plan.masks.get((row, window))
        if mask is None:
            start, length = plan.rows.starts[row], plan.rows.lengths[row]
            query = torch.arange(start, start + length).unsqueeze(1)
            key = torch.arange(start + length).unsqueeze(0)
            mask = key <= query
            if window is not None:
                mask &= key > query - window
            plan.masks[row, window] = mask
        return mask
