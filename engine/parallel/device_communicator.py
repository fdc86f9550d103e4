"""Ranks on CUDA devices of one host: NCCL, and kernels over peers' memory where they are faster.

Agreements between processes (`all_min`, `barrier`) go over the host, so that a device that is stuck does not decide
whether they end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from engine.parallel.all_reduce_paths import NCCL, ONE_SHOT, SIZES, TWO_SHOT, PathTable, candidates, fastest
from engine.parallel.communicator import (
    START_S,
    CollectiveFailed,
    Communicator,
    HostCommunicator,
    joined,
    wait_event,
)

_CALLS = 20  # of one measured graph
_ROUNDS = 3
_ALIGNMENT = 16  # bytes that the kernels move at a time, on each rank's share

_log = logging.getLogger(__name__)


def connect_devices(rank: int, size: int, store: Any, device: torch.device, timeout_s: float) -> Communicator:
    """See `engine.parallel.communicator.connect`. Ranks that share a device meet on the host."""
    from torch.distributed import PrefixStore, is_nccl_available

    own = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", own)
    try:
        devices = {store.get(f"device/{other}").decode() for other in range(size)}
    except RuntimeError as error:
        raise CollectiveFailed(rank, "connect", "late", max(timeout_s, START_S), str(error)) from error
    if len(devices) == size and is_nccl_available():
        return DeviceCommunicator(rank, size, store, device, timeout_s)
    _log.warning(
        "%d ranks share %d devices: sums go through the host, which is slow, and nothing is captured",
        size,
        len(devices),
    )
    return HostCommunicator(rank, size, PrefixStore("host", store), timeout_s, device=device)


class DeviceCommunicator(HostCommunicator):
    """A device per rank. Sums and gathers of its tensors are enqueued on the current stream."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device, timeout_s: float) -> None:
        """Returns once all ranks are connected and have measured the paths of sums."""
        import torch.distributed as dist

        super().__init__(rank, size, dist.PrefixStore("host", store), timeout_s, device=device)
        self.capturable = True
        # NCCL's own watchdog ends a process without a word; the deadline on the host comes first.
        patience = timedelta(seconds=2 * max(timeout_s, START_S) + 10)
        began = time.monotonic()
        try:
            dist.init_process_group(
                "nccl",
                store=dist.PrefixStore("device", store),
                rank=rank,
                world_size=size,
                timeout=patience,
                device_id=device,
            )
        except RuntimeError as error:
            raise self._failed("connect", error, began) from error
        self._dist = dist
        self._symmetric: torch.Tensor | None = None
        self.paths: tuple[str, ...] = (NCCL,)  # that work here
        self._table = PathTable()
        self._table = self._measured()
        _log.info("paths of sums between the ranks", extra={"paths": dict(zip(SIZES, self._table.paths, strict=False))})

    # -- operations -----------------------------------------------------------------------------------------

    def path(self, size: int) -> str:
        """That a sum of `size` bytes takes."""
        aligned = size % (_ALIGNMENT * self.size) == 0
        return self._table.path(size) if aligned and self._symmetric is not None else NCCL

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            super().all_reduce_(tensor)
            return
        path = self.path(tensor.nbytes)
        if path == NCCL or tensor.dtype != torch.float32:
            self._enqueued("all_reduce", lambda: self._dist.all_reduce(tensor))
        else:
            self._enqueued("all_reduce", lambda: self._sum(path, tensor))

    def gather_last(
        self, tensor: torch.Tensor, columns: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if tensor.device.type == "cpu":
            return super().gather_last(tensor, columns, out)
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        self._enqueued("gather", lambda: self._dist.gather(tensor, parts, dst=0))
        return None if parts is None else joined(parts, columns, out)

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> None:
        if tensor.device.type == "cpu":
            super().broadcast_(tensor, src)
            return
        self._enqueued("broadcast", lambda: self._dist.broadcast(tensor, src))

    def close(self) -> None:
        if self._group is not None and self._dist.is_initialized():
            self._symmetric = None
            # Not destroyed in agreement, which would wait for peers that may be gone
            self._dist.distributed_c10d._abort_process_group()
        super().close()

    def _enqueued(self, operation: str, run: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            run()
        except RuntimeError as error:
            raise self._failed(operation, error, began) from error

    # -- kernels over peers' memory ---------------------------------------------------------------------------

    def _sum(self, path: str, tensor: torch.Tensor) -> None:
        """tensor: float32, contiguous, of no more bytes than were measured. The kernels begin and end with a barrier of
        the devices, so that the buffer may be written again behind them."""
        assert self._symmetric is not None
        flat = tensor.view(-1)
        shared = self._symmetric[: flat.shape[0]]
        shared.copy_(flat)
        operators, group = torch.ops.symm_mem, self._dist.group.WORLD.group_name
        if path == ONE_SHOT:
            operators.one_shot_all_reduce_out(shared, "sum", group, flat)
        elif path == TWO_SHOT:
            operators.two_shot_all_reduce_(shared, "sum", group)
            flat.copy_(shared)
        else:
            raise ValueError(f"{path!r} is no path over peers' memory")

    def _make_symmetric(self) -> bool:
        """Memory that every rank can read. False, on all ranks, where some rank's devices cannot."""
        try:
            import torch.distributed._symmetric_memory as symmetric_memory

            buffer = symmetric_memory.empty(SIZES[-1] // 4, dtype=torch.float32, device=self.device)
            symmetric_memory.rendezvous(buffer, self._dist.group.WORLD.group_name)
        except (ImportError, RuntimeError, AttributeError) as error:
            _log.info("no memory that the ranks' devices can read of each other: %s", error)
            buffer = None
        if not self.all_min(int(buffer is not None)):
            return False
        self._symmetric = buffer
        return True

    def _works(self, path: str) -> bool:
        """Whether a sum by this path is right, on every rank."""
        tensor = torch.full((SIZES[0] // 4,), float(self.rank + 1), device=self.device)
        right = False
        try:
            self._sum(path, tensor)
            self.wait_device()
            right = bool((tensor == self.size * (self.size + 1) / 2).all())
        except (RuntimeError, AttributeError) as error:
            _log.warning("sums by %s do not work here: %s", path, error)
        return bool(self.all_min(int(right)))

    def _measured(self) -> PathTable:
        """The same table on every rank: a path takes as long as it does on the slowest one."""
        self._dist.all_reduce(torch.zeros(1, device=self.device))
        self.wait_device()
        if not self._make_symmetric():
            return PathTable()
        paths = [path for path in candidates(self.size) if path == NCCL or self._works(path)]
        self.paths = tuple(paths)
        return fastest({path: [self.measure(path, size) for size in SIZES] for path in paths})

    def measure(self, path: str, size: int) -> float:
        """Seconds of a sum of `size` bytes by this path, on the slowest rank: inside a graph, where decode steps have
        theirs, so the launches' own time is not in it. All ranks call it. size: with peers' memory, no more than the
        last of SIZES."""
        return -self.all_min(-int(self._seconds(path, size) * 1e9)) / 1e9

    def _seconds(self, path: str, size: int) -> float:
        tensor = torch.zeros(size // 4, device=self.device)

        def run() -> None:
            for _ in range(_CALLS):
                if path == NCCL:
                    self._dist.all_reduce(tensor)
                else:
                    self._sum(path, tensor)

        run()
        self.wait_device()
        self.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        best = float("inf")
        for _ in range(_ROUNDS):
            self.barrier()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            wait_event(self, self.device, self._deadline_s)
            best = min(best, began.elapsed_time(ended) / 1e3 / _CALLS)
        return best
