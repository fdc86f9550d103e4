"""Layers of a device: as few launches per layer as the products leave.

Per layer: add and norm, query-key-value product, head step, attention (two launches with split rows), output product,
add and norm, gate-up product with its SwiGLU, down product. Weights stay on the device; what a step allocates comes
from PyTorch's allocator, or from a graph's own pool while it is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from engine.layers.device_linear import DeviceGated, DeviceLinear
from engine.layers.override import Override
from engine.layers.rotary import Rotary
from engine.models.config import ModelConfig
from engine.models.rope_config import RopeConfig
from engine.models.step import ForwardStep
from kernels import embedding, qkv, rms_norm, rotary

if TYPE_CHECKING:
    from engine.layers.device_sharded import DeviceGatheredHead, DeviceSharedEmbedding, DeviceSummedLinear
    from engine.parallel.communicator import Communicator
    from engine.parallel.shards import Part

# Tokens from which a product adds to the stream itself. It is bound by arithmetic then, and the stream's way from and
# to memory, which the next norm is spared, takes no time of its own.
_ACCUMULATE_FROM = 1024


class DeviceNorm:
    """RMSNorm in one launch. Computed in float32 and rounded once, to the weight's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [features]."""
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 or compute dtype [rows, features] -> [rows, features] in the weight's dtype."""
        out = torch.empty_like(x, dtype=self.weight.dtype)
        rms_norm.rms_norm(x, self.weight, self.eps, out)
        return out


class DeviceAddend(Protocol):
    """What a stream can add: a `DeviceLinear`, or one whose inputs are shared out over ranks."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in] -> [tokens, out], of any float dtype."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += what the call gives. residual: float32 [tokens, out]."""


class DeviceStream:
    """The residual stream, float32. The last product waits in `delta` for the next norm, which adds it on the way."""

    def __init__(self, residual: torch.Tensor, delta: torch.Tensor | None = None) -> None:
        """residual: float32 [tokens, hidden], changed in place; delta: [tokens, hidden] of any float dtype."""
        self.residual = residual
        self.delta = delta

    def read(self, norm: DeviceNorm) -> torch.Tensor:
        if self.delta is None:
            return norm(self.residual)
        out = torch.empty_like(self.delta, dtype=norm.weight.dtype)
        rms_norm.add_rms_norm(self.residual, self.delta, norm.weight, norm.eps, out)
        self.delta = None
        return out

    def add(self, linear: DeviceAddend, x: torch.Tensor) -> None:
        if x.shape[0] >= _ACCUMULATE_FROM:
            linear.add_to(self.hidden(), x)
            return
        delta = linear(x)
        if self.delta is not None:
            self.residual.add_(self.delta)
        self.delta = delta

    def hidden(self) -> torch.Tensor:
        if self.delta is not None:
            self.residual.add_(self.delta)
            self.delta = None
        return self.residual

    def hidden_into(self, out: torch.Tensor) -> None:
        """All that was added so far, in `out` [tokens, hidden], which takes the stream's place."""
        if self.delta is None:
            out.copy_(self.residual)
        else:
            torch.add(self.residual, self.delta, out=out)
        self.residual, self.delta = out, None

    def rows(self, tokens: torch.Tensor) -> DeviceStream:
        """A stream of its own of some tokens. tokens: int64 or int32 [n], indices."""
        delta = None if self.delta is None else self.delta.index_select(0, tokens)
        return DeviceStream(self.residual.index_select(0, tokens), delta)


class DeviceEmbedding:
    def __init__(self, table: torch.Tensor) -> None:
        """table: [vocab, hidden]."""
        self.table = table

    def __call__(self, token_ids: torch.Tensor, override: Override | None = None) -> DeviceStream:
        taken, values = (None, None) if override is None else (override.taken, override.values)
        return DeviceStream(embedding.embed(token_ids, self.table, taken=taken, values=values))


class DeviceRotary(Rotary):
    """Angles in one launch; the head step rotates."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__(rope, head_dim)
        self.frequencies = self.frequencies.to(device)
        if self.axis_of is not None:
            self.axis_of = self.axis_of.to(device, torch.int32)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        axis_of = self.axis_of if positions.dim() == 2 else None
        return rotary.angles(positions, self.frequencies, self.factor, axis_of=axis_of)


class DeviceHeads:
    """Norm, rotation and the writing of keys and values in one launch.

    With as many key heads as query heads, q stays where the product put it, beside keys and values (packed); with fewer
    key heads it gets memory of its own, without gaps, which attention reads faster.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: DeviceNorm | None,
        k_norm: DeviceNorm | None,
    ) -> None:
        self.num_heads = num_heads
        self.num_all = num_heads + 2 * num_kv_heads
        self.head_dim = head_dim
        self.packed = num_heads == num_kv_heads
        self.q_weight = None if q_norm is None else q_norm.weight
        self.k_weight = None if k_norm is None else k_norm.weight
        self.eps = 0.0 if q_norm is None else q_norm.eps

    def __call__(self, product: torch.Tensor, layer: int, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        """The returned kv is what the product gave: normalised and rotated keys are in the pool only."""
        assert step.slots is not None
        heads = product.view(-1, self.num_all, self.head_dim)
        q = heads[:, : self.num_heads]
        if not self.packed:
            q = torch.empty_like(q, memory_format=torch.contiguous_format)
        qkv.split_norm_rotate_write(
            heads, self.q_weight, self.k_weight, self.eps, step.cos, step.sin, step.slots, step.pools[layer], q
        )
        return q, heads[:, self.num_heads :]


class DeviceMaker:
    """Layers for weights on `device`. On the CPU they need Triton's interpreter, which is for tests."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DeviceLinear:
        return DeviceLinear(weight, bias)

    def gated(self, gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> DeviceGated:
        return DeviceGated(gate_up, bias)

    def norm(self, weight: torch.Tensor, eps: float) -> DeviceNorm:
        return DeviceNorm(weight, eps)

    def embedding(self, table: torch.Tensor) -> DeviceEmbedding:
        return DeviceEmbedding(table)

    def rotary(self, rope: RopeConfig, head_dim: int) -> DeviceRotary:
        return DeviceRotary(rope, head_dim, self.device)

    def heads(
        self, config: ModelConfig, rotary: DeviceRotary, q_norm: DeviceNorm | None, k_norm: DeviceNorm | None
    ) -> DeviceHeads:
        return DeviceHeads(config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm)

    # With several ranks only, and imported then: those layers are built of the ones above

    def summed(self, linear: DeviceLinear, communicator: Communicator) -> DeviceSummedLinear:
        from engine.layers.device_sharded import DeviceSummedLinear

        return DeviceSummedLinear(linear, communicator)

    def gathered(self, linear: DeviceLinear, vocab_size: int, communicator: Communicator) -> DeviceGatheredHead:
        from engine.layers.device_sharded import DeviceGatheredHead

        return DeviceGatheredHead(linear, vocab_size, communicator)

    def shared_embedding(self, table: torch.Tensor, part: Part, communicator: Communicator) -> DeviceSharedEmbedding:
        from engine.layers.device_sharded import DeviceSharedEmbedding

        return DeviceSharedEmbedding(table, part, communicator)
