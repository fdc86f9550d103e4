"""A step on a device: inputs, forward pass, sampling, and the way of the results to the host.

Nothing waits for the device between the first copy of a step and the event behind its last one, so that the launch of a
step (`launch`) and the wait for its results (`finish`) can be apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.attention.backend import AttentionBackend, AttentionRows, BatchLimits, DeviceRows, GraphSelectionMode
from engine.graph_settings import PrefillGraphSettings
from engine.layers.device import DeviceStream
from engine.layers.device_linear import measured_sizes
from engine.layers.override import override_of
from engine.messages import CapturedGraphs, KvGroupInfo, SamplingParams
from engine.models.llama import LlamaModel
from engine.models.step import LastTokens
from engine.parallel.communicator import Communicator, single
from engine.parallel.shards import padded_rows
from engine.progress import Progress
from engine.runner.batch import BatchRow, RowResult, StepBatch
from engine.runner.capture import Recorder
from engine.runner.decode_graph import DecodeGraphRunner
from engine.runner.decode_status import DecodeDecision, DecodeGraphStatus
from engine.runner.device_forward import DeviceForward
from engine.runner.device_inputs import DeviceInputs, DeviceStepInputs
from engine.runner.graph_session import CaptureSession, capture_graphs
from engine.runner.inputs import asks_for_lasts
from engine.runner.pinned import PinnedStaging
from engine.runner.position_ids import position_ids_of
from engine.runner.prefill_graph.decision import Decision
from engine.runner.prefill_graph.runner import PrefillGraphRunner, ReplayOutput
from engine.runner.prefill_graph.scratch import ScratchBlocks
from engine.sampling.device import DeviceSampler, Pending
from engine.sampling.row import SamplingRow
from kernels.attention_metadata import attention_metadata
from rpc.errors import BatonError, ErrorCode
from rpc.graph_status import PrefillGraphStatus
from rpc.log_limit import LogLimit

# Tokens besides the last ones from which the last layer leaves them out. Shorter prompts' steps wait for launches, and
# are comparable bit by bit with the replays of prefill graphs.
_FEWEST_OTHERS = 512

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlight:
    """A launched step."""

    sampled_rows: list[int]
    chunk_rows: list[int]  # rows that compute a chunk of a prompt and sample nothing
    stream: DeviceStream | None  # of an eager step
    first_token: list[int]
    decision: DecodeDecision  # PREFILL_INPUT for a step that is none of single tokens
    prefill: Decision  # about the prompts among the rows; of no meaning where there are none
    tokens: Pending | None  # of the rows that sample, on their way to the host
    replayed: ReplayOutput | None = None  # of a prefill graph

    def hidden(self) -> torch.Tensor | None:
        """float32 [tokens, hidden] of every token, where the step has kept them."""
        if self.replayed is not None:
            return self.replayed.hidden
        return None if self.stream is None else self.stream.hidden()


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
        communicator: Communicator | None = None,
    ) -> None:
        """pools: the backend's handle of each layer's KV pool of num_blocks blocks. communicator: to the other ranks of
        the model."""
        self.communicator = communicator = communicator or single()
        self.device = device
        self.group_tags = group_tags
        self.hidden_size = model.config.hidden_size
        self.position_axes = model.config.rope.axes
        self.forward = DeviceForward(model, backend, pools)
        self.inputs = DeviceInputs(limits, block_size, device)
        self.inputs.num_blocks = num_blocks
        self.sampler = DeviceSampler(limits.max_rows, vocab_size, device)
        leads = communicator.rank == 0
        self.greedy = self.sampler.greedy if leads else _nothing
        width = vocab_size if leads else padded_rows(vocab_size, communicator.size)
        self.logits = torch.empty(limits.max_rows, width, dtype=torch.float32, device=device)
        self.decode_graphs: DecodeGraphRunner | None = None
        self.decode_init = DecodeGraphStatus.NOT_REQUESTED  # status of every decode step while there are no graphs
        self.prefill_graphs: PrefillGraphRunner | None = None
        self.prefill_init = Decision(PrefillGraphStatus.NOT_REQUESTED)  # about every prompt while there are no graphs
        self._finite = _ToHost(limits.max_rows, torch.bool, device)
        self._embeddings, self._position_ids = PinnedStaging(device), PinnedStaging(device)
        self._log_limit = LogLimit()

    # -- start-up -------------------------------------------------------------------------------------------

    def run_largest(self) -> None:
        """A step of as many tokens and sampled rows as there can be, to see what memory it takes. No KV is written, and
        block 0 alone is read."""
        limits, device = self.inputs.limits, self.device
        longest = min(limits.max_tokens, limits.max_blocks * self.inputs.block_size)
        full, rest = divmod(limits.max_tokens, longest)
        lengths = [longest] * full + [rest] * (rest > 0)
        count = len(lengths)
        own = torch.tensor(lengths, dtype=torch.int32, device=device)
        cu_seqlens, cu_kv_seqlens = (torch.zeros(count + 1, dtype=torch.int32, device=device) for _ in range(2))
        offsets = torch.zeros(limits.max_tokens, dtype=torch.int32, device=device)
        attention_metadata(own, torch.zeros_like(own), cu_seqlens, cu_kv_seqlens, offsets, longest)
        rows = AttentionRows(
            starts=[0] * len(lengths),
            lengths=lengths,
            block_tables=[[0] * limits.max_blocks for _ in lengths],
            num_decode=0,
            device=DeviceRows(
                cu_seqlens=cu_seqlens,
                cu_kv_seqlens=cu_kv_seqlens,
                kv_lens=own,
                slots=torch.full((limits.max_tokens,), -1, dtype=torch.int64, device=device),
                block_tables=torch.zeros(len(lengths), limits.max_blocks, dtype=torch.int32, device=device),
                max_q=longest,
                max_kv=longest,
            ),
        )
        assert rows.device is not None
        # `offsets` move a token to its row's place in a layout of `longest` tokens per row
        positions = (torch.arange(limits.max_tokens, device=device) + offsets) % longest
        plan = self.forward.backend.plan(rows)
        stream = self.forward(torch.zeros_like(positions), positions, rows.device.slots, plan)
        self.forward.logits(stream, torch.zeros(limits.max_rows, dtype=torch.int64, device=device), self.logits)
        self.greedy(self.logits)

    def warm_up(self) -> list[int]:
        """Runs small steps of every kind once, since a kernel is compiled at its first use. Returns the blocks that
        they have written."""
        self.sampler.warm_up()
        plain = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, (), (), ())
        limits, block = self.inputs.limits, 1
        tokens = min(2, self.inputs.block_size, limits.max_tokens)
        count = 1
        while True:
            several = min(count, limits.max_tokens // tokens)
            rows = [BatchRow("", [0] * tokens, 0, [block], True, plain) for _ in range(several)]
            for batch in (
                StepBatch(rows),
                StepBatch([BatchRow("", [0], 0, [block], True, plain) for _ in range(count)]),
            ):
                self._run(batch)
            if count == limits.max_rows:
                break
            count = min(2 * count, limits.max_rows)
        longest = min(limits.max_tokens, limits.max_blocks * self.inputs.block_size)
        for size in sorted({min(size, longest) for size in measured_sizes()}):
            table = [block] * -(-size // self.inputs.block_size)
            prompt = StepBatch([BatchRow("", [0] * size, 0, table, True, plain)])
            self._run(prompt)
        chunk = StepBatch([BatchRow("", [0] * tokens, 0, [block], False)])
        self._run(chunk)
        return [block]

    def _run(self, batch: StepBatch) -> None:
        """One step of this rank, whose results nobody needs."""
        if self.communicator.rank == 0:
            self.finish(batch, self.launch(batch, None))
        else:
            self.follow(batch, None)

    def capture_decode_graphs(
        self, sizes: Sequence[int], session: CaptureSession, debug_folder: Path | None = None
    ) -> CapturedGraphs | None:
        """Captures a graph per batch size and uses them from now on. None: this backend's steps stay eager.

        Raises GRAPH_CAPTURE_DIRTY for a failure after the first capture began.
        """
        if not self.forward.backend.admits(selection_mode=GraphSelectionMode.DECODE_GRAPH):
            self.decode_init = DecodeGraphStatus.UNSUPPORTED_BACKEND
            return None
        if not self.communicator.capturable:
            self.decode_init = DecodeGraphStatus.CAPTURE_UNAVAILABLE
            _log.warning(
                "no decode graphs: the ranks share a device, and meet on the host",
                extra={"reason": self.decode_init.value},
            )
            return None
        with Progress("capturing decode graphs", len(sizes), "graphs") as progress:
            runner, problem = capture_graphs(
                lambda: DecodeGraphRunner(
                    self.forward,
                    self.inputs,
                    self.logits,
                    self.greedy,
                    sizes,
                    self.group_tags,
                    debug_folder=debug_folder,
                    progress=lambda done, total: progress.update(done),
                    communicator=self.communicator,
                ),
                session,
            )
        if runner is None:
            if self.communicator.size > 1:  # the others would replay rows that this one would not add
                raise BatonError(
                    ErrorCode.GRAPH_CAPTURE_DIRTY,
                    "a rank could not capture its decode graphs; see the engine's log, or leave the graphs off",
                    metadata={"rank": str(self.communicator.rank), "detail": problem[:200]},
                )
            self.decode_init = DecodeGraphStatus.CAPTURE_UNAVAILABLE
            _log.warning("no decode graphs: %s", problem, extra={"reason": self.decode_init.value})
            return None
        self.decode_graphs = runner
        return runner.report()

    def make_prefill_graphs(
        self,
        scratch: ScratchBlocks,
        groups: Sequence[KvGroupInfo],
        wipe: Callable[[str, Sequence[int]], None],
        buckets: Sequence[int],
        settings: PrefillGraphSettings,
        *,
        progress: Callable[[int, int], None],
        recorder: Recorder | None,
        debug_folder: Path | None,
    ) -> PrefillGraphRunner:
        """A runner, not captured yet. A step has at most as many prompts as rows, so that its graphs need no more."""
        most = min(settings.max_requests, self.logits.shape[0])
        return PrefillGraphRunner(
            self.forward,
            groups,
            scratch,
            self.logits,
            self.sampler.greedy,
            wipe,
            num_blocks=self.inputs.num_blocks,
            buckets=buckets,
            settings=msgspec.structs.replace(settings, max_requests=most),
            progress=progress,
            recorder=recorder,
            debug_folder=debug_folder,
        )

    def release(self) -> None:
        """Lets go of every captured graph; a second call does nothing."""
        for graphs in (self.prefill_graphs, self.decode_graphs):
            if graphs is not None:
                graphs.release()

    # -- launch ---------------------------------------------------------------------------------------------

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None) -> InFlight:
        """Enqueues the whole step. Raises ValueError for a batch that points outside its blocks; nothing runs then."""
        rows = batch.rows
        plain = self.sampler.stage([row.sampling for row in rows if row.sampling is not None])
        prefill, replayed = self._prompts(batch)
        if replayed is not None:
            return self._after_replay(batch, plain, prefill, replayed, on_layer)
        inputs, decision, stream = self._compute(batch, on_layer)
        pending = None
        count = len(inputs.sampled_rows)
        if count:
            logits = self.logits[:count]
            if stream is not None:
                self._logits(stream, inputs, logits)
                if plain:
                    self.greedy(logits)
            if not plain:
                self.sampler.run(logits, after_greedy=decision.replay)
            pending = self.sampler.send(count)
        chunks = [index for index, row in enumerate(rows) if not row.sample]
        if chunks and stream is not None:
            self._check_lasts(stream, inputs)
        return InFlight(inputs.sampled_rows, chunks, stream, inputs.first_token, decision, prefill, pending)

    def follow(self, batch: StepBatch, on_layer: Callable[[int], None] | None) -> tuple[torch.Tensor | None, list[int]]:
        """Enqueues another rank's part of the step that the first one launches.

        Returns float32 [tokens, hidden] of every token, where the step has kept them, and per row the index of its
        first token.
        """
        inputs, _, stream = self._compute(batch, on_layer)
        if stream is None:
            return None, inputs.first_token
        if inputs.sampled_rows:
            self._logits(stream, inputs, self.logits[: len(inputs.sampled_rows)])
        return None if inputs.lasts is not None else stream.hidden(), inputs.first_token

    def _logits(self, stream: DeviceStream, inputs: DeviceStepInputs, out: torch.Tensor) -> None:
        """out: float32 [sampled rows, vocab], theirs."""
        tokens, lasts = inputs.sampled_tokens, inputs.lasts
        if lasts is not None and tokens is not None:  # the stream has a token per row
            every = len(inputs.sampled_rows) == lasts.tokens.shape[0]
            tokens = None if every else torch.searchsorted(lasts.tokens, tokens.to(lasts.tokens.dtype))
        self.forward.logits(stream, tokens, out)

    def _compute(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None
    ) -> tuple[DeviceStepInputs, DecodeDecision, DeviceStream | None]:
        """Enqueues inputs and forward. The stream is None where a graph was replayed, which has made the logits too."""
        rows = batch.rows
        decision = DecodeDecision(DecodeGraphStatus.PREFILL_INPUT)
        stream = None
        if all(len(row.token_ids) == 1 for row in rows) and all(row.sample for row in rows):
            inputs, decision = self._decode(batch)
        else:
            inputs = self.inputs.prefill(batch)
        if not decision.replay:
            plan = self.forward.backend.plan(inputs.rows)
            slots = inputs.device_rows.slots
            override = None
            if any(row.embeddings for row in rows):
                placed = [(first, row.embeddings) for first, row in zip(inputs.first_token, rows, strict=True)]
                tokens, send = len(inputs.token_ids), self._embeddings.send
                override = override_of(placed, tokens, self.hidden_size, self.device, send)
            positions = self._positions(rows, inputs)
            if asks_for_lasts(batch, _FEWEST_OTHERS):
                lasts = inputs.device_rows.cu_seqlens[1:] - 1
                inputs.lasts = LastTokens(lasts, self.forward.backend.plan_lasts(inputs.rows))
            stream = self.forward(inputs.token_ids, positions, slots, plan, on_layer, override, inputs.lasts)
        return inputs, decision, stream

    def _positions(self, rows: Sequence[BatchRow], inputs: DeviceStepInputs) -> torch.Tensor:
        """[tokens], or int32 [axes, tokens] where a row brings its own."""
        own = position_ids_of(rows, self.position_axes)
        if own is None:
            return inputs.positions
        positions = torch.empty(own.shape, dtype=torch.int32, device=self.device)
        self._position_ids.send([(own, positions)])
        return positions

    def _prompts(self, batch: StepBatch) -> tuple[Decision, ReplayOutput | None]:
        """What is decided about the prompts of the batch; where it is a replay, its launch is enqueued too."""
        graphs = self.prefill_graphs
        if graphs is None:
            return self.prefill_init, None
        if all(row.start > 0 and len(row.token_ids) == 1 for row in batch.rows):
            # Decode rows, and prompts whose other tokens the prefix cache had
            return Decision(PrefillGraphStatus.PREFIX_NOT_SUPPORTED), None
        decision = graphs.can_run(batch)
        if not decision.replay:
            return decision, None
        try:
            graphs.prepare_replay(batch, decision.bucket)
        except Exception as error:
            self._log_failure("a prefill graph could not be prepared; the step runs eagerly", error)
            return Decision(PrefillGraphStatus.ERROR, detail=f"{type(error).__name__}: {error}"), None
        return decision, graphs.replay()

    def _after_replay(
        self,
        batch: StepBatch,
        plain: bool,
        prefill: Decision,
        replayed: ReplayOutput,
        on_layer: Callable[[int], None] | None,
    ) -> InFlight:
        """The rest of a step whose forward was a replay: its greedy tokens are chosen, and all layers written."""
        count = len(batch.rows)
        if not plain:
            self.sampler.run(replayed.logits, after_greedy=True)
        pending = self.sampler.send(count)
        if on_layer is not None:
            for layer in range(len(self.forward.pools)):
                on_layer(layer)
        first_token, tokens = [], 0
        for row in batch.rows:
            first_token.append(tokens)
            tokens += len(row.token_ids)
        decode = DecodeDecision(DecodeGraphStatus.PREFILL_INPUT)
        return InFlight(list(range(count)), [], None, first_token, decode, prefill, pending, replayed)

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
            graph = graphs.refresh(inputs, decision.size)
        except Exception as error:
            if self.communicator.size > 1:
                raise  # the others replay theirs, whose sums have the padding rows too
            self._log_failure("a decode graph could not be prepared; the step runs eagerly", error)
            self.inputs.forget_tables()  # those that were staged, the graph would have spread
            return self.inputs.decode(batch), DecodeDecision(DecodeGraphStatus.ERROR)
        graphs.replay(graph)
        return inputs, decision

    def _log_failure(self, what: str, error: Exception) -> None:
        """With its stack, the first time and ever more rarely, by what failed and the type of the error."""
        count = self._log_limit.occurred(f"{what} {type(error).__name__}")
        if count:
            extra = {"code": ErrorCode.EXECUTION_EXCEPTION.name, "occurrences": count}
            _log.error(what, exc_info=error, extra=extra)

    def _check_lasts(self, stream: DeviceStream, inputs: DeviceStepInputs) -> None:
        """Whether the last hidden state of each row is finite. Every token of a chunk reaches its last one through
        attention, so KV that is not finite shows there, before its blocks enter the prefix cache."""
        if inputs.lasts is None:
            stream = stream.rows(inputs.device_rows.cu_seqlens[1:] - 1)
        self._finite.send(torch.isfinite(stream.hidden()).all(dim=-1))

    # -- results --------------------------------------------------------------------------------------------

    def finish(self, batch: StepBatch, step: InFlight) -> list[RowResult]:
        """Waits for the device. One result per row of the batch; prompt log-probabilities are not among them."""
        results = [RowResult() for _ in batch.rows]
        if step.tokens is not None:
            for index, token in zip(step.sampled_rows, self.sampler.collect(step.tokens), strict=True):
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


def _nothing(logits: torch.Tensor) -> None:
    """In place of the choice of tokens, on ranks that have a part of the logits only."""


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
