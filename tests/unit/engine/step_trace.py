"""What a step launches and copies, seen on the CPU: kernels by name, PyTorch's operations, and ways over the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runner.device_steps import DeviceSteps

_NO_LAUNCH = ("aten.empty", "aten.detach", "aten.alias", "aten.lift")  # beside views
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")  # the host waits for a number


@dataclass
class StepTrace:
    """In the order of their launch."""

    launches: list[str] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # target's and source's storage, bytes

    def named_copies(self, steps: DeviceSteps) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Bytes of the copies to the device and to the host, by the host memory that they use. On the CPU it is known
        by its name alone."""
        host = host_memory(steps)
        to_device: dict[str, list[int]] = {}
        to_host: dict[str, list[int]] = {}
        for target, source, size in self.copies:
            if target in host:
                to_host.setdefault(host[target], []).append(size)
            elif source in host:
                to_device.setdefault(host[source], []).append(size)
        return to_device, to_host


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def host_memory(steps: DeviceSteps) -> dict[int, str]:
    """Storages that are in pinned host memory where there is a device, and what they are for."""
    sampler = steps.sampler
    found = {storage(staging.words): "inputs" for staging in steps.inputs._staging}
    found |= {storage(staging.words): "sampling" for staging in sampler._stagings}
    found |= {storage(outbox.outcome): "tokens and flags" for outbox in sampler._outboxes}
    found |= {storage(outbox.found): "log-probabilities" for outbox in sampler._outboxes if outbox.found is not None}
    found[storage(steps._finite._host)] = "finite"
    if steps.prefill_graphs is not None:
        assert steps.prefill_graphs._copies is not None
        found |= {storage(buffer): "prompts" for buffer in steps.prefill_graphs._copies.buffers}
    return found


class _Operations(TorchDispatchMode):
    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not func.is_view and not name.startswith(_NO_LAUNCH):
            self.trace.launches.append(name)
            if name.startswith("aten.copy_"):
                target, source = args[:2]
                self.trace.copies.append((storage(target), storage(source), target.numel() * target.element_size()))
        return func(*args, **(kwargs or {}))


@contextmanager
def traced_step() -> Iterator[StepTrace]:
    """Kernels are launched by name alone, and compute nothing; whoever compares what they leave finds it equal."""
    from triton.runtime import interpreter

    trace = StepTrace()
    run, equal = interpreter.GridExecutor.__call__, torch.equal

    def note(executor: Any, *args: Any, **options: Any) -> None:
        trace.launches.append(executor.fn.__name__)

    interpreter.GridExecutor.__call__, torch.equal = note, lambda left, right: left.shape == right.shape
    try:
        with _Operations(trace):
            yield trace
    finally:
        interpreter.GridExecutor.__call__, torch.equal = run, equal
