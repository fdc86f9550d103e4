"""Recording of launches for replay: a CUDA graph on a device; on the CPU, for tests, the calls themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Recording(Protocol):
    def replay(self) -> None:
        """Enqueues everything that was recorded on the current stream. Reads and writes the same addresses."""


class Recorder(Protocol):
    """Records the graphs of one runner. They share memory, so their replays must not overlap, and what one leaves in
    memory that was made while it was recorded is valid until the next one's replay."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """Runs it once as it will be recorded, and waits for the device."""

    def record(self, run: Callable[[], Result], name: str) -> tuple[Recording, Result]:
        """The recording of run() and what it returned. name: for the debug dump."""

    def memory_bytes(self) -> int:
        """Device memory that the recordings take, as far as the device tells."""

    def settle(self) -> None:
        """Waits for the device."""


class CudaRecorder:
    """CUDA graphs with one memory pool, recorded on a stream of their own.

    Other threads may use CUDA meanwhile: only this thread's calls are recorded, and only they are checked.
    """

    def __init__(self, device: torch.device, debug_folder: Path | None = None) -> None:
        """debug_folder: where each graph is written as a DOT file."""
        self.device = device
        self.debug_folder = debug_folder
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._free_before = torch.cuda.mem_get_info(device)[0]
        self._reserved_before = torch.cuda.memory_reserved(device)

    def warm_up(self, run: Callable[[], Result]) -> Result:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            result = run()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        torch.cuda.synchronize(self.device)
        return result

    def record(self, run: Callable[[], Result], name: str) -> tuple[Recording, Result]:
        debug = self.debug_folder is not None
        graph = torch.cuda.CUDAGraph(keep_graph=debug)
        if debug:
            graph.enable_debug_mode()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        if self.debug_folder is not None:
            self.debug_folder.mkdir(parents=True, exist_ok=True)
            graph.debug_dump(str(self.debug_folder / f"{name}.dot"))
            graph.instantiate()
        return graph, result

    def memory_bytes(self) -> int:
        # What the device lost includes the graphs themselves, and what other processes took or gave back meanwhile;
        # the allocator's share is this process's own.
        taken = torch.cuda.memory_reserved(self.device) - self._reserved_before
        return max(0, taken, self._free_before - torch.cuda.mem_get_info(self.device)[0])

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


class _Calls:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class HostRecorder:
    """A replay runs the recorded function again. Its results lie where the first ones lay only if it writes them to
    given memory, as whatever is recorded has to."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        return run()

    def record(self, run: Callable[[], Result], name: str) -> tuple[Recording, Result]:
        result = run()
        return _Calls(run), result

    def memory_bytes(self) -> int:
        return 0

    def settle(self) -> None:
        """Nothing runs behind the caller's back here."""


def recorder_for(device: torch.device, debug_folder: Path | None = None) -> Recorder:
    return CudaRecorder(device, debug_folder) if device.type == "cuda" else HostRecorder()
