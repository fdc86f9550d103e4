"""Arrays of any size on their way to a device through pinned memory, so that a step's copies wait for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.layers.override import copy_now

_GENERATIONS = 2  # calls whose copies may be under way at once
_ALIGNMENT = 16  # bytes


class PinnedStaging:
    """Copies what one step after the other brings. Memory is made when a step brings more than any before it.

    On the CPU there is nothing to pin, and the copies are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(_GENERATIONS)] if on_cuda else []
        self._copied = [torch.cuda.Event() for _ in self._memory]
        self._turn = 0

    def send(self, parts: Sequence[tuple[npt.NDArray[Any], torch.Tensor]]) -> None:
        """Enqueues a copy of each array to its target on the device, of its shape and type. The arrays are free to
        change afterwards."""
        if not self._memory:
            copy_now(parts)
            return
        places, size = [], 0
        for array, _ in parts:
            places.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn = (self._turn + 1) % _GENERATIONS
        self._copied[self._turn].synchronize()  # of two calls before
        if size > self._memory[self._turn].numel():
            self._memory[self._turn] = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        memory = self._memory[self._turn]
        for place, (array, target) in zip(places, parts, strict=True):
            piece = memory[place : place + array.nbytes]
            np.copyto(piece.numpy().view(array.dtype).reshape(array.shape), array)
            target.copy_(piece.view(target.dtype).view(target.shape), non_blocking=True)
        self._copied[self._turn].record()
