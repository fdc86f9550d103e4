"""KV pool over torch tensors in host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from cache_store.geometry.layout import GroupLayout
from cache_store.memory.pool import HostKvPool
from cache_store.memory.shared_memory import MemoryFile


class SharedLayers:
    """KV tensors in memory that other processes of this machine can read. `files`: by cache group one per layer."""

    def __init__(self) -> None:
        self.files: dict[str, list[MemoryFile]] = {}

    def zeros(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next layer of a group, contiguous. Raises OSError where there is no memory."""
        file = MemoryFile(math.prod(shape) * dtype.itemsize)
        self.files.setdefault(tag, []).append(file)
        return torch.frombuffer(file.view, dtype=dtype).view(*shape)


class TorchKvPool(HostKvPool):
    """A pool over per-layer tensors [num_blocks, 2, num_kv_heads, block_size, head_dim] on the CPU.

    The views alias the tensors' storage, which must stay where it is as long as the pool lives. `shared`: of what the
    tensors were made, where other processes may read them.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        layers: Mapping[str, Sequence[torch.Tensor]],
        shared: SharedLayers | None = None,
    ) -> None:
        check_layers(layouts, layers, "cpu")
        buffers = {
            layout.tag: [
                memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data) for tensor in layers[layout.tag]
            ]
            for layout in layouts
        }
        self._keep_alive = {tag: tuple(tensors) for tag, tensors in layers.items()}
        super().__init__(layouts, buffers, shared.files if shared is not None else None)


def check_layers(
    layouts: Sequence[GroupLayout], layers: Mapping[str, Sequence[torch.Tensor]], device_type: str
) -> None:
    """Raises ValueError unless every group has its layers, all of one size, contiguous and on such a device."""
    for layout in layouts:
        shape = (2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        if len({tensor.shape[0] for tensor in layers[layout.tag]}) > 1 or len(layers[layout.tag]) != layout.num_layers:
            raise ValueError(f"cache group {layout.tag!r}: not {layout.num_layers} layers of one size")
        for tensor in layers[layout.tag]:
            if tensor.device.type != device_type or not tensor.is_contiguous():
                raise ValueError(f"cache group {layout.tag!r}: tensors must be contiguous and on {device_type}")
            if tuple(tensor.shape[1:]) != shape or tensor.dtype is not getattr(torch, layout.dtype):
                raise ValueError(
                    f"cache group {layout.tag!r}: tensor {tuple(tensor.shape)} {tensor.dtype} is not "
                    f"[num_blocks, {', '.join(map(str, shape))}] {layout.dtype}"
                )
