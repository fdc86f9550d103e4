"""Rows of a step as backends on a device are given them, over shuffled blocks."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionRows, DeviceRows


def step_rows(
    spans: list[tuple[int, int]], device: torch.device, *, block_size: int, pads: int = 0, width: int = 0
) -> AttentionRows:
    """Rows of (start, length), and `pads` rows on the device that only pad, with a token each.

    The blocks are 1 to their number. width: of the block tables, default what the longest row needs.
    """
    lengths = [length for _, length in spans]
    kv_lens = [start + length for start, length in spans]
    needed = [-(-length // block_size) for length in kv_lens]
    order = iter((torch.randperm(sum(needed)) + 1).tolist())
    blocks = [[next(order) for _ in range(count)] for count in needed]
    table = torch.zeros(len(spans) + pads, width or max(needed), dtype=torch.int32)
    for row, own in enumerate(blocks):
        table[row, : len(own)] = torch.tensor(own)

    def sums(values: list[int]) -> torch.Tensor:
        return torch.tensor([0, *values]).cumsum(0).to(device, torch.int32)

    num_decode = next((row for row, length in enumerate(lengths) if length != 1), len(spans))
    return AttentionRows(
        starts=[start for start, _ in spans],
        lengths=lengths,
        block_tables=blocks,
        num_decode=num_decode,
        device=DeviceRows(
            cu_seqlens=sums([*lengths, *[1] * pads]),
            cu_kv_seqlens=sums([*kv_lens, *[0] * pads]),
            kv_lens=torch.tensor([*kv_lens, *[0] * pads], dtype=torch.int32, device=device),
            slots=torch.full((sum(lengths) + pads,), -1, device=device),
            block_tables=table.to(device),
            max_q=max(lengths),
            max_kv=max(kv_lens),
        ),
    )
