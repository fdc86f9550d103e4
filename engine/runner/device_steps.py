"""A step on a device: inputs, forward pass, sampling, and the way of the results to the host.

Nothing waits for the device between the first copy of a step and the event behind its last one, so that the launch of a
step (`launch`) and the wait for its results (`finish`) can be apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionBackend, BatchLimits
from engine.layers.device import DeviceStream
from engine.models.llama import LlamaModel
from engine.runner.batch import RowResult, StepBatch
from engine.runner.decode_graph import DecodeGraphRunner
from engine.runner.decode_status import DecodeDecision, DecodeGraphStatus
from engine.runner.device_forward import DeviceForward
from engine.runner.device_inputs import DeviceInputs, DeviceStepInputs
from engine.sampling.device import DeviceSampler
from rpc.errors import BatonError, ErrorCode

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlight:
    """A launched step."""

    sampled_rows: list[int]
    chunk_rows: list[int]  # rows that compute a chunk of a prompt and sample nothing
    stream: DeviceStream | None  # of an eager step
    first_token: list[int]
    decision: DecodeDecision  # PREFILL_INPUT for a step that is none of single tokens


class DeviceSteps:
    """Runs batches for a ModelRunner whose KV pool is on a device. Belongs to one thread.

    Results of one step are read before the next one is launched.
    """

    def __init__(
        self,
        model: LlamaModel,
        backend: AttentionBackend,
        pools: list[Any],
        limits: BatchLimits,
        *,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        device: torch.device,
        group_tags: tuple[str, ...],
    ) -> None:
        """pools: the backend's handle of each layer's KV pool of num_blocks blocks."""
        self.device = device
        self.group_tags = group_tags
        self.forward = DeviceForward(model, backend, pools)
        self.inputs = DeviceInputs(limits, block_size, device)
        self.inputs.num_blocks = num_blocks
        self.sampler = DeviceSampler(limits.max_rows, vocab_size, device)
        self.logits = torch.empty(limits.max_rows, vocab_size, dtype=torch.float32, device=device)
        self.decode_graphs: DecodeGraphRunner | None = None
        self.decode_init = DecodeGraphStatus.NOT_REQUESTED  # status of every decode step while there are no graphs
        self._finite = _ToHost(limits.max_rows, torch.bool, device)

    # -- launch ---------------------------------------------------------------------------------------------

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None) -> InFlight:
        """Enqueues the whole step. Raises ValueError for a batch that points outside its blocks; nothing runs then."""
        rows = batch.rows
        plain = self.sampler.stage([row.sampling for row in rows if row.sampling is not None])
        decision = DecodeDecision(DecodeGraphStatus.PREFILL_INPUT)
        stream = None
        if all(len(row.token_ids) == 1 for row in rows) and all(row.sample for row in rows):
            inputs, decision = self._decode(batch)
        else:
            inputs = self.inputs.prefill(batch)
        if not decision.replay:
            plan = self.forward.backend.plan(inputs.rows)
            slots = inputs.device_rows.slots
            stream = self.forward(inputs.token_ids, inputs.positions, slots, plan, on_layer)
        count = len(inputs.sampled_rows)
        if count:
            logits = self.logits[:count]
            if stream is not None:
                self.forward.logits(stream, inputs.sampled_tokens, logits)
                if plain:
                    self.sampler.greedy(logits)
            if not plain:
                self.sampler.run(logits)
            self.sampler.send(count)
        chunks = [index for index, row in enumerate(rows) if not row.sample]
        if chunks and stream is not None:
            self._check_lasts(stream, inputs)
        return InFlight(inputs.sampled_rows, chunks, stream, inputs.first_token, decision)

    def _decode(self, batch: StepBatch) -> tuple[DeviceStepInputs, DecodeDecision]:
        """Inputs of a step of one token per row; where the decision says so, its graph's replay is enqueued too."""
        graphs = self.decode_graphs
        if graphs is None:
            return self.inputs.decode(batch), DecodeDecision(self.decode_init)
        decision = graphs.can_run(batch.rows, self.group_tags)
        if not decision.replay:
            return self.inputs.decode(batch), decision
        inputs = graphs.stage(batch, decision.size)
        try:
            graphs.refresh(inputs, decision.size)
        except Exception:
            _log.exception(
                "a decode graph could not be prepared; the step runs eagerly",
                extra={"code": ErrorCode.EXECUTION_EXCEPTION.name},
            )
            return self.inputs.decode(batch), DecodeDecision(DecodeGraphStatus.ERROR)
        graphs.replay(decision.size)
        return inputs, decision

    def _check_lasts(self, stream: DeviceStream, inputs: DeviceStepInputs) -> None:
        """Whether the last hidden state of each row is finite. Every token of a chunk reaches its last one through
        attention, so KV that is not finite shows there, before its blocks enter the prefix cache."""
        lasts = inputs.device_rows.cu_seqlens[1:] - 1
        self._finite.send(torch.isfinite(stream.rows(lasts).hidden()).all(dim=-1))

    # -- results --------------------------------------------------------------------------------------------

    def finish(self, batch: StepBatch, step: InFlight) -> list[RowResult]:
        """Waits for the device. One result per row of the batch; prompt log-probabilities are not among them."""
        results = [RowResult() for _ in batch.rows]
        if step.sampled_rows:
            for index, token in zip(step.sampled_rows, self.sampler.collect(), strict=True):
                result = results[index]
                result.token_id = token.token_id
                result.failure = token.failure
                result.logprob = token.logprob
                result.top_logprobs = token.top_logprobs
        if step.chunk_rows:
            finite = self._finite.wait()
            for index in step.chunk_rows:
                if not finite[index]:
                    results[index].failure = BatonError(
                        ErrorCode.EXECUTION_EXCEPTION,
                        "the model's hidden states are not finite; send the request again",
                        metadata={"cause": "hidden_states_not_finite"},
                    )
        return results


class _ToHost:
    """A vector that is copied to pinned memory and read there behind an event."""

    def __init__(self, most: int, dtype: torch.dtype, device: torch.device) -> None:
        on_device = device.type == "cuda"
        self._host = torch.zeros(most, dtype=dtype, pin_memory=on_device)
        self._array = self._host.numpy()
        self._event = torch.cuda.Event() if on_device else None
        self._count = 0

    def send(self, values: torch.Tensor) -> None:
        """Enqueues the copy."""
        self._count = values.shape[0]
        self._host[: self._count].copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[Any]:
        """The values of the last `send`."""
        if self._event is not None:
            self._event.synchronize()
        return self._array[: self._count].tolist()  # type: ignore[no-any-return]
