"""Layers of a device whose weights are shared out over ranks; see engine/layers/sharded.py for what they have in common
with those of a host. Sums and gathers are enqueued among the launches, and may be part of a graph as these are."""

from __future__ import annotations

import torch

from engine.layers.device import DeviceStream
from engine.layers.device_linear import DeviceLinear
from engine.layers.override import Override
from engine.parallel.communicator import Communicator
from engine.parallel.shards import Part
from kernels import embedding


class DeviceSummedLinear:
    """The inputs are shared out: each rank's product is a summand, float32 as it comes from the accumulators, since one
    rounded on every rank would add its rounding to the sum."""

    def __init__(self, linear: DeviceLinear, communicator: Communicator) -> None:
        self.linear = linear
        self.communicator = communicator
        self.first = communicator.rank == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in of this rank] -> float32 [tokens, out], x W^T + b over all ranks."""
        total = self.linear.exact(x)
        self.communicator.all_reduce_(total)
        return total

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += x W^T + b over all ranks. The first rank's summand has the stream in it; the others' do not."""
        if self.first:
            self.linear.add_to(residual, x)
        else:
            self.linear.exact(x, residual)
        self.communicator.all_reduce_(residual)


class DeviceGatheredHead:
    """The output head, of whose rows each rank has a part. Logits are there on the first rank alone."""

    def __init__(self, linear: DeviceLinear, vocab_size: int, communicator: Communicator) -> None:
        """linear: of as many outputs on every rank; those beyond vocab_size are padding."""
        self.linear = linear
        self.vocab_size = vocab_size
        self.communicator = communicator
        self.elsewhere = torch.empty(0, vocab_size, device=linear.weight.device)

    def exact(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [tokens, vocab] on the first rank, [0, vocab] on the others. out: float32 [tokens, vocab] for the
        first rank's; on the others [tokens, own outputs], which gets this rank's part."""
        first = self.communicator.rank == 0
        own = self.linear.exact(x, None if first else out)
        logits = self.communicator.gather_last(own, self.vocab_size, out if first else None)
        return self.elsewhere if logits is None else logits


class DeviceSharedEmbedding:
    """The embedding table, of whose rows each rank has a part; the others' tokens are zeros in the sum."""

    def __init__(self, table: torch.Tensor, part: Part, communicator: Communicator) -> None:
        """table: [rows, hidden], of which the first ones are those of the tokens of `part`."""
        self.table = table
        self.part = (part.start, part.stop)
        self.communicator = communicator

    def __call__(self, token_ids: torch.Tensor, override: Override | None = None) -> DeviceStream:
        """token_ids: int64 or int32 [tokens], those of the whole step. override: the same on every rank."""
        rows = embedding.embed(token_ids, self.table, part=self.part)
        self.communicator.all_reduce_(rows)
        return DeviceStream(rows if override is None else override.over(rows))
