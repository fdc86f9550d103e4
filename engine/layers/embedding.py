"""The embedding table, which opens the residual stream."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.layers.override import Override
from engine.layers.stream import HostStream, ResidualStream


class Embedding(Protocol):
    table: torch.Tensor  # [vocab, hidden]

    def __call__(self, token_ids: torch.Tensor, override: Override | None = None) -> ResidualStream:
        """token_ids: int64 [tokens] -> the stream of their rows, those of `override` where it has them."""


class HostEmbedding:
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, token_ids: torch.Tensor, override: Override | None = None) -> HostStream:
        rows = F.embedding(token_ids, self.table).float()
        return HostStream(rows if override is None else override.over(rows))
