"""Embeddings of requests in place of their tokens' own, for the tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def place_rows(
    embeddings: Sequence[tuple[int, Sequence[EmbeddingRows]]], taken: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Writes the rows of a step's requests to where its tokens are. embeddings: (index of a row's first token, what it
    brings). taken: int32 [tokens], zero before; None where somebody else keeps it. values: float32 [tokens, hidden]."""
    for first, items in embeddings:
        for item in items:
            place = slice(first + item.place, first + item.end)
            values[place].copy_(torch.from_numpy(item.values), non_blocking=True)
            if taken is not None:
                taken[place] = 1


def override_of(
    embeddings: Sequence[tuple[int, Sequence[EmbeddingRows]]], tokens: int, hidden_size: int, device: torch.device
) -> Override | None:
    """For an eager step of `tokens` tokens; None when no request brings any."""
    if not any(items for _, items in embeddings):
        return None
    taken = torch.zeros(tokens, dtype=torch.int32, device=device)
    values = torch.zeros(tokens, hidden_size, dtype=torch.float32, device=device)
    place_rows(embeddings, taken, values)
    return Override(taken, values)
