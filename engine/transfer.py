"""Between the scheduler and the cache-store agent: calls one way, events the other, and the protobuf of both.

Publishing happens inside a step, from the model's layer hook, so that the transfer of a layer runs while the
next one is computed. The agent's threads never touch the scheduler: its events are polled by the engine's
main thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cache_store.agent import AgentIdentity, AgentSettings, CacheStoreAgent, KvSourceRef
from cache_store.events import LeaseEnded, LoadDone, LoadFailed
from cache_store.geometry.layout import GroupLayout
from cache_store.memory.pool import KvPool
from cache_store.nixl.agent import installed as nixl_installed
from cache_store.transports import IPC, NIXL
from engine.config import EngineConfig
from engine.messages import FinishReason, KvGroupInfo, PrefillInfo, PromptLogprob, RunMode, TokenLogprob
from engine.parallel.agent_messages import Share, Shares
from engine.requests import Answer, Request
from engine.scheduler.batching import StepPlan
from engine.scheduler.scheduler import Scheduler
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode

if TYPE_CHECKING:
    import torch

    from cache_store.memory.torch_pool import SharedLayers
    from engine.parallel.agents import RankAgents

HAND_OVER_S = 0.005  # longest time that a computed layer waits for the next ones
HAND_OVER_BYTES = 1 << 20
LATE_BYTES = 32 << 20  # a device's step that adds less KV is handed over when its tokens have left

_FINISH_TO_WIRE = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_FINISH_FROM_WIRE = {value: reason for reason, value in _FINISH_TO_WIRE.items()}


def agent_settings(config: EngineConfig) -> AgentSettings:
    return AgentSettings(
        lease_seconds=config.kv_lease_seconds,
        checksum=config.kv_checksum,
        transport=config.kv_transport,
        chunk_bytes=config.cache_store_chunk_bytes,
        queue_size=config.cache_store_queue_size,
        connect_timeout_s=config.cache_store_connect_timeout_ms / 1000,
        connect_retries=config.cache_store_connect_retry_times,
        load_progress_timeout_s=config.load_cache_timeout_ms / 1000,
        publish_timeout_s=config.cache_store_publish_timeout_ms / 1000,
        data_port=config.kv_data_port + config.rank if config.kv_data_port else 0,
        bulk_channels=config.kv_bulk_channels,
        threads=config.cache_store_threads or min(32, os.cpu_count() or 1),
        return_before_deadline_s=config.cache_store_return_before_deadline_ms / 1000,
        steal_before_deadline_s=config.cache_store_steal_before_deadline_ms / 1000,
        quarantine_s=config.cache_store_quarantine_ms / 1000,
        transfer_wait_timeout_s=config.cache_store_transfer_wait_timeout_ms / 1000,
        cancel_timeout_s=config.cache_store_cancel_timeout_ms / 1000,
    )


def agent_identity(
    engine_id: str, model_fingerprint: str, groups: Iterable[KvGroupInfo], rank: int, tp_size: int = 1
) -> AgentIdentity:
    layouts = tuple(
        GroupLayout.of(
            group.tag,
            num_layers=group.num_layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            block_size=group.block_size,
            dtype=group.dtype,
            total_kv_heads=group.total_kv_heads,
        )
        for group in groups
    )
    return AgentIdentity(engine_id, model_fingerprint, layouts[0].dtype, layouts, tp_size=tp_size, rank=rank)


def shared_layers(config: EngineConfig, device_type: str) -> SharedLayers | None:
    """Where the KV tensors come from on the CPU, if other processes read them (ipc) or move their bytes (nixl)."""
    if device_type != "cpu":
        return None
    read = config.role == "prefill" and config.kv_transport in ("auto", IPC)
    moved = config.kv_transport == NIXL or (config.kv_transport == "auto" and nixl_installed())
    if not read and not moved:
        return None
    from cache_store.memory.torch_pool import SharedLayers

    return SharedLayers()


def kv_pool(
    layouts: Sequence[GroupLayout],
    layers: Mapping[str, Sequence[torch.Tensor]],
    device_type: str,
    shared: SharedLayers | None = None,
) -> KvPool:
    """The agent's view of the KV tensors, per group one per layer: in place on the CPU, by copy streams on CUDA.
    shared: of what they were made, if other processes may read them."""
    if device_type == "cuda":
        from cache_store.memory.cuda_pool import CudaKvPool
        from kernels import block_copy, jit

        return CudaKvPool(layouts, layers, block_copy if jit.available("cuda") else None)
    from cache_store.memory.torch_pool import TorchKvPool

    return TorchKvPool(layouts, layers, shared)


def to_wire(answer: Answer) -> common_pb2.PrefillResult:
    """What the decode server needs to go on after a computed prompt."""
    result = common_pb2.PrefillResult(
        cached_tokens=answer.info.cached_tokens,
        prefill_cuda_graph_status=answer.info.cuda_graph_status,
        finish_reason=_FINISH_TO_WIRE[answer.finish_reason],
    )
    token = result.first_token
    token.index, token.token_id = answer.index, answer.token_id
    if answer.logprob is not None:
        token.logprob.CopyFrom(_logprob_to_wire(answer.logprob))
        token.top_logprobs.extend(map(_logprob_to_wire, answer.top_logprobs))
    for entry in answer.prompt_logprobs or ():
        result.prompt_logprobs.append(
            common_pb2.PromptLogprob(
                position=entry.position,
                logprob=_logprob_to_wire(entry.logprob),
                top_logprobs=map(_logprob_to_wire, entry.top_logprobs),
            )
        )
    if answer.stop_token_id is not None:
        result.stop_token_id = answer.stop_token_id
    return result


def from_wire(result: common_pb2.PrefillResult, *, index: int, vocab_size: int, with_prompt_logprobs: bool) -> Answer:
    """A prefill server's result, whose first token must have `index`.

    Raises OUT_OF_VOCAB_RANGE, or CACHE_STORE_LOAD_UNKNOWN_ERROR for a result that lacks what it must have.
    """
    token = result.first_token
    if not (token.HasField("index") and token.HasField("token_id") and result.HasField("cached_tokens")):
        raise _breach("the prefill server's result lacks its first token or its cached tokens", "absent_field")
    if token.index != index:
        raise _breach(f"the prefill server's token has index {token.index}, expected is {index}", "missing_result")
    reason = _FINISH_FROM_WIRE.get(result.finish_reason)
    stop = result.stop_token_id if result.HasField("stop_token_id") else None
    if token.token_id >= vocab_size:
        raise BatonError(
            ErrorCode.OUT_OF_VOCAB_RANGE, "the prefill server's token is outside the vocabulary", stage="load"
        )
    return Answer(
        index=token.index,
        token_id=token.token_id,
        logprob=_logprob_from_wire(token.logprob) if token.HasField("logprob") else None,
        top_logprobs=tuple(map(_logprob_from_wire, token.top_logprobs)),
        # An old peer's empty status means that it has no prefill graphs.
        info=PrefillInfo(result.cached_tokens, result.prefill_cuda_graph_status or "not_requested"),
        prompt_logprobs=[
            PromptLogprob(
                entry.position,
                _logprob_from_wire(entry.logprob),
                tuple(map(_logprob_from_wire, entry.top_logprobs)),
            )
            for entry in result.prompt_logprobs
        ]
        if with_prompt_logprobs
        else None,
        finish_reason=reason,
        stop_token_id=stop,
    )


def _breach(message: str, kind: str) -> BatonError:
    return BatonError(
        ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, message, stage="load", metadata={"contract_breach": kind}
    )


def _logprob_to_wire(value: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, rank=value.rank)


def _logprob_from_wire(value: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, value.rank)


class Publisher:
    """One step's layer hook. Hands layers to the agent a few at a time where they are small.

    Each hand-over wakes the agent's thread, and with it the decode server, which compete with the computation for the
    interpreter and the cores. A prompt of 64 tokens of SmolLM2-135M, whose layers take 0.8 ms and 49 kB each, took
    twice as long to compute with a hand-over per layer. Layers that take longer than HAND_OVER_S go one by one.

    On a device the layers are only queued while this runs, and their marks wake the agent when they are computed: those
    of a replayed graph all at the moment at which the step's tokens are there, too. So a step with little KV, whose
    transfer takes no longer than a few milliseconds, is handed over after its tokens have left, and any other one layer
    by layer.
    """

    def __init__(
        self, agent: CacheStoreAgent | RankAgents, shares: Shares, defer: Callable[[Callable[[], None]], None]
    ) -> None:
        """shares: what the step completes; defer: takes the last hand-over."""
        self.shares = shares
        self._agent = agent
        self._defer = defer
        groups = agent.identity.groups
        # What one layer of the step adds, on this rank
        layer_bytes = {
            group.tag: group.block_bytes * sum(share.new_blocks for share in shares.get(group.tag, ()))
            for group in groups
        }
        self._layer_bytes = layer_bytes
        self._layers_left = num_layers = sum(group.num_layers for group in groups)
        small = num_layers * max(layer_bytes.values()) < LATE_BYTES
        self._all_late = agent.on_device and small
        self._last_late = small or not agent.on_device
        self._held: list[tuple[str, int]] = []
        self._held_bytes = 0
        self._handed_over_at = time.monotonic()

    def __call__(self, group: str, layer: int) -> None:
        self._held.append((group, layer))
        self._held_bytes += self._layer_bytes[group]
        self._layers_left -= 1
        if not self._layers_left and self._last_late:
            self._defer(self._hand_over)
        elif self._all_late:
            return
        elif (
            not self._layers_left
            or self._held_bytes >= HAND_OVER_BYTES
            or time.monotonic() - self._handed_over_at >= HAND_OVER_S
        ):
            self._hand_over()

    def _hand_over(self) -> None:
        after = self._agent.mark()
        for group, layer in self._held:
            for share in self.shares.get(group, ()):
                self._agent.publish(share.request_key, group, layer, share.upto_block, after)
        self._held.clear()
        self._held_bytes = 0
        self._handed_over_at = time.monotonic()


class AgentTransfer:
    """`scheduler.Transfer` on a cache-store agent. `wipe(group, blocks)` zeroes blocks of the pool."""

    def __init__(
        self,
        agent: CacheStoreAgent | RankAgents,
        groups: Sequence[KvGroupInfo],
        vocab_size: int,
        wipe: Callable[[str, Sequence[int]], None],
    ) -> None:
        self.agent = agent
        self._wipe_blocks = wipe
        self._deferred: list[Callable[[], None]] = []
        self._block_sizes = {group.tag: group.block_size for group in groups}
        self._vocab_size = vocab_size

    # -- calls of the scheduler -----------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        allocation = request.allocation
        assert allocation is not None
        blocks = {tag: held.blocks for tag, held in allocation.groups.items()}
        self.agent.admit(request.key, allocation.generation, len(request.tokens), blocks, allocation.cached_tokens)

    def computed(self, request: Request, answer: Answer) -> None:
        key = request.key
        self._deferred.append(lambda: self.agent.computed(key, to_wire(answer), hold=True))

    def hand_over(self) -> None:
        """Tells the agent of the last layers and the results of the step. To be called once the front has the step's
        news: the first token's way to the client is the longer one, and the agent's thread would compete with it."""
        while self._deferred:
            self._deferred.pop(0)()

    def step_failed(self) -> None:
        """What the step has not handed over yet stays here: a device that has failed may not be asked for a mark."""
        self._deferred.clear()

    def fail(self, request_key: str, error: BatonError) -> None:
        self.hand_over()
        self.agent.fail(request_key, error)

    def tombstone(self, request_key: str) -> None:
        self.hand_over()
        self.agent.tombstone(request_key)

    def load(self, request: Request, deadline_s: float | None, reload: bool) -> None:
        allocation = request.allocation
        assert allocation is not None
        wanted = {
            tag: (held.receiving[0], held.blocks[slice(*held.receiving)]) for tag, held in allocation.groups.items()
        }
        trace = request.add.traceparent
        self.agent.load(request.key, self._source(request), len(request.tokens), wanted, deadline_s, reload, trace)

    def keep_alive(self, request: Request) -> None:
        self.agent.keep_alive(request.key, self._source(request))

    def forget(self, request_key: str) -> None:
        self.agent.forget(request_key)

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        self.agent.cancel_load(request_key, error)

    @staticmethod
    def _source(request: Request) -> KvSourceRef:
        source = request.add.kv_source
        assert source is not None
        return KvSourceRef(source.engine_id, source.addresses, source.tp_size)

    # -- inside a step --------------------------------------------------------------------------------------

    def publisher(self, plan: StepPlan) -> Publisher | None:
        """The layer hook that hands over what the step completes; None when it completes nothing.

        A block is complete with its last token; the last block of a prompt also where the prompt ends inside
        it.
        """
        shares: Shares = {}
        for request, row in zip(plan.requests[plan.num_decode :], plan.rows[plan.num_decode :], strict=True):
            if request.mode is not RunMode.PREFILL or request.lease_over:
                continue
            end = row.start + len(row.token_ids)
            for tag, size in self._block_sizes.items():
                upto = -(-end // size) if row.sample else end // size
                done = row.start // size
                if upto > done:
                    shares.setdefault(tag, []).append(Share(request.key, upto, upto - done))
        return Publisher(self.agent, shares, self._deferred.append) if shares else None

    # -- between steps --------------------------------------------------------------------------------------

    def deliver(self, scheduler: Scheduler) -> None:
        """Hands the agent's news to the scheduler."""
        for event in self.agent.poll_events():
            match event:
                case LoadDone():
                    request = scheduler.holds.loading.get(event.request_key)
                    scheduler.load_done(
                        event.request_key,
                        self._read(event, request),
                        event.events,
                    )
                case LoadFailed():
                    if event.foreign or event.error.code is ErrorCode.EXECUTION_EXCEPTION:
                        self._wipe(
                            scheduler.holds.loading.get(event.request_key)
                            or scheduler.holds.leaving.get(event.request_key)
                        )
                    error = event.error.with_context(delivered=str(event.delivered), missing=str(event.missing))
                    scheduler.load_failed(event.request_key, error, event.retriable_here, event.events)
                case LeaseEnded():
                    scheduler.lease_ended(
                        event.request_key,
                        event.generation,
                        event.outcome,
                        event.cause,
                        event.error,
                        event.publish_seconds,
                        event.held_seconds,
                        event.events,
                        event.load_times,
                    )

    def _wipe(self, request: Request | None) -> None:
        """What was received of a prompt whose computation failed, out of blocks that were given away meanwhile, or with
        damage that was found only in its place, may hold NaN, see `ModelRunner.wipe`."""
        if request is None or request.allocation is None:
            return
        for tag, held in request.allocation.groups.items():
            self._wipe_blocks(tag, held.blocks[slice(*held.receiving)])

    def _read(self, event: LoadDone, request: Request | None) -> Answer | BatonError:
        try:
            return from_wire(
                event.result,
                index=len(request.outputs) if request is not None else event.result.first_token.index,
                vocab_size=self._vocab_size,
                with_prompt_logprobs=request is not None and request.wants_prompt_logprobs,
            )
        except BatonError as error:
            return error
