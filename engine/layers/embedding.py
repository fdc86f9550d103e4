"""The embedding table, which opens the residual stream."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.layers.stream import HostStream, ResidualStream


class Embedding(Protocol):
    table: torch.Tensor  # [vocab, hidden]

    def __call__(self, token_ids: torch.Tensor) -> ResidualStream:
        """token_ids: int64 [tokens] -> the stream of their rows."""


class HostEmbedding:
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, token_ids: torch.Tensor) -> HostStream:
        return HostStream(F.embedding(token_ids, self.table).float())
