"""What an engine step brings beside tokens: figures for the metrics, ends of staged KV, changes of the
prefix cache.
"""

from __future__ import annotations

import logging

from engine.messages import EngineReady, EngineStats, RankStats, StepMessage
from front.kv_index import KvIndex
from front.reception import Reception
from front.transfer_health import TransferHealth
from front.wire import ledger_imbalance, rank_parts
from rpc.metrics import Registry

HOLD_STATES = ("staged", "receiving", "quarantined")
BLOCK_STATES = ("free", "running", "staged", "receiving", "quarantined", "cached", "reserved")

_log = logging.getLogger(__name__)


class EngineFeed:
    """Books the step messages of one engine. `on_step` never raises: a figure must not stop the stream of tokens."""

    def __init__(
        self,
        *,
        tp_size: int,
        model_name: str,
        metrics: Registry,
        reception: Reception,
        kv_index: KvIndex,
        transfers: TransferHealth,
    ) -> None:
        self._ranks = [str(rank) for rank in range(tp_size)]
        self._model_name = model_name
        self._metrics = metrics
        self._reception = reception
        self._kv_index = kv_index
        self._transfers = transfers
        self._transport = "grpc"
        self._set_up(0)
        self._set_grammars(False)

    def came_up(self, ready: EngineReady) -> None:
        """Facts of the engine, as metrics."""
        metrics = self._metrics
        self._set_up(1)
        self._set_grammars(ready.grammars)
        self._transport = ready.transports[0]
        metrics.set(
            "baton_model_info",
            1,
            model_name=self._model_name,
            dtype=ready.dtype,
            kv_cache_dtype=ready.kv_cache_dtype,
            block_size=str(ready.groups[0].block_size) if ready.groups else "",
            tp_size=str(len(self._ranks)),
            attention_backend=ready.attention_backend,
            kv_transport=self._transport,
        )
        if "baton_prefill_cuda_graph_init" in metrics.families and ready.prefill_cuda_graph_init:
            metrics.set("baton_prefill_cuda_graph_init", 1, status=ready.prefill_cuda_graph_init)
        for graphs in ready.captured:
            metrics.set("baton_cuda_graphs_captured", graphs.count, kind=graphs.kind)
            for seconds in graphs.capture_seconds:
                metrics.observe("baton_cuda_graph_capture_seconds", seconds, kind=graphs.kind)
        for rank in ready.ranks:
            if rank.captured:
                memory_bytes = sum(graphs.memory_bytes for graphs in rank.captured)
                metrics.set("baton_cuda_graph_memory_bytes", memory_bytes, rank=str(rank.rank))

    def died(self) -> None:
        self._set_up(0)
        self._set_grammars(False)

    def _set_up(self, up: int) -> None:
        """Of all ranks, which live and die together."""
        for rank in self._ranks:
            self._metrics.set("baton_engine_up", up, rank=rank)

    def _set_grammars(self, available: bool) -> None:
        if "baton_grammar_validator_available" in self._metrics.families:
            self._metrics.set("baton_grammar_validator_available", int(available))

    def on_step(self, step: StepMessage) -> None:
        try:
            self._metrics.apply(step.observations)
            self._transfers.note(step.observations)
            for end in step.staged_ends:
                self._reception.staged_end(end)
            if step.kv_events:
                self._kv_index.apply(step.kv_events)
        except Exception:
            _log.exception("step message %d could not be booked", step.seq)

    def book_stats(self, stats: EngineStats) -> None:
        """Brings the state gauges up to date. Done at a scrape and not in each step, which has no time for it."""
        metrics = self._metrics
        metrics.set("baton_num_requests_running", stats.running, model_name=self._model_name)
        metrics.set("baton_num_requests_waiting", stats.waiting, model_name=self._model_name)
        if "baton_num_requests_loading" in metrics.families:
            metrics.set("baton_num_requests_loading", stats.loading, model_name=self._model_name)
        for part in rank_parts(stats):
            self._book_rank(stats, part)
        if "baton_kv_leases_active" in metrics.families:
            metrics.set("baton_kv_leases_active", stats.leases)
        for tier in stats.tiers if "baton_kv_tier_blocks" in metrics.families else ():
            metrics.set("baton_kv_tier_blocks", tier.blocks, tier=tier.tier)
            metrics.set("baton_kv_tier_stored_bytes", tier.stored_bytes, tier=tier.tier)
            metrics.set("baton_kv_tier_limit_bytes", tier.limit_bytes, tier=tier.tier)
        metrics.set("baton_kv_transfer_inflight", stats.transfers_inflight, transport=self._transport)
        metrics.set("baton_peers", stats.peers_connected, state="connected")
        metrics.set("baton_peers", stats.peers_incompatible, state="incompatible")
        metrics.set("baton_peers", stats.peers_lost, state="lost")

    def _book_rank(self, stats: EngineStats, part: RankStats) -> None:
        """Every rank has the same blocks; what its agent holds of them for peers is its own."""
        metrics, rank = self._metrics, str(part.rank)
        for ledger in stats.ledgers:
            group = ledger.group
            for state in BLOCK_STATES:
                metrics.set("baton_kv_blocks", getattr(ledger, state), rank=rank, group=group, state=state)
            used = ledger.total - ledger.free - ledger.cached
            metrics.set("baton_kv_blocks_capacity", ledger.total, rank=rank, group=group)
            metrics.set("baton_kv_cache_usage_ratio", used / max(1, ledger.total), rank=rank, group=group)
            imbalance = ledger_imbalance(ledger)
            metrics.set("baton_kv_ledger_imbalance_blocks", imbalance, rank=rank, group=group)
        holds = {**stats.oldest_hold_seconds, **part.oldest_hold_seconds}
        for state in HOLD_STATES:
            if state in holds:
                metrics.set("baton_kv_oldest_hold_seconds", holds[state], rank=rank, state=state)
            else:
                metrics.remove("baton_kv_oldest_hold_seconds", rank=rank, state=state)
        metrics.set("baton_kv_transfer_queue_depth", part.transfer_queue_depth, rank=rank)
