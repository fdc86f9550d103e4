"""Captures the forward of each token bucket once, and replays it for batches of short prompts.

A graph holds everything from the embedding of the tokens to the greedy choice after each prompt's last one. A replay
costs the host the packing of one buffer, one copy, and one launch; nothing waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.backend import AttentionRows, DeviceRows, GraphSelectionMode
from engine.graph_settings import PrefillGraphSettings
from engine.kv_cache.cache import KvCache
from engine.layers.override import Override, place_rows
from engine.messages import CapturedGraphs, KvGroupInfo
from engine.models.config import ModelConfig
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.capture import Recorder, Recording, recorder_for
from engine.runner.device_forward import DeviceForward
from engine.runner.graph_session import CaptureSession, capture_graphs
from engine.runner.pinned import PinnedStaging
from engine.runner.prefill_graph.decision import Decision, ReplayLimits, decide
from engine.runner.prefill_graph.metadata import metadata_problem
from engine.runner.prefill_graph.scratch import ScratchBlocks
from engine.runner.prefill_graph.staging import GroupShape, HostStaging, ReplayArrays, ReplayLayout
from rpc.faults import fault
from rpc.graph_status import GraphRole, PrefillGraphStatus

WARM_UPS = 2
_GENERATIONS = 2  # host buffers, so that one can be filled while the device still copies from the other


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayOutput:
    """What one replay computes, in memory that the next one overwrites. n prompts of T tokens together."""

    logits: torch.Tensor  # float32 [n, vocab] after each prompt's last token
    hidden: torch.Tensor  # float32 [T, hidden], before the final norm


class _Copies:
    """Pinned host buffers in turn, each free again when its last copy has been made."""

    def __init__(self, words: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda) for _ in range(_GENERATIONS)]
        self._copied = [torch.cuda.Event() for _ in range(_GENERATIONS)] if on_cuda else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def next(self) -> int:
        """The generation to fill now; waits for its last copy, which a step ago was enqueued at the latest."""
        self._turn = (self._turn + 1) % _GENERATIONS
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._turn

    def copy(self, turn: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """source: a view of the buffer of this turn."""
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied[turn].record()


@dataclass(slots=True)
class _Bucket:
    layout: ReplayLayout
    staged: list[HostStaging]  # by generation
    on_device: torch.Tensor  # int32 [layout.words], what the graph reads
    arrays: ReplayArrays  # views of on_device
    rows: AttentionRows
    plan: Any = None  # of the attention backend
    recording: Recording | None = None


class PrefillGraphRunner:
    """The prefill graphs of one engine. Not thread-safe."""

    role = GraphRole.GENERATIVE_PREFILL

    def __init__(
        self,
        forward: DeviceForward,
        groups: Sequence[KvGroupInfo],
        scratch: ScratchBlocks,
        logits: torch.Tensor,
        greedy: Callable[[torch.Tensor], object],
        wipe: Callable[[str, Sequence[int]], None],
        *,
        num_blocks: int,
        buckets: Sequence[int],
        settings: PrefillGraphSettings,
        progress: Callable[[int, int], None] = lambda done, total: None,
        recorder: Recorder | None = None,
        debug_folder: Path | None = None,
    ) -> None:
        """logits: float32 [max_requests or more, vocab], filled by every replay. greedy(logits of n rows): enqueues the
        choice of their likeliest tokens, written to memory of its own. wipe(group, blocks) zeroes blocks of the pool,
        which has `num_blocks`.
        progress(done, total) is called after each graph. recorder: in place of the device's own, which writes each
        graph to debug_folder where that is given."""
        self.forward = forward
        self.logits = logits
        self.greedy = greedy
        self.capture_seconds: list[float] = []
        self.memory_bytes = 0
        self.pad_token_id = pad_token_id(forward.model.config)
        self._axes = forward.model.config.rope.axes
        self._groups = groups
        self._tag = groups[0].tag  # of the group that the model's layers attend over
        self._scratch = scratch
        self._wipe = wipe
        self._num_blocks = num_blocks
        self._sizes = tuple(sorted(buckets))
        self._settings = settings
        self._progress = progress
        self._recorder = recorder
        self._debug_folder = debug_folder
        self._device = logits.device
        self._embeddings = PinnedStaging(self._device)
        self._hidden = torch.empty(0)  # float32 [largest bucket, hidden]
        self._values: torch.Tensor | None = None  # float32 [largest bucket, hidden] embeddings of requests
        self._buckets: dict[int, _Bucket] = {}
        self._copies: _Copies | None = None
        self._prepared: _Bucket | None = None
        self._output: ReplayOutput | None = None
        self._released = False
        self._limits = self._limits_of(PrefillGraphStatus.CAPTURE_UNAVAILABLE)

    def _limits_of(self, init: PrefillGraphStatus) -> ReplayLimits:
        return ReplayLimits(
            init=init,
            buckets=self._sizes,
            max_requests=self._settings.max_requests,
            max_padding_ratio=self._settings.max_padding_ratio,
            block_size=self._groups[0].block_size,
            position_axes=self._axes,
            hidden_size=0 if self._values is None else self._values.shape[1],
        )

    # -- start-up -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocates the buffers of every bucket and checks that the device can read them in place."""
        groups = {
            g.tag: GroupShape(g.block_size, tuple(self._scratch.of(g.tag)), self._num_blocks) for g in self._groups
        }
        layouts = [
            ReplayLayout(
                bucket=size,
                max_requests=self._settings.max_requests,
                pad_token_id=self.pad_token_id,
                groups=groups,
                position_axes=self._axes,
            )
            for size in self._sizes
        ]
        backend, most = self.forward.backend, self._settings.max_requests
        if not backend.admits(selection_mode=GraphSelectionMode.PREFILL_GRAPH):
            raise ValueError(f"attention backend {backend.name} cannot be captured in a prefill graph")
        if self.logits.shape[0] < most:
            raise ValueError(f"logits of {self.logits.shape[0]} prompts, {most} were asked for")
        words = max(layout.words for layout in layouts)
        self._copies = copies = _Copies(words, self._device)
        on_device = torch.zeros(words, dtype=torch.int32, device=self._device)
        hidden_size = self.forward.model.config.hidden_size
        self._hidden = torch.zeros(self._sizes[-1], hidden_size, dtype=torch.float32, device=self._device)
        if self.forward.model.takes_embeddings:
            self._values = torch.zeros_like(self._hidden)
        for layout in layouts:
            arrays = layout.views(on_device)
            self._check(layout, arrays)
            staged = [HostStaging(layout, buffer[: layout.words]) for buffer in copies.buffers]
            own = on_device[: layout.words]
            rows = self._rows(layout, arrays)
            self._buckets[layout.bucket] = _Bucket(layout, staged, own, arrays, rows)

    def _check(self, layout: ReplayLayout, arrays: ReplayArrays) -> None:
        slots = layout.max_requests + 1
        for name, tensor, least in (
            ("input_lengths", arrays.input_lengths, slots),
            ("cu_seqlens", arrays.cu_seqlens, slots + 1),
            ("cu_kv_seqlens", arrays.cu_kv_seqlens, slots + 1),
            ("padding_offset", arrays.padding_offset, layout.bucket),
        ):
            problem = metadata_problem(name, tensor, least=least, device_type=self._device.type)
            if problem:
                raise ValueError(problem)

    def _rows(self, layout: ReplayLayout, arrays: ReplayArrays) -> AttentionRows:
        slots, bucket = layout.max_requests + 1, layout.bucket
        return AttentionRows(
            starts=[0] * slots,
            lengths=[bucket] + [0] * (slots - 1),
            block_tables=[[] for _ in range(slots)],
            num_decode=0,
            device=DeviceRows(
                cu_seqlens=arrays.cu_seqlens,
                cu_kv_seqlens=arrays.cu_kv_seqlens,
                kv_lens=arrays.input_lengths,
                slots=arrays.slots[self._tag],
                block_tables=arrays.block_tables[self._tag],
                max_q=bucket,
                max_kv=bucket,
            ),
        )

    def capture(self, session: CaptureSession) -> None:
        """Captures the buckets, the largest first, each after two runs and before a test of its replay.

        Fault point `prefill_graph.capture`, with the bucket and phase=before, during. Raises RuntimeError when a replay
        gives other numbers than the run before it.
        """
        recorder = self._recorder or recorder_for(self._device, self._debug_folder)
        for done, size in enumerate(reversed(self._sizes), 1):
            began = time.monotonic()
            self._capture(self._buckets[size], recorder, session)
            self.capture_seconds.append(time.monotonic() - began)
            self._progress(done, len(self._sizes))
        self.memory_bytes = recorder.memory_bytes()
        for group in self._groups:
            self._wipe(group.tag, self._scratch.of(group.tag))
        self._limits = self._limits_of(PrefillGraphStatus.CAPTURED)
        _log.info(
            "prefill graphs captured",
            extra={
                "buckets": list(self._sizes),
                "memory_bytes": self.memory_bytes,
                "seconds": round(sum(self.capture_seconds), 3),
            },
        )

    def _capture(self, bucket: _Bucket, recorder: Recorder, session: CaptureSession) -> None:
        size, logits = bucket.layout.bucket, self.logits[: self._settings.max_requests]
        tables = {group.tag: [self._scratch.of(group.tag)] for group in self._groups}
        # A prompt that fills the bucket, over the scratch blocks: nothing of it can be seen by a request.
        vocabulary = self.forward.model.config.vocab_size
        prompt = BatchRow("capture", [token % vocabulary for token in range(size)], 0, tables[self._tag][0], True)
        self._stage(bucket, [prompt], tables)
        bucket.plan = self.forward.backend.graph_plan(bucket.rows, selection_mode=GraphSelectionMode.PREFILL_GRAPH)

        def run() -> None:
            self._run(bucket)

        def run_recorded() -> None:
            run()
            fault("prefill_graph.capture", phase="during", bucket=size)

        fault("prefill_graph.capture", phase="before", bucket=size)
        for _ in range(WARM_UPS):
            recorder.warm_up(run)
        expected = [logits.clone(), self._hidden[:size].clone()]
        session.begin_capture()
        bucket.recording, _ = recorder.record(run_recorded, f"prefill_{size}")
        for found in (logits, self._hidden[:size]):
            found.fill_(torch.nan)
        bucket.recording.replay()
        recorder.settle()
        for name, found, wanted in zip(("logits", "hidden"), (logits, self._hidden[:size]), expected, strict=True):
            # As bits, since random weights may lead to NaN
            if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
                raise RuntimeError(f"the prefill graph of {size} tokens gives other {name} than an eager run")

    def _run(self, bucket: _Bucket) -> None:
        """What a graph holds. Everything it reads and writes lies at fixed addresses."""
        arrays, forward, size = bucket.arrays, self.forward, bucket.layout.bucket
        override = None if self._values is None else Override(arrays.overridden, self._values[:size])
        positions = arrays.position_ids if self._axes else arrays.positions
        slots = arrays.slots[self._tag]
        forward.backend.begin(bucket.plan)
        stream = forward(arrays.token_ids, positions, slots, bucket.plan, override=override)
        stream.hidden_into(self._hidden[:size])
        logits = self.logits[: bucket.layout.max_requests]
        self.greedy(forward.logits(stream, arrays.last_tokens, out=logits))

    def run_eager(self, bucket: int) -> None:
        """What the graph of `bucket` holds, launch by launch, on the batch that was prepared."""
        self._run(self._bucket(bucket))

    def report(self) -> CapturedGraphs:
        return CapturedGraphs(self.role.value, len(self._buckets), self.capture_seconds, self.memory_bytes)

    # -- steps ----------------------------------------------------------------------------------------------

    @property
    def limits(self) -> ReplayLimits:
        return self._limits

    def can_run(self, batch: StepBatch) -> Decision:
        """Whether one replay computes the batch, and which. Pure: see `decide`."""
        return decide(batch.rows, self._limits)

    def prepare_replay(self, batch: StepBatch, bucket: int) -> None:
        """Lays the batch out for the graph of `bucket` and enqueues the copy.

        Fault point `prefill_graph.prepare` with step=wait, fill, copy, embeddings: before each. Raises whatever goes
        wrong; the batch can be computed eagerly then, and the next one be prepared again.
        """
        self._prepared = None
        found = self._bucket(bucket)
        self._stage(found, batch.rows, {self._tag: [row.block_table for row in batch.rows]})
        if any(row.embeddings for row in batch.rows):
            self._place_embeddings(batch.rows)
        tokens = sum(len(row.token_ids) for row in batch.rows)
        self._output = ReplayOutput(self.logits[: len(batch.rows)], self._hidden[:tokens])
        self._prepared = found

    def replay(self) -> ReplayOutput:
        """Launches the graph that was prepared. Raises RuntimeError when none is, or after `release`."""
        found, self._prepared = self._prepared, None
        if self._released:
            raise RuntimeError("the prefill graphs were released")
        if found is None or found.recording is None or self._output is None:
            raise RuntimeError("no replay was prepared")
        found.recording.replay()
        return self._output

    def release(self) -> None:
        """Drops the graphs and gives the scratch blocks back; a second call does nothing."""
        if self._released:
            return
        self._released = True
        self._prepared = None
        self._buckets.clear()
        self._limits = self._limits_of(PrefillGraphStatus.CAPTURE_UNAVAILABLE)
        self._scratch.release()

    def device_arrays(self, bucket: int) -> ReplayArrays:
        """What the graph of `bucket` reads; its contents are those of the last batch that was prepared."""
        return self._bucket(bucket).arrays

    def _bucket(self, size: int) -> _Bucket:
        if self._released:
            raise RuntimeError("the prefill graphs were released")
        return self._buckets[size]

    def _place_embeddings(self, rows: Sequence[BatchRow]) -> None:
        """Which places are taken, the staged arrays tell; what stood in `_values` elsewhere is not read."""
        fault("prefill_graph.prepare", step="embeddings")
        assert self._values is not None
        first, placed = 0, []
        for row in rows:
            placed.append((first, row.embeddings))
            first += len(row.token_ids)
        place_rows(placed, None, self._values, self._embeddings.send)

    def _stage(self, bucket: _Bucket, rows: Sequence[BatchRow], tables: Mapping[str, Sequence[Sequence[int]]]) -> None:
        assert self._copies is not None
        fault("prefill_graph.prepare", step="wait")
        turn = self._copies.next()
        fault("prefill_graph.prepare", step="fill")
        failure = bucket.staged[turn].fill(rows, tables)
        if failure is not None:
            raise ValueError(failure.reason)
        fault("prefill_graph.prepare", step="copy")
        self._copies.copy(turn, bucket.staged[turn].buffer, bucket.on_device)


def pad_token_id(config: ModelConfig) -> int:
    """The token that padding carries: the model's own, else its end-of-sequence token, else 0. One that is outside the
    vocabulary counts as none."""
    for token in (config.pad_token_id, *config.eos_token_ids[:1]):
        if token is not None and 0 <= token < config.vocab_size:
            return token
    return 0


def create_for_prefill(
    make: Callable[[ScratchBlocks], PrefillGraphRunner], kv: KvCache, largest_bucket: int, session: CaptureSession
) -> tuple[PrefillGraphRunner | None, str]:
    """The prefill graphs of an engine, captured; or None, and why there are none. See `capture_graphs`."""
    return capture_graphs(lambda: _with_scratch(make, kv, largest_bucket), session)


def _with_scratch(
    make: Callable[[ScratchBlocks], PrefillGraphRunner], kv: KvCache, largest_bucket: int
) -> PrefillGraphRunner:
    scratch = ScratchBlocks(kv, largest_bucket)
    try:
        return make(scratch)
    except BaseException:
        scratch.release()
        raise
