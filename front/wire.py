"""Between the engine's messages and the wire's: tokens, log-probabilities, results, timelines, facts,
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.messages import (
    EngineStats,
    FinishReason,
    KvEvent,
    KvGroupInfo,
    Ledger,
    PrefillInfo,
    PromptLogprob,
    RankStats,
    TimelineEvent,
    TokenLogprob,
    TokenOutput,
)
from protos import common_pb2, worker_pb2

FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}


def token_logprob(value: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, rank=value.rank)


def token_output(token: TokenOutput) -> common_pb2.TokenOutput:
    if token.logprob is None:
        return common_pb2.TokenOutput(index=token.index, token_id=token.token_id)
    return common_pb2.TokenOutput(
        index=token.index,
        token_id=token.token_id,
        logprob=token_logprob(token.logprob),
        top_logprobs=[token_logprob(item) for item in token.top_logprobs],
    )


def prompt_logprob(value: PromptLogprob) -> common_pb2.PromptLogprob:
    return common_pb2.PromptLogprob(
        position=value.position,
        logprob=token_logprob(value.logprob),
        top_logprobs=[token_logprob(item) for item in value.top_logprobs],
    )


def prefill_result(
    token: TokenOutput,
    info: PrefillInfo,
    prompt_logprobs: Sequence[PromptLogprob] | None,
    finish_reason: FinishReason | None,
    stop_token_id: int | None,
) -> common_pb2.PrefillResult:
    """Result of computing a prompt; `finish_reason` only if the first token already ends the request."""
    result = common_pb2.PrefillResult(
        first_token=token_output(token),
        cached_tokens=info.cached_tokens,
        prefill_cuda_graph_status=info.cuda_graph_status,
        prompt_logprobs=[prompt_logprob(item) for item in prompt_logprobs or ()],
    )
    if finish_reason is not None:
        result.finish_reason = FINISH_REASONS[finish_reason]
        if finish_reason is FinishReason.STOP and stop_token_id is not None:
            result.stop_token_id = stop_token_id
    return result


def timeline(stages: Mapping[str, float], events: Iterable[TimelineEvent], accepted_ns: int) -> common_pb2.Timeline:
    """Seconds per stage, and events as seconds since `accepted_ns`, a reading of the same host's monotonic
    clock.
    """
    return common_pb2.Timeline(
        stages=stages,
        events=[
            common_pb2.TimelineEvent(name=event.name, offset_seconds=(event.at_ns - accepted_ns) / 1e9)
            for event in events
        ],
    )


def kv_group(group: KvGroupInfo) -> common_pb2.KvGroup:
    return common_pb2.KvGroup(
        tag=group.tag,
        num_layers=group.num_layers,
        num_kv_heads=group.total_kv_heads or group.num_kv_heads,  # of the model, however many ranks share it
        head_dim=group.head_dim,
        block_size=group.block_size,
        dtype=group.dtype,
    )


def ledger_counts(rank: int, ledger: Ledger) -> worker_pb2.LedgerCounts:
    return worker_pb2.LedgerCounts(
        rank=rank,
        group=ledger.group,
        total=ledger.total,
        free=ledger.free,
        running=ledger.running,
        staged=ledger.staged,
        receiving=ledger.receiving,
        quarantined=ledger.quarantined,
        cached=ledger.cached,
        reserved=ledger.reserved,
    )


def ledger_pages(stats: EngineStats) -> list[dict[str, object]]:
    """The ranks' parts of `/debug/ledger`, in order. Every rank has the same blocks and computes the same requests."""
    return [_ledger_page(stats, part) for part in rank_parts(stats)]


def rank_parts(stats: EngineStats) -> list[RankStats]:
    """What the agent of each rank does, in order of the ranks."""
    if stats.ranks:
        return stats.ranks
    return [
        RankStats(
            0,
            leases=stats.leases,
            transfers_inflight=stats.transfers_inflight,
            transfer_queue_depth=stats.transfer_queue_depth,
            tombstones=stats.tombstones,
            peers_connected=stats.peers_connected,
            peers_incompatible=stats.peers_incompatible,
            peers_lost=stats.peers_lost,
        )
    ]


def _ledger_page(stats: EngineStats, part: RankStats) -> dict[str, object]:
    groups = []
    for ledger in stats.ledgers:
        counts = {
            name: getattr(ledger, name)
            for name in (
                "total",
                "free",
                "running",
                "staged",
                "receiving",
                "quarantined",
                "cached",
                "reserved",
            )
        }
        groups.append({"group": ledger.group, **counts, "imbalance": ledger_imbalance(ledger)})
    return {
        "rank": part.rank,
        "groups": groups,
        "running_requests": stats.running,
        "waiting_requests": stats.waiting,
        "loading_requests": stats.loading,
        "leases": part.leases,
        "transfers_inflight": part.transfers_inflight,
        "transfer_queue_depth": part.transfer_queue_depth,
        "oldest_hold_seconds": {**stats.oldest_hold_seconds, **part.oldest_hold_seconds},
    }


def ledger_imbalance(ledger: Ledger) -> int:
    """Total less the sum of the states; anything but 0 is a leak or a double count."""
    states = ledger.free + ledger.running + ledger.staged + ledger.receiving + ledger.quarantined + ledger.cached
    return ledger.total - states


def kv_cache_event(event: KvEvent) -> worker_pb2.KvCacheEvent:
    return worker_pb2.KvCacheEvent(
        stored=[bytes.fromhex(item) for item in event.stored],
        removed=[bytes.fromhex(item) for item in event.removed],
        parent=bytes.fromhex(event.parent),
        cleared=event.cleared,
    )
