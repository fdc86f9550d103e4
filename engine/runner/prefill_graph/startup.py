"""Prefill graphs in an engine's start: the gate's facts, the scratch blocks, the capture, and what comes of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.attention.backend import GraphSelectionMode
from engine.config import EngineConfig
from engine.kv_cache.cache import KvCache
from engine.messages import CapturedGraphs
from engine.progress import Progress
from engine.runner.prefill_graph.decision import Decision
from engine.runner.prefill_graph.gate import (
    GateAnswer,
    GateFacts,
    ModelFacts,
    Topology,
    ask,
    capable_backend,
    effective,
)
from engine.runner.prefill_graph.scratch import scratch_blocks
from rpc.errors import BatonError, ErrorCode
from rpc.graph_status import PrefillGraphStatus

if TYPE_CHECKING:
    from engine.runner.model_runner import ModelRunner

_log = logging.getLogger(__name__)


def gate_facts(config: EngineConfig, runner: ModelRunner, *, cuda_graphs: bool) -> GateFacts:
    """The facts of an engine that has loaded its model. Every family served today attends densely over all heads, and
    its forward's shapes follow from the number of tokens."""
    return GateFacts(
        requested=config.prefill_graph.enabled,
        prefills=config.role == "prefill" or config.allow_local_prefill,
        cuda_graphs=cuda_graphs,
        topology=Topology(tensor=config.tensor_parallel_size, world=config.tensor_parallel_size),
        model=ModelFacts(),
        choose_backend=lambda: capable_backend([runner.backend], selection_mode=GraphSelectionMode.PREFILL_GRAPH),
    )


class PrefillGraphStart:
    """One engine's start-up, in two moves: before its KV pool is made, and after."""

    def __init__(self, config: EngineConfig, facts: GateFacts, runner: ModelRunner) -> None:
        """Asks the gate. Raises INVALID_PARAMS for settings that the engine cannot have, where they have an effect."""
        self._settings = config.prefill_graph
        self._runner = runner
        self.buckets: tuple[int, ...] = ()
        self.spare: Mapping[str, int] = {}  # blocks by cache group that the pool must have beyond the usable ones
        self.captured: list[CapturedGraphs] = []
        if effective(facts).open:
            self.buckets = self._settings.buckets_within(runner.config.max_model_len, config.max_num_batched_tokens)
        self.answer = ask(facts)
        if self.answer.open:
            self.spare = scratch_blocks(runner.groups, self.buckets[-1])

    @property
    def status(self) -> PrefillGraphStatus:
        return self.answer.status

    def finish(self, kv: KvCache, debug_folder: Path | None = None) -> None:
        """Captures where the gate is open, and settles the engine's status. debug_folder: where each graph is written.

        Raises GRAPH_CAPTURE_DIRTY when a capture that had begun failed: nothing may run on the device then. Raises
        PREFILL_GRAPH_UNSUPPORTED for any status but captured when the settings are strict.
        """
        if self.answer.open:
            self._capture(kv, debug_folder)
        self._runner.set_prefill_status(Decision(self.answer.status, detail=self.answer.detail))
        if self.answer.open:
            return
        if self._settings.strict:
            raise self._refusal()
        if self.answer.status is not PrefillGraphStatus.NOT_REQUESTED:
            _log.warning(
                "--enable-prefill-cuda-graph has no effect here: %s",
                self.answer.detail or self.answer.status.value,
                extra={"reason": self.answer.status.value},
            )

    def _refusal(self) -> BatonError:
        status = self.answer.status.value
        why = f"{status} ({self.answer.detail})" if self.answer.detail else status
        return BatonError(
            ErrorCode.PREFILL_GRAPH_UNSUPPORTED,
            f"--prefill-cuda-graph-strict: the prefill graphs are not captured: {why}; see --enable-prefill-cuda-graph",
            metadata={"status": status},
        )

    def _capture(self, kv: KvCache, debug_folder: Path | None) -> None:
        with Progress("capturing prefill graphs", len(self.buckets), "graphs") as progress:
            graphs, problem = self._runner.capture_prefill_graphs(
                kv,
                self.buckets,
                self._settings,
                progress=lambda done, total: progress.update(done),
                debug_folder=debug_folder,
            )
        if graphs is None:
            self.answer = GateAnswer(PrefillGraphStatus.CAPTURE_UNAVAILABLE, problem)
        else:
            self.captured = [graphs.report()]
