"""The engine's step loop: messages and events in, one batch through the model, a message out.

`EngineCore` is one engine without its sockets: a test can drive it in its own process. `EngineLoop` adds the sockets
of a front and waits when there is nothing to compute.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from cache_store.agent import CacheStoreAgent
from cache_store.tiers.store import TierStore
from engine.config import EngineConfig
from engine.grammar.compiling import GrammarWorkers
from engine.kv_cache.cache import KvCache
from engine.messages import (
    EngineEnvelope,
    EngineStats,
    FrontMessage,
    KvGroupInfo,
    Observation,
    StepMessage,
    TierFigures,
)
from engine.requests import StepTime
from engine.runner.batch import StepBatch, StepResult
from engine.scheduler.batching import StepPlan
from engine.scheduler.limits import Limits
from engine.scheduler.scheduler import Scheduler
from engine.sockets import has_message
from engine.transfer import AgentTransfer
from rpc.errors import BatonError, ErrorCode
from rpc.faults import clock as fault_clock
from rpc.faults import fault
from rpc.graph_status import PrefillGraphStatus
from rpc.log_limit import LogLimit
from rpc.metric_families import Role, families_of

if TYPE_CHECKING:
    from engine.parallel.agents import RankAgents
    from engine.parallel.hub import Hub
    from engine.parallel.tiers import RankTiers
    from engine.profiling import StepProfiler

IDLE_MESSAGE_S = 1.0  # longest silence towards the front
FIGURES_S = 0.05  # longest time that a busy engine keeps its figures back
STOP_S = 10.0  # longest wait of a thread that stops the loop

_log = logging.getLogger(__name__)


class EngineUnusable(Exception):
    """The engine cannot compute any more; its process must end."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(str(error))
        self.error = error


class Runner(Protocol):
    """The part of `engine.runner.model_runner.ModelRunner` that the loop uses."""

    groups: list[KvGroupInfo]

    def execute(self, batch: StepBatch, on_layer: Callable[[str, int], None] | None = None) -> StepResult: ...
    def wipe(self, group: str, blocks: Sequence[int]) -> None: ...
    def release(self) -> None: ...


class EngineCore:
    """Scheduler, KV cache, model runner and cache-store agent of an engine; with several ranks, rank 0's part and its
    hold on the others. Belongs to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        agent: CacheStoreAgent | RankAgents,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        kv: KvCache | None = None,
        embedding_size: int = 0,
        grammars: GrammarWorkers | None = None,
        hub: Hub | None = None,
        tiers: TierStore | RankTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` are the usable ones, without block 0. `kv`: a cache of theirs that was made before.
        `embedding_size`: numbers of a row that may stand in place of a token's embedding; 0: the model takes none.
        `grammars`: compiles grammars of requests; None: such requests are refused. `hub`: to the other ranks, which
        `runner` and `agent` stand for too; None: there are none. `tiers`: below the KV pool; None: there are none."""
        limits = Limits.of(
            config,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            embedding_size=embedding_size,
        )
        self.runner = runner
        self.agent = agent
        self.time = StepTime(fault_clock("engine.clock", clock, rank=0))
        self.kv = kv or KvCache(runner.groups, num_blocks, config.enable_prefix_caching)
        self.transfer = AgentTransfer(agent, runner.groups, vocab_size, runner.wipe)
        self.tiers = tiers
        self.scheduler = Scheduler(self.kv, limits, self.transfer, self.time, grammars, tiers)
        self.hub = hub
        self.profiler: StepProfiler | None = None  # where profiles may be recorded
        self.stopping = False
        self._seq = 0
        self._graph_log = LogLimit()
        role: Role = "prefill" if config.role == "prefill" else "decode"
        self._families = families_of(role, colocated=True, tensor_parallel=True)
        self._told_at = self.time.now
        self._told_releases = 0
        self._figures_wait = False

    # -- in -------------------------------------------------------------------------------------------------

    def handle(self, message: FrontMessage) -> None:
        """What the front has to say. Aborts come after requests, so that one message may hold both."""
        scheduler = self.scheduler
        self.time.refresh()
        for add in message.adds:
            scheduler.add(add)
        for abort in message.aborts:
            scheduler.abort(abort)
        if message.flush_cache:
            self.scheduler.flush_cache()
        if self.profiler is not None:
            for order in message.profiles:
                self.profiler.order(order)
        if message.shutdown:
            self.stop()

    def stop(self) -> None:
        """Ends every open request; nothing is computed afterwards. A second call does nothing."""
        if self.stopping:
            return
        self.stopping = True
        fault("engine.stop", rank=0)
        skipped, kind = self.scheduler.batcher.next_step()
        if skipped:
            _log.info("the next step is skipped: the engine stops", extra={"requests": skipped, "kind": kind})
        self.scheduler.end_all(
            BatonError(ErrorCode.SERVER_DRAINING, "the server is shutting down; send the request to another one")
        )
        if self.hub is not None:
            self.hub.stop(skipped, kind)

    # -- a step ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Books what happened since the last step, and computes the next batch. False: there was none.

        Fault point `engine.step`, with the kind of the batch and its first request: before it runs. Raises
        EngineUnusable when the model cannot run any more.
        """
        scheduler = self.scheduler
        self.time.refresh()
        self.transfer.hand_over()
        self.transfer.deliver(scheduler)
        scheduler.take_grammars()
        scheduler.take_fetches()
        scheduler.tick()
        plan = scheduler.form()
        if not plan.rows:
            return False
        began = self.time.now
        try:
            fault("engine.step", kind=plan.kind, request_key=plan.rows[0].request_key, rank=0)
            batch = plan.batch
            result = self.runner.execute(batch, self._layer_hook(plan, batch))
        except Exception as error:
            self.time.refresh()
            failure = _step_failure(error)
            code = failure.code.name
            # An error is logged where it ends: at whoever asked for each of these requests.
            _log.warning(
                "a step of %d requests failed: %s", len(plan.rows), failure, exc_info=error, extra={"code": code}
            )
            self.transfer.step_failed()
            scheduler.fail_step(plan, failure)
            if failure.code in _UNUSABLE:
                raise EngineUnusable(failure) from error
            return True
        ended = self.time.refresh()
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            if outcome.failure is not None:
                code = outcome.failure.code.name
                _log.warning("a step failed for %s: %s", row.request_key, outcome.failure, extra={"code": code})
        if plan.num_decode < len(plan.rows):
            self._log_graph(plan, result)
        scheduler.book(plan, result)
        news, kind = scheduler.news, plan.kind
        news.sample("baton_engine_step_seconds", ended - began, kind=kind)
        news.sample("baton_engine_batch_requests", len(plan.rows), kind=kind)
        news.sample("baton_engine_batch_tokens", plan.num_tokens, kind=kind)
        if kind == "decode" and "baton_decode_cuda_graph_steps_total" in self._families:
            news.count("baton_decode_cuda_graph_steps_total", status=result.decode_status)
            padding = max(0, result.decode_graph_rows - len(plan.rows))
            if padding:
                news.count("baton_decode_cuda_graph_padded_rows_total", padding)
                news.count("baton_decode_cuda_graph_padded_tokens_total", padding)
        return True

    def _log_graph(self, plan: StepPlan, result: StepResult) -> None:
        """Logs why prompts that this step begins were not replayed, the first time and ever more rarely, by status."""
        status = result.prefill_status
        if status in (PrefillGraphStatus.REPLAYED, PrefillGraphStatus.NOT_REQUESTED):
            return
        for request in plan.requests[plan.num_decode :]:
            if request.graph_status.value:
                continue
            count = self._graph_log.occurred(status)
            if count:
                _log.info(
                    "a prompt was computed without its prefill graph",
                    extra={
                        "reason": status.value,
                        "detail": result.prefill_detail,
                        "occurrences": count,
                        "request_key": request.key,
                    },
                )

    def _layer_hook(self, plan: StepPlan, batch: StepBatch) -> Callable[[str, int], None] | None:
        """Fault point `engine.layer` and publication, after each layer of a step that computes a prompt. The batch gets
        what is published, for ranks that do it likewise."""
        if plan.num_decode == len(plan.rows):
            return None
        publish = self.transfer.publisher(plan)
        if publish is not None:
            batch.shares = publish.shares

        def on_layer(group: str, layer: int) -> None:
            fault("engine.layer", group=group, layer=layer, rank=0)
            if publish is not None:
                publish(group, layer)

        return on_layer

    # -- between steps --------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Tells the agents of what the step computed, once its tokens have left."""
        self.transfer.hand_over()
        if self.hub is not None and not self.stopping:
            self.hub.flush()

    def rest(self) -> None:
        """There is nothing to compute: the other ranks get, and give, a sign of life when one is due."""
        if self.hub is not None:
            fault("engine.rest", rank=0)
            self.hub.heartbeat()

    # -- out ------------------------------------------------------------------------------------------------

    def wait_s(self) -> float:
        """Longest time that the loop may sleep when no batch could be formed."""
        wait_s = min(self.scheduler.next_tick_in(), max(0.0, self._told_at + IDLE_MESSAGE_S - self.time.now))
        return wait_s if self.hub is None else min(wait_s, self.hub.wait_s())

    def take_outputs(self) -> StepMessage | None:
        """What somebody waits for, without the figures, which `take_message` brings later. None if there is nothing."""
        if not self.scheduler.news:
            return None
        self._figures_wait = True
        self._seq += 1
        return StepMessage(self._seq, *self.scheduler.news.take_outputs())

    def figures_due(self) -> bool:
        """Whether an engine that goes on computing should give its figures."""
        return self.time.now >= self._told_at + FIGURES_S

    def take_message(self) -> StepMessage | None:
        """All news since the last one; None if there are none and it is less than a second old.

        Blocks that a peer let go of are news too: the front shows the ledger as it is.
        """
        kv_events = self.kv.take_events()
        quiet = not (self.scheduler.news or self._figures_wait or kv_events or self.kv.releases != self._told_releases)
        if quiet and self.time.now < self._told_at + IDLE_MESSAGE_S:
            return None
        self._told_releases = self.kv.releases
        self._figures_wait = False
        news = self.scheduler.news
        for name, count in (("capacity", self.kv.evicted_blocks), ("flush", self.kv.flushed_blocks)):
            if count:
                news.count("baton_prefix_cache_evicted_blocks_total", count, reason=name)
        self.kv.evicted_blocks = self.kv.flushed_blocks = 0
        outputs, staged_ends, observations = news.take()
        # Anybody may ask the agent of a decode server about leases; it has none, and no figures about them.
        observations += [
            Observation(item.name, dict(item.labels), item.value)
            for item in self.agent.take_observations()
            if item.name in self._families
        ]
        if self.tiers is not None:
            observations += [
                Observation(item.name, dict(item.labels), item.value) for item in self.tiers.take_observations()
            ]
        self._seq += 1
        self._told_at = self.time.now
        return StepMessage(self._seq, outputs, staged_ends, kv_events, observations, self.stats())

    def stats(self) -> EngineStats:
        """Present counts."""
        scheduler, agent = self.scheduler, self.agent.stats()
        batcher = scheduler.batcher
        return EngineStats(
            running=len(batcher.running),
            waiting=len(batcher.waiting) + len(batcher.reserving) + len(batcher.ready),
            loading=len(scheduler.holds.loading),
            ledgers=self.kv.ledgers(),
            leases=agent.leases,
            transfers_inflight=agent.transfers_inflight,
            transfer_queue_depth=agent.queue_depth,
            tombstones=agent.tombstones,
            peers_connected=agent.peers_connected,
            peers_incompatible=agent.peers_incompatible,
            peers_lost=agent.peers_lost,
            oldest_hold_seconds=dict(scheduler.oldest_hold_seconds()),
            ranks=self.agent.rank_stats() if self.hub is not None else [],  # type: ignore[union-attr]
            tiers=[
                TierFigures(name, tier.blocks, tier.stored_bytes, tier.limit_bytes)
                for name, tier in (self.tiers.stats() if self.tiers is not None else {}).items()
            ],
        )


_UNUSABLE = (ErrorCode.ENGINE_DEAD, ErrorCode.GRAPH_CAPTURE_DIRTY)


def _step_failure(error: Exception) -> BatonError:
    """The code of a failed step. A device that has failed cannot be used again by the process that used it."""
    if isinstance(error, BatonError) and error.code in _UNUSABLE:
        return error
    metadata = {"cause": type(error).__name__}
    if isinstance(error, BatonError):
        metadata["cause"], metadata["cause_code"] = error.code.name, str(int(error.code))
    if type(error).__name__ == "AcceleratorError":
        return BatonError(ErrorCode.ENGINE_DEAD, "the engine's device has failed", metadata=metadata)
    return BatonError(ErrorCode.EXECUTION_EXCEPTION, "the model step failed; send the request again", metadata=metadata)


class Wakeup:
    """A descriptor by which other threads end the loop's wait."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class EngineLoop:
    """Runs a core for a front, over its two sockets, until the front says to stop."""

    def __init__(self, core: EngineCore, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], wakeup: Wakeup) -> None:
        self.core = core
        self._inbox = inbox
        self._outbox = outbox
        self._wakeup = wakeup
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrontMessage)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        for descriptor in core.hub.filenos() if core.hub is not None else ():
            self._poller.register(descriptor, zmq.POLLIN)
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = 0

    def stop(self, wait_s: float = STOP_S) -> bool:
        """Ends `run`, from any thread, as the front's shutdown message does; may be called again. The step that is
        being computed is finished. True: the loop has ended, and nothing that it used is in use any more.

        Called by the loop's own thread it does not wait.
        """
        self._stop.set()
        self._wakeup.wake()
        if self._thread == threading.get_ident():
            return self._ended.is_set()
        return self._ended.wait(wait_s)

    def run(self) -> None:
        """Returns after the front's shutdown message, or `stop`. Raises EngineUnusable."""
        self._thread = threading.get_ident()
        try:
            self._run()
            if self.core.profiler is not None:
                self.core.profiler.close()
            # Graphs before the scratch blocks that they write to, and both before the model. Not where the device has
            # failed, which may not be touched again.
            self.core.runner.release()
        finally:
            self._ended.set()

    def _run(self) -> None:
        core = self.core
        try:
            while True:
                if self._stop.is_set():
                    core.stop()
                self._receive()
                if core.profiler is not None:
                    for news in core.profiler.turn():
                        self._outbox.send(self._encoder.encode(EngineEnvelope(profile=news)))
                computed = core.step()
                if computed:
                    # Tokens first. Figures take longer to make, to send and to book, and can wait.
                    self._tell(core.take_outputs())
                core.hand_over()
                if core.stopping or not computed or core.figures_due():
                    self._tell(core.take_message())
                if core.stopping:
                    return
                if not computed:
                    core.rest()
                    self._sleep()
        except EngineUnusable:
            self._tell(core.take_message())
            raise

    def _receive(self) -> None:
        while has_message(self._inbox):
            self.core.handle(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))

    def _tell(self, message: StepMessage | None) -> None:
        if message is not None:
            self._outbox.send(self._encoder.encode(EngineEnvelope(step=message)))

    def _sleep(self) -> None:
        """Until the front or an agent's thread has something, or the clock."""
        wait_s = self.core.wait_s()
        if wait_s > 0:
            # Rounded up: a wait that ends too early would spin.
            self._poller.poll(math.ceil(wait_s * 1000))
        self._wakeup.clear()
