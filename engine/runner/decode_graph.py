"""Decode CUDA graphs: a whole decode step from its staged inputs to the greedy tokens, captured per batch size.

All sizes share the step's buffers (`DeviceInputs`), one memory pool, one logits buffer and one buffer of tokens, so a
replay is a copy from the host, one launch, and a copy back. Where the attention backend has several ways for so many
rows, a size has a graph for each, and the step's lengths decide. Rows that pad a batch up to a graph's size have token
0, see nothing, and store their KV nowhere; their results are not looked at. Rows that want more than the likeliest
token are sampled from the logits afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.backend import AttentionRows, GraphSelectionMode
from engine.messages import CapturedGraphs
from engine.parallel.communicator import Communicator, single
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.capture import Recorder, Recording, recorder_for
from engine.runner.decode_status import DecodeDecision, DecodeLimits, decide
from engine.runner.device_forward import DeviceForward
from engine.runner.device_inputs import DeviceInputs, DeviceStepInputs, device_rows
from engine.runner.graph_session import CaptureSession
from rpc.graph_status import GraphRole

_WARM_UPS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step of so many rows."""

    plan: Any  # of the attention backend
    recording: Recording


class DecodeGraphRunner:
    """Captures at start-up, replays in steps. `can_run` is pure; whoever acts on its answer counts it."""

    role = GraphRole.DECODE

    def __init__(
        self,
        forward: DeviceForward,
        inputs: DeviceInputs,
        logits: torch.Tensor,
        greedy: Callable[[torch.Tensor], object],
        sizes: Sequence[int],
        group_tags: tuple[str, ...],
        *,
        debug_folder: Path | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        communicator: Communicator | None = None,
    ) -> None:
        """logits: float32 [largest size, vocab], filled by every replay; with several ranks, on others than the first
        [largest size, own part of the vocabulary]. greedy(logits of n rows): enqueues the choice of their likeliest
        tokens, written to memory of its own. sizes: ascending, the same on every rank. progress(done, total) is called
        after each graph. communicator: to the other ranks, which capture the same."""
        self.forward = forward
        self.inputs = inputs
        self.logits = logits
        self.greedy = greedy
        self.limits = DecodeLimits(tuple(sizes), inputs.limits.max_blocks, group_tags)
        self.capture_seconds: list[float] = []
        self.memory_bytes = 0
        self._communicator = communicator or single()
        self._progress = progress
        self._debug_folder = debug_folder
        self.latest: DecodeGraph | None = None  # that was replayed
        self._graphs: dict[int, list[DecodeGraph]] = {}  # by size: one for each of the backend's plans
        self._released = False

    # -- start-up -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """A first eager run of the largest size: what it compiles and allocates is outside every graph."""
        backend = self.forward.backend
        if not backend.admits(selection_mode=GraphSelectionMode.DECODE_GRAPH):
            raise ValueError(f"attention backend {backend.name} cannot be captured in a decode graph")
        if not self.limits.sizes or self.limits.sizes[-1] > self.inputs.limits.max_rows:
            raise ValueError(f"decode graphs of {self.limits.sizes} rows: at most {self.inputs.limits.max_rows} fit")
        size = self.limits.sizes[-1]
        self.inputs.stage_blank(size, self._vocab_size)
        for plan in self._plans(size):
            self.run_eager(size, plan)

    def capture(self, session: CaptureSession) -> None:
        """Largest size first. Raises RuntimeError when a replay gives other logits than the eager run before it."""
        device = self.logits.device
        recorder = recorder_for(device, self._debug_folder)
        sizes = self.limits.sizes
        for done, size in enumerate(reversed(sizes), 1):
            self._graphs[size] = [
                self._capture(size, plan, f"decode_{size}" + f"_{number}" * (number > 1), recorder, session)
                for number, plan in enumerate(self._plans(size), 1)
            ]
            self._progress(done, len(sizes))
        self.memory_bytes = recorder.memory_bytes()
        self.inputs.forget_tables()
        _log.info(
            "decode graphs captured",
            extra={
                "sizes": list(sizes),
                "memory_bytes": self.memory_bytes,
                "seconds": round(sum(self.capture_seconds), 3),
            },
        )

    def _capture(self, size: int, plan: Any, name: str, recorder: Recorder, session: CaptureSession) -> DecodeGraph:
        began = time.monotonic()

        def run() -> None:
            self.run_eager(size, plan)

        self.inputs.stage_blank(size, self._vocab_size)
        for _ in range(_WARM_UPS):
            recorder.warm_up(run)
        expected = self.logits[:size].clone()
        self._communicator.barrier()  # a rank that fails before this leaves no other one in a half-captured sum
        session.begin_capture()
        recording, _ = recorder.record(run, name)
        self.logits[:size].fill_(torch.nan)
        recording.replay()
        self._communicator.wait_device()
        recorder.settle()
        # As bits, since logits of random weights may hold NaN
        if not torch.equal(self.logits[:size].view(torch.int32), expected.view(torch.int32)):
            raise RuntimeError(f"the decode graph of {size} rows gives other logits than an eager run")
        self.capture_seconds.append(time.monotonic() - began)
        return DecodeGraph(plan, recording)

    def report(self) -> CapturedGraphs:
        return CapturedGraphs(self.role.value, len(self.capture_seconds), self.capture_seconds, self.memory_bytes)

    def release(self) -> None:
        """Lets go of the graphs and their memory; a second call does nothing, and a replay raises afterwards."""
        self._released = True
        self.latest = None
        self._graphs.clear()

    # -- steps ----------------------------------------------------------------------------------------------

    def can_run(self, rows: Sequence[BatchRow], group_tags: tuple[str, ...]) -> DecodeDecision:
        return decide(rows, group_tags, self.limits)

    def stage(self, batch: StepBatch, size: int) -> DeviceStepInputs:
        """Checks the batch and enqueues the copy of its inputs. Raises ValueError as `DeviceInputs.decode` does."""
        if self._released:
            raise RuntimeError("the decode graphs were released")
        return self.inputs.decode(batch, size, prepare=False)

    def refresh(self, inputs: DeviceStepInputs, size: int) -> DecodeGraph:
        """The graph that suits the step, after what its attention plans on the host, where it has any."""
        backend, graphs = self.forward.backend, self._graphs[size]
        graph = graphs[0] if len(graphs) == 1 else graphs[backend.pick([g.plan for g in graphs], inputs.rows)]
        backend.refresh(graph.plan, inputs.rows)
        return graph

    def replay(self, graph: DecodeGraph) -> None:
        """Enqueues the step that was staged; the first rows of `logits`, and what `greedy` wrote, are its results."""
        self.latest = graph
        graph.recording.replay()

    def run_eager(self, size: int, plan: Any) -> None:
        """What a graph of `size` rows holds, launch by launch."""
        buffers = self.inputs.cut(size)
        self.inputs.prepare_decode(size)
        self.forward.backend.begin(plan)
        stream = self.forward(buffers.token_ids, buffers.positions, buffers.slots, plan)
        self.greedy(self.forward.logits(stream, out=self.logits[:size]))

    @property
    def _vocab_size(self) -> int:
        return self.forward.model.config.vocab_size

    def _plans(self, size: int) -> list[Any]:
        """For rows of any length up to the table's width."""
        width = self.inputs.limits.max_blocks
        rows = AttentionRows(
            starts=[0] * size,
            lengths=[1] * size,
            block_tables=[[0]] * size,
            num_decode=size,
            device=device_rows(self.inputs.cut(size), 1, width * self.inputs.block_size),
        )
        return self.forward.backend.graph_plans(rows, selection_mode=GraphSelectionMode.DECODE_GRAPH)
