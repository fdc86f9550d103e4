"""KV pool over torch tensors on a CUDA device: streams, pinned memory, and memory of other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from cache_store.geometry.layout import GroupLayout
from cache_store.memory import cuda_ipc, regions
from cache_store.memory.pool import StagedKvPool
from cache_store.memory.regions import Regions
from cache_store.memory.staging import MemoryUnavailable, Ticket
from cache_store.memory.stream_copies import StreamCopyEngine, as_rows
from cache_store.memory.torch_pool import check_layers
from protos import cache_store_pb2 as pb

KIND = "cuda"


class RowKernels(Protocol):
    """How scattered rows are moved within the device, on the current stream."""

    def gather_rows(self, rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = rows[numbers[i]]; rows: [any, words], out: [n, words], numbers: int64 [n] on the device."""
        ...

    def scatter_rows(self, rows: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
        """rows[numbers[i]] = source[i]; numbers are distinct."""
        ...


class TorchRowKernels:
    """`RowKernels` of PyTorch."""

    def gather_rows(self, rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(rows, 0, numbers, out=out)

    def scatter_rows(self, rows: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
        rows.index_copy_(0, numbers, source)


class CudaKvPool(StagedKvPool):
    """A pool over per-layer tensors [num_blocks, 2, num_kv_heads, block_size, head_dim] of one CUDA device.

    The tensors' memory must stay where it is as long as the pool lives. Costs pinned host memory of 2 x
    `AgentSettings.staging_slots` events, and about 40 MiB of the device.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        layers: Mapping[str, Sequence[torch.Tensor]],
        kernels: RowKernels | None = None,
    ) -> None:
        """kernels: in place of PyTorch's. They are run once here, on the reserved block, since a kernel may be compiled
        at its first use."""
        check_layers(layouts, layers, "cuda")
        devices = {tensor.device for tensors in layers.values() for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"the KV tensors are on several devices: {sorted(map(str, devices))}")
        places = {(tag, layer): tensor for tag, tensors in layers.items() for layer, tensor in enumerate(tensors)}
        kernels, device = kernels or TorchRowKernels(), devices.pop()
        with torch.inference_mode():
            for layout in layouts:
                block = as_rows(layers[layout.tag][0][:1].view(-1).view(torch.uint8), layout.block_bytes)
                number, copy = torch.zeros(1, dtype=torch.int64, device=block.device), torch.empty_like(block)
                kernels.gather_rows(block, number, copy)
                kernels.scatter_rows(block, number, copy)
        super().__init__(
            {layout.tag: layers[layout.tag][0].shape[0] for layout in layouts},
            StreamCopyEngine(CudaDevice(device, kernels), places),
            _regions(places, device),
        )


def _regions(places: Mapping[tuple[str, int], torch.Tensor], device: torch.device) -> Regions:
    def attach() -> None:
        # The current device is the thread's own, and its context is there with its first use.
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).query()

    number = device.index if device.index is not None else torch.cuda.current_device()
    return Regions(
        regions.CUDA,
        {place: tensor.numel() * tensor.element_size() for place, tensor in places.items()},
        addresses={place: tensor.data_ptr() for place, tensor in places.items()},
        device=number,
        attach=attach,
    )


class _Event:
    """A ticket that is a CUDA event. Its wait sleeps; it neither spins nor holds the interpreter lock."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class _Stream:
    def __init__(self, device: torch.device, kernels: RowKernels) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kernels = kernels

    def wait(self, after: Ticket) -> None:
        assert isinstance(after, _Event)
        self._stream.wait_event(after.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def gather(self, rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._kernels.gather_rows(rows, numbers, out)

    def scatter(self, rows: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._kernels.scatter_rows(rows, numbers, source)

    def record(self) -> Ticket:
        return _Event(self._stream)


class CudaDevice:
    """`stream_copies.Device` of CUDA."""

    def __init__(self, device: torch.device, kernels: RowKernels) -> None:
        self._device = device
        self._kernels = kernels

    def stream(self) -> _Stream:
        return _Stream(self._device, self._kernels)

    def mark(self) -> Ticket:
        return _Event(torch.cuda.current_stream(self._device))

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def share(self, layers: Mapping[tuple[str, int], torch.Tensor]) -> pb.SharedPool:
        shared, exports = pb.SharedPool(kind=KIND), cuda_ipc.Exports()
        with torch.cuda.device(self._device):
            for (group, layer), tensor in layers.items():
                handle, offset = exports.locate(tensor.data_ptr())
                shared.layers.add(group=group, layer=layer, handle=handle, offset=offset, bytes=tensor.numel())
        return shared

    def open(self, memory: pb.SharedPool) -> CudaPeer:
        if memory.kind != KIND:
            raise MemoryUnavailable(f"the peer's memory is of kind {memory.kind[:32]!r}, this one is {KIND!r}")
        return CudaPeer(memory, self._device)


class _Span:
    """Device memory that torch did not allocate, by the protocol that `torch.as_tensor` reads."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class CudaPeer:
    """Layers of another process's pool on this device: uint8 [bytes] each, for reading."""

    def __init__(self, memory: pb.SharedPool, device: torch.device) -> None:
        self.layers: dict[tuple[str, int], torch.Tensor] = {}
        self._handles: list[bytes] = []
        self._device = device
        try:
            with torch.cuda.device(device):
                # The driver's calls need a context, which a thread gets with its first use of the device.
                torch.cuda.current_stream(device).query()
                for layer in memory.layers:
                    base = cuda_ipc.open_handle(layer.handle)
                    self._handles.append(layer.handle)
                    span = torch.as_tensor(_Span(base + layer.offset, layer.bytes))
                    if span.device != device:
                        raise MemoryUnavailable(f"the peer's memory is on {span.device}, this engine's on {device}")
                    self.layers[layer.group, layer.layer] = span
        except MemoryUnavailable:
            self.close()
            raise

    def close(self) -> None:
        self.layers.clear()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).query()
            while self._handles:
                cuda_ipc.close_handle(self._handles.pop())
