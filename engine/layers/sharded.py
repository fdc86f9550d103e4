"""Layers of a host whose weights are shared out over ranks: what makes whole what every rank has a part of.

Every rank keeps the whole residual stream, with the same bits as the others: a sum over ranks gives the same bits
everywhere, and all that happens between two sums is computed from them alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.layers.linear import Addend, Linear, OneDnnLinear
from engine.layers.override import Override
from engine.layers.stream import HostStream
from engine.parallel.communicator import Communicator
from engine.parallel.shards import Part


class SummedLinear:
    """The inputs are shared out: each rank's product is a summand, added in float32."""

    def __init__(self, linear: Addend, communicator: Communicator) -> None:
        self.linear = linear
        self.communicator = communicator
        self.first = communicator.rank == 0

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += x W^T + b over all ranks. The first rank's summand has the stream in it; the others' do not, so
        that the sum is the new stream, without memory of its own."""
        if not self.first:
            residual.zero_()
        self.linear.add_to(residual, x)
        self.communicator.all_reduce_(residual)


class GatheredHead:
    """The output head, of whose rows each rank has a part. Logits are there on the first rank alone."""

    def __init__(self, linear: Linear, vocab_size: int, communicator: Communicator) -> None:
        """linear: of as many outputs on every rank; those beyond vocab_size are padding."""
        # Which logits lie so close that their bits must be more, only all parts together would tell
        self.product = linear.with_remainder if isinstance(linear, OneDnnLinear) else linear.exact
        self.vocab_size = vocab_size
        self.communicator = communicator
        self.elsewhere = torch.empty(0, vocab_size)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocab] on the first rank, [0, vocab] on the others."""
        logits = self.communicator.gather_last(self.product(x), self.vocab_size)
        return self.elsewhere if logits is None else logits


def local_ids(token_ids: torch.Tensor, part: Part, elsewhere: int) -> torch.Tensor:
    """int64 [tokens]: the row of each token in the rank's table; `elsewhere` for the tokens of other ranks."""
    own = (token_ids >= part.start) & (token_ids < part.stop)
    return torch.where(own, token_ids - part.start, elsewhere)


class SharedEmbedding:
    """The embedding table, of whose rows each rank has a part; the others' tokens are zeros in the sum."""

    def __init__(self, table: torch.Tensor, part: Part, communicator: Communicator) -> None:
        """table: [rows + 1, hidden], the last row zeros; part: the tokens of the rows."""
        self.table = table
        self.part = part
        self.communicator = communicator

    def __call__(self, token_ids: torch.Tensor, override: Override | None = None) -> HostStream:
        """token_ids: int64 [tokens], those of the whole step. override: the same on every rank."""
        rows = F.embedding(local_ids(token_ids, self.part, self.table.shape[0] - 1), self.table).float()
        self.communicator.all_reduce_(rows)
        return HostStream(rows if override is None else override.over(rows))
