"""The collective operations of one engine's ranks: sums, gathers and agreements between their processes.

Every rank calls the same operations in the same order; which ones a step has, and how large they are, follows from the
step's order alone. No operation waits longer than its deadline, and one whose peer is gone fails at once: a rank whose
peers are lost ends, it never hangs. With one rank nothing here is used, and torch.distributed is not imported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from rpc.errors import BatonError, ErrorCode

START_S = 60.0  # least deadline until the ranks serve: one may be this much later with its start or its weights
LOOPBACK = "127.0.0.1"  # ranks of one server share a host


class CollectiveFailed(BatonError):
    """A peer did not come, or went away, or the library under it failed. The ranks are out of step for good, so the
    engine has to end: ENGINE_DEAD, with the rank that noticed, the operation, and `late` or `lost`."""

    def __init__(self, rank: int, operation: str, how: str, waited_s: float, detail: str = "") -> None:
        super().__init__(
            ErrorCode.ENGINE_DEAD,
            f"rank {rank} of the engine lost its peers in {operation} after {waited_s:.1f} s ({how})",
            metadata={
                "cause": "collective_failed",
                "rank": str(rank),
                "operation": operation,
                "how": how,
                "detail": detail[:200],
            },
        )


class Communicator(Protocol):
    """The operations of one rank. Belongs to one thread. All but `single()`'s raise CollectiveFailed."""

    rank: int
    size: int
    capturable: bool  # whether operations on the device's tensors may be part of a graph

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place, the same bits on every rank. tensor: contiguous. On a device it is enqueued."""

    def gather_last(
        self, tensor: torch.Tensor, columns: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """tensor: [rows, own], contiguous, the same shape on every rank. On rank 0 the first `columns`, by default all,
        of [rows, size * own] in the order of ranks; None elsewhere. out: for rank 0's result."""

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Every rank's tensor becomes that of rank `src`. Contiguous, of one shape and dtype."""

    def all_min(self, value: int) -> int:
        """The least value that a rank gave."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def wait_device(self) -> None:
        """Waits until the device has done what was enqueued, under the deadline."""

    def begin_serving(self) -> None:
        """From now on the deadline of serving holds in place of the longer one of the start."""

    def close(self) -> None:
        """Gives up the connections; a second call does nothing."""


class SingleRank:
    """The only rank of its engine: everything is here already."""

    rank = 0
    size = 1
    capturable = True

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """The sum over one rank."""

    def gather_last(
        self, tensor: torch.Tensor, columns: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return joined([tensor], columns, out)

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Nobody else has one."""

    def all_min(self, value: int) -> int:
        return value

    def barrier(self) -> None:
        """Nobody to wait for."""

    def wait_device(self) -> None:
        """Whoever needs a result waits for its own event."""

    def begin_serving(self) -> None:
        """There are no deadlines."""

    def close(self) -> None:
        """There is nothing open."""


def single() -> Communicator:
    """For an engine of one process."""
    return SingleRank()


class HostCommunicator:
    """Ranks on one host's processors, by gloo over the loopback address. Tensors of a device travel through the host,
    which is for ranks that share one (NCCL refuses that)."""

    capturable = False

    def __init__(
        self, rank: int, size: int, store: Any, timeout_s: float, *, device: torch.device | None = None
    ) -> None:
        """Returns once all ranks are connected. store: of torch.distributed, common to the ranks; timeout_s: of every
        operation that serves."""
        from torch.distributed import ProcessGroupGloo

        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")
        self.capturable = self.device.type == "cpu"  # where a recording is the calls themselves
        self.timeout_s = timeout_s
        self._deadline_s = max(timeout_s, START_S)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._threads = 1
        options._timeout = timedelta(seconds=self._deadline_s)
        self._group: Any = None
        began = time.monotonic()
        try:
            self._group = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise self._failed("connect", error, began) from error

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        self._wait("all_reduce", tensor, lambda group, host: group.allreduce([host]))

    def gather_last(
        self, tensor: torch.Tensor, columns: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        own = tensor.cpu()
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        self._call("gather", lambda group: group.gather(parts, own, 0))
        return joined([part.to(tensor.device) for part in parts], columns, out) if parts else None

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> None:
        self._wait("broadcast", tensor, lambda group, host: group.broadcast(host, src))

    def all_min(self, value: int) -> int:
        from torch.distributed import ReduceOp

        least = torch.tensor([value], dtype=torch.int64)
        self._call("all_min", lambda group: group.allreduce(least, ReduceOp.MIN))
        return int(least.item())

    def barrier(self) -> None:
        self._call("barrier", lambda group: group.barrier())

    def wait_device(self) -> None:
        if self.device.type == "cuda":
            wait_event(self, self.device, self._deadline_s)

    def begin_serving(self) -> None:
        self._deadline_s = self.timeout_s
        self._group.set_timeout(timedelta(seconds=self.timeout_s))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _wait(self, operation: str, tensor: torch.Tensor, start: Any) -> None:
        if tensor.device.type == "cpu":
            self._call(operation, lambda group: start(group, tensor))
            return
        host = tensor.cpu()
        self._call(operation, lambda group: start(group, host))
        tensor.copy_(host)

    def _call(self, operation: str, start: Any) -> None:
        began = time.monotonic()
        try:
            start(self._group).wait()
        except RuntimeError as error:
            raise self._failed(operation, error, began) from error

    def _failed(self, operation: str, error: Exception, began: float) -> CollectiveFailed:
        waited_s = time.monotonic() - began
        how = "late" if waited_s >= 0.9 * self._deadline_s else "lost"
        return CollectiveFailed(self.rank, operation, how, waited_s, str(error))


def joined(parts: Sequence[torch.Tensor], columns: int | None, out: torch.Tensor | None) -> torch.Tensor:
    """The first `columns` of parts [rows, own] side by side, in one copy."""
    own = parts[0].shape[1]
    columns = len(parts) * own if columns is None else columns
    cut = [part[:, : max(0, columns - index * own)] for index, part in enumerate(parts)]
    return torch.cat(cut, dim=1) if out is None else torch.cat(cut, dim=1, out=out)


def connect(rank: int, size: int, meeting: str, device: torch.device, timeout_s: float) -> Communicator:
    """The communicator of one rank; returns once all ranks have called it.

    meeting: path of an empty file, common to the ranks of one engine and to nobody else, in which they find each other.
    device: what this rank computes on. timeout_s: of every operation that serves. Raises
    CollectiveFailed.
    """
    if size == 1:
        return single()
    from torch.distributed import FileStore, PrefixStore

    store = FileStore(meeting, size)
    store.set_timeout(timedelta(seconds=max(timeout_s, START_S)))
    if device.type == "cpu":
        return HostCommunicator(rank, size, PrefixStore("host", store), timeout_s)
    from engine.parallel.device_communicator import connect_devices

    return connect_devices(rank, size, store, device, timeout_s)


def wait_event(communicator: Communicator, device: torch.device, deadline_s: float) -> None:
    """Waits for what was enqueued on the device's current stream, which a lost peer would hold up for ever."""
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    began = time.monotonic()
    pause_s = 0.0
    while not done.query():
        waited_s = time.monotonic() - began
        if waited_s > deadline_s:
            raise CollectiveFailed(communicator.rank, "device", "late", waited_s)
        # Steps of milliseconds are found at once; a stuck one does not keep a processor busy
        pause_s = 0.0 if waited_s < 0.05 else min(0.01, pause_s + 0.0005)
        time.sleep(pause_s)
