"""KV pool over torch tensors in host memory. The only module of the package that imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cache_store.layout import GroupLayout
from cache_store.pool import HostKvPool


class TorchKvPool(HostKvPool):
    """A pool over per-layer tensors [num_blocks, 2, num_kv_heads, block_size, head_dim] on the CPU.

    The views alias the tensors' storage, which must stay where it is as long as the pool lives.
    """

    def __init__(self, layouts: Sequence[GroupLayout], layers: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for layout in layouts:
            shape = (2, layout.num_kv_heads, layout.block_size, layout.head_dim)
            for tensor in layers[layout.tag]:
                if tensor.device.type != "cpu" or not tensor.is_contiguous():
                    raise ValueError(f"cache group {layout.tag!r}: tensors must be contiguous and on the CPU")
                if tuple(tensor.shape[1:]) != shape or tensor.dtype is not getattr(torch, layout.dtype):
                    raise ValueError(
                        f"cache group {layout.tag!r}: tensor {tuple(tensor.shape)} {tensor.dtype} is not "
                        f"[num_blocks, {', '.join(map(str, shape))}] {layout.dtype}"
                    )
        buffers = {
            layout.tag: [
                memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data) for tensor in layers[layout.tag]
            ]
            for layout in layouts
        }
        self._keep_alive = {tag: tuple(tensors) for tag, tensors in layers.items()}
        super().__init__(layouts, buffers)
