"""The model over inputs that lie on the device: what an eager step runs, and what a graph captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.layers.device import DeviceStream
from engine.layers.device_linear import DeviceLinear
from engine.layers.device_sharded import DeviceGatheredHead
from engine.layers.override import Override
from engine.models.llama import LlamaModel
from engine.models.step import ForwardStep, LastTokens


class DeviceForward:
    """No call synchronises, allocates by row, or looks at the contents of a tensor."""

    def __init__(self, model: LlamaModel, backend: AttentionBackend, pools: Sequence[Any]) -> None:
        """pools: the backend's handle of each layer's KV pool."""
        self.model = model
        self.backend = backend
        self.pools = pools

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: Any,
        on_layer: Callable[[int], None] | None = None,
        override: Override | None = None,
        lasts: LastTokens | None = None,
    ) -> DeviceStream:
        """The stream before the final norm; the tokens' KV is in the pool.

        token_ids, positions: int64 or int32 [tokens], positions also [axes, tokens]; slots: int64 [tokens], -1 for
        tokens whose KV goes nowhere; plan: the backend's, of rows with these tokens. on_layer(layer) is called when the
        writing of that layer's KV has been enqueued. override: embeddings in place of the tokens' own. lasts: the
        stream is theirs alone.
        """
        cos, sin = self.model.rotary.angles(positions)
        step = ForwardStep(
            backend=self.backend,
            plan=plan,
            pools=self.pools,
            cos=cos,
            sin=sin,
            slots=slots,
            on_layer=on_layer,
            lasts=lasts,
            override=override,
        )
        return self.model.forward(token_ids, step)  # type: ignore[return-value]  # of a DeviceEmbedding

    def logits(
        self, stream: DeviceStream, tokens: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 logits [n, vocab] of some tokens of the stream; without `tokens` of all, which ends the stream.

        tokens: int64 or int32 [n], indices; out: float32 [n, vocab]. With several ranks, see `DeviceGatheredHead`.
        """
        chosen = stream if tokens is None else stream.rows(tokens)
        head: DeviceLinear | DeviceGatheredHead = self.model.head  # type: ignore[assignment]  # of a DeviceMaker
        return head.exact(chosen.read(self.model.norm), out)  # type: ignore[arg-type]  # a DeviceNorm
