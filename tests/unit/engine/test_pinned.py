"""Arrays on their way through pinned memory, with doubles in place of a device's events and copies: on a device nothing
is copied before its stream comes to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.runner import pinned
from engine.runner.pinned import PinnedStaging


class LateDevice:
    """Copies are made when somebody waits for an event behind them, and read the memory as it is then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0
        device = self

        class Event:
            end = 0

            def record(self) -> None:
                self.end = device.enqueued

            def synchronize(self) -> None:
                device.waits += 1
                device.run_until(self.end)

        self.enqueued = self.done = 0
        copy, empty = torch.Tensor.copy_, torch.empty

        def late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            device.queue.append((target, source))
            device.enqueued += 1
            return target

        self._copy = copy
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "copy_", late)
        monkeypatch.setattr(pinned.torch, "empty", lambda size, dtype, pin_memory=False: empty(size, dtype=dtype))

    def run_until(self, end: int) -> None:
        while self.done < end:
            target, source = self.queue.pop(0)
            self._copy(target, source)
            self.done += 1


def arrays(number: int, rows: int) -> list[np.ndarray[Any, Any]]:
    """Of two types, and sizes that end anywhere."""
    counted = np.arange(rows * 3, dtype=np.float32) + 1000 * number
    return [np.arange(5 + number, dtype=np.int32) - number, counted.reshape(rows, 3), np.zeros((0, 3), np.float32)]


def test_arrays_when_several_calls_are_under_way_then_each_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    staging = PinnedStaging(torch.device("cuda"))
    sent: list[tuple[list[np.ndarray[Any, Any]], list[torch.Tensor]]] = []
    for number, rows in enumerate((1, 2, 3, 40, 2, 1)):  # it needs more memory, and then less
        given = arrays(number, rows)
        targets = [torch.full(array.shape, -7, dtype=torch.from_numpy(array).dtype) for array in given]
        staging.send(list(zip(given, targets, strict=True)))
        sent.append(([array.copy() for array in given], targets))
        for array in given:
            array.fill(0)  # the arrays are free to change
        assert device.enqueued - device.done <= 2 * 3  # two calls at the most wait for the device
    device.run_until(device.enqueued)
    for expected, targets in sent:
        for array, target in zip(expected, targets, strict=True):
            np.testing.assert_array_equal(target.numpy(), array)


def test_arrays_when_there_is_no_device_then_are_copied_at_once() -> None:
    staging = PinnedStaging(torch.device("cpu"))
    array, target = np.arange(6, dtype=np.int32).reshape(2, 3), torch.zeros(2, 3, dtype=torch.int32)
    staging.send([(array, target)])
    array.fill(0)
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
