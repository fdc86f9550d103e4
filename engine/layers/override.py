"""Embeddings of requests in place of their tokens' own, for the tokens of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.input_embeddings import EmbeddingRows


@dataclass(frozen=True, slots=True)
class Override:
    """What opens the residual stream of a step in place of the embedding table, token by token."""

    taken: torch.Tensor  # int32 [tokens] not 0 where `values` has the row
    values: torch.Tensor  # float32 [tokens, hidden]

    def over(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: float32 [tokens, hidden] of the table -> those of the step."""
        return torch.where(self.taken.bool().unsqueeze(1), self.values, rows)


Parts = Sequence[tuple[npt.NDArray[Any], torch.Tensor]]  # arrays, each with the tensor of its shape that it goes to


def copy_now(parts: Parts) -> None:
    """Copies each array to its target."""
    for array, target in parts:
        target.copy_(torch.from_numpy(array))


def place_rows(
    embeddings: Sequence[tuple[int, Sequence[EmbeddingRows]]],
    taken: torch.Tensor | None,
    values: torch.Tensor,
    send: Callable[[Parts], None] = copy_now,
) -> None:
    """Writes the rows of a step's requests to where its tokens are. embeddings: (index of a row's first token, what it
    brings: arrays, or tensors of the device where another rank sent them there). taken: int32 [tokens], written whole;
    None where somebody else keeps it. values: float32 [tokens, hidden]. send: makes the copies, which on a device go
    through pinned memory."""
    parts: list[tuple[npt.NDArray[Any], torch.Tensor]] = []
    marks = np.zeros(values.shape[0] if taken is None else taken.shape[0], np.int32)
    for first, items in embeddings:
        for item in items:
            place = slice(first + item.place, first + item.end)
            if isinstance(item.values, torch.Tensor):
                values[place].copy_(item.values)
            else:
                parts.append((item.values, values[place]))
            marks[place] = 1
    send(parts if taken is None else [*parts, (marks, taken)])


def override_of(
    embeddings: Sequence[tuple[int, Sequence[EmbeddingRows]]],
    tokens: int,
    hidden_size: int,
    device: torch.device,
    send: Callable[[Parts], None] = copy_now,
) -> Override | None:
    """For an eager step of `tokens` tokens; None when no request brings any. send: see `place_rows`."""
    if not any(items for _, items in embeddings):
        return None
    taken = torch.empty(tokens, dtype=torch.int32, device=device)
    values = torch.zeros(tokens, hidden_size, dtype=torch.float32, device=device)
    place_rows(embeddings, taken, values, send)
    return Override(taken, values)
