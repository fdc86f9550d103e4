"""Masks of rows with a grammar, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.token_mask import mask_words, masked

_GENERATIONS = 2  # steps whose masks may be on their way at once


class Masking(Protocol):
    """What masks a row; engine.grammar.matching.GrammarMatching does."""

    @property
    def mask(self) -> NDArray[np.int32] | None: ...


@dataclass(slots=True)
class _Staging:
    """A host buffer, and when the device has read it."""

    words: torch.Tensor
    copied: torch.cuda.Event | None


class TokenMasks:
    """Masks the logits of up to max_rows rows. Memory is taken with the first mask."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab = vocab
        self._words = mask_words(vocab)
        self._device = device
        self._steps = 0
        self._stagings: list[_Staging] = []
        self._staged = torch.empty(0, dtype=torch.int32, device=device)
        self._out = torch.empty(0, vocab, dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, Masking]]) -> torch.Tensor:
        """Copy of logits [rows, vocab], float32, where the rows named are masked. The masks are made here, while the
        device is still busy with what came before; one copy and one launch are enqueued, nothing waits."""
        if not self._stagings:
            self._make()
        staging = self._stagings[self._steps % _GENERATIONS]
        self._steps += 1
        if staging.copied is not None:
            staging.copied.synchronize()  # of two steps before: passed long ago
        host = staging.words.numpy()
        slots = host[: self._max_rows]
        slots[: len(logits)] = -1
        used = 0
        for number, masking in rows:
            mask = masking.mask
            if mask is None:
                continue
            begin = self._max_rows + used * self._words
            host[begin : begin + self._words] = mask
            slots[number] = used
            used += 1
        size = self._max_rows + used * self._words
        self._staged[:size].copy_(staging.words[:size], non_blocking=True)
        if staging.copied is not None:
            staging.copied.record()
        return masked(logits, self._staged, self._masks, self._out)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles the kernel, without the memory that masks take."""
        logits = torch.zeros(1, self._vocab, dtype=dtype, device=self._device)
        masks = torch.zeros(1, self._words, dtype=torch.int32, device=self._device)
        masked(logits, masks.view(-1), masks, torch.empty_like(logits, dtype=torch.float32))

    def _make(self) -> None:
        size = self._max_rows * (1 + self._words)
        on_cuda = self._device.type == "cuda"
        self._stagings = [
            _Staging(torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda), torch.cuda.Event() if on_cuda else None)
            for _ in range(_GENERATIONS)
        ]
        self._staged = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._masks = self._staged[self._max_rows :].view(self._max_rows, self._words)
        self._out = torch.empty(self._max_rows, self._vocab, dtype=torch.float32, device=self._device)
