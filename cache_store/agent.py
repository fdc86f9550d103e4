"""The cache-store agent of one engine rank: it serves the KV that its engine staged, and pulls what it needs.

All sockets and all state live on the agent's own thread, an asyncio loop. The methods of `CacheStoreAgent` may be
called from any thread, never block, and never raise for what happens on the network: news come as events.

With a pool on a device (`StagedKvPool`) what the engine says may be true only once the device gets there: `mark` gives
the point, and what is said with it, and everything said after that, takes effect when the point is reached.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from cache_store.equipment import Equipment
from cache_store.events import (
    AgentEvent,
    AgentStats,
    KvSourceRef,
    LeaseEnded,
    LoadDone,
    LoadFailed,
    Observation,
)
from cache_store.failures import of_request
from cache_store.geometry.layout import AgentIdentity, GroupLayout
from cache_store.loading.peers import PeerState
from cache_store.loading.puller import Puller
from cache_store.loop_errors import guarded, on_loop_exception
from cache_store.memory.allocator import keep_freed_memory
from cache_store.memory.pool import KvPool, StagedKvPool
from cache_store.memory.staging import Ticket
from cache_store.nixl.link import START_S as NIXL_START_S
from cache_store.nixl.link import NixlUnavailable
from cache_store.observations import ObservationBuffer
from cache_store.offering import nixl_impossible
from cache_store.serving.lease import LeaseTable
from cache_store.serving.parking import ParkingTable
from cache_store.serving.service import CacheStoreService
from cache_store.settings import AgentSettings
from cache_store.staged_requests import StagedRequests, store_failed
from cache_store.wire import SERVICE
from protos import common_pb2
from rpc import faults
from rpc.channels import bulk_server_options
from rpc.errors import BatonError, ErrorCode
from rpc.server import GrpcServer, join_address

__all__ = [
    "AgentEvent",
    "AgentIdentity",
    "AgentSettings",
    "AgentStats",
    "CacheStoreAgent",
    "GroupLayout",
    "KvSourceRef",
    "LeaseEnded",
    "LoadDone",
    "LoadFailed",
    "Observation",
]

START_TIMEOUT_S = 10.0
SHUTDOWN_GRACE_S = 0.5
MAX_WAITING_PER_SLOT = 64  # commands of the engine not yet taken up, per place of queue_size

_log = logging.getLogger(__name__)


class CacheStoreAgent:
    """One per engine rank. `wake` is called on the agent's thread after an event was queued; it must not block."""

    def __init__(
        self,
        identity: AgentIdentity,
        pool: KvPool,
        settings: AgentSettings,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self._pool = pool
        self._wake = wake
        self._clock = clock = faults.clock("cache_store.clock", clock, rank=identity.rank)
        self._observations = ObservationBuffer()
        self._events: deque[AgentEvent] = deque()
        self._lock = threading.Lock()
        self._commands: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._drain_due = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        observe = self._observations.observe
        self._parking = ParkingTable(settings.queue_size, settings.parked_per_peer, settings.publish_timeout_s, clock)
        self._equipment = own = Equipment(identity, pool, settings, observe)
        self._table = LeaseTable(
            identity.groups,
            lease_seconds=settings.lease_seconds,
            load_stall_s=settings.load_stall_timeout_s,
            remember_s=settings.tombstone_s,
            max_remembered=settings.remembered_keys,
            clock=clock,
            observe=observe,
            words=own.words,
        )
        self._service = CacheStoreService(
            identity,
            pool,
            own.staging,
            own.offer,
            settings,
            self._table,
            self._parking,
            observe,
            self._changed,
            clock,
            own.workers,
            own.listener,
            own.nixl,
        )
        self._staged = StagedRequests(
            pool, self._table, self._parking, lambda: own.offer, observe, self._emit, clock, identity.rank
        )
        self._puller: Puller | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    def start(self, host: str, port: int) -> str:
        """Listens and returns the bound "host:port" (port 0: any free one). CONNECT_FAILED names a port in use;
        INVALID_PARAMS says why nixl, which alone is allowed, is not possible."""
        if self._thread is not None:
            raise RuntimeError("an agent is started once")
        keep_freed_memory()
        started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._thread_main, args=(host, port, started), name="cache-store", daemon=True
        )
        self._thread.start()
        try:
            limit_s = START_TIMEOUT_S + (NIXL_START_S if self._equipment.nixl_alone else 0.0)
            return join_address(host, started.result(limit_s))
        except TimeoutError:
            raise BatonError(
                ErrorCode.CONNECT_FAILED, f"the cache store did not listen on {host}:{port} in time"
            ) from None

    def close(self, timeout_s: float) -> None:
        """Stops serving; open loads end with SERVER_DRAINING. Waits for the thread to end, `timeout_s` at the most."""
        thread = self._thread
        if thread is not None:
            loop = self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # closed already
                    loop.call_soon_threadsafe(self._closing.set)
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning("the cache store's thread is still busy after %.1f s", timeout_s)
                return
        self._equipment.close()

    @property
    def transports(self) -> tuple[str, ...]:
        """How KV can travel from and to here, best first."""
        return self._equipment.offer.transports

    @property
    def on_device(self) -> bool:
        """What the engine has queued to compute is done later: publish it with a mark."""
        return self._equipment.marks is not None

    def mark(self) -> Ticket | None:
        """The present end of what the calling thread has queued to compute; None where computed means done."""
        pool = self._pool
        return pool.copies.mark() if isinstance(pool, StagedKvPool) else None

    # ---- prefill side

    def admit(
        self,
        request_key: str,
        generation: int,
        prompt_tokens: int,
        blocks: Mapping[str, Sequence[int]],
        ready_tokens: int,
    ) -> None:
        """The request has its blocks (per group, at least those of the prompt) and is being computed now.

        Blocks of the first `ready_tokens` tokens are readable at all layers (prefix hits). One LeaseEnded follows,
        sooner or later.
        """
        own = {tag: list(ids) for tag, ids in blocks.items()}
        self._post(self._staged.admit, request_key, generation, prompt_tokens, own, ready_tokens)

    def publish(self, request_key: str, group: str, layer: int, upto_block: int, after: Ticket | None = None) -> None:
        """Blocks [0, upto_block) of that layer are final, `after` that point. Ignored when the lease has ended.

        When the agent is too far behind, the request fails with CACHE_STORE_PUSH_ITEM_FAILED instead of waiting.
        """
        if self._full(request_key, "publish"):
            self._post(self._staged.fail, request_key, _queue_full())
        else:
            self._post_after(after, request_key, self._staged.publish, request_key, group, layer, upto_block)

    def computed(self, request_key: str, result: common_pb2.PrefillResult, hold: bool) -> None:
        """Every prompt block was published. The lease clock starts; without `hold` the lease ends with its readers."""
        self._post_after(None, request_key, self._staged.computed, request_key, result, hold)

    def fail(self, request_key: str, error: BatonError) -> None:
        """The request failed or was aborted: open, parked and later loads of the key end with `error`."""
        self._post(self._staged.fail, request_key, of_request(error))

    def tombstone(self, request_key: str) -> None:
        """An abort of a key that the engine does not know: its load is REQUEST_TOMBSTONED."""
        self._post(self._staged.tombstone, request_key)

    # ---- decode side

    def keep_alive(self, request_key: str, source: KvSourceRef) -> None:
        """The request is queued here: renews its lease on P until `load`, `cancel_load` or `forget`."""
        self._post(self._do_keep_alive, request_key, source)

    def forget(self, request_key: str) -> None:
        """Ends `keep_alive` without a word to P: another decode server may still load the key."""
        self._post(self._do_forget, request_key)

    def load(
        self,
        request_key: str,
        source: KvSourceRef,
        prompt_tokens: int,
        wanted: Mapping[str, tuple[int, Sequence[int]]],
        deadline_s: float | None,
        reload: bool = False,
        traceparent: str = "",
        together: bool = False,
    ) -> None:
        """Pulls blocks into the pool: per group the first block's index in the request and the physical ids here.
        `traceparent`, W3C, goes with the calls. `together`: with loads of other ranks, which may fail; P keeps the KV
        until `finish_load` or `cancel_load`.

        Nothing is written into them before what the calling thread has queued to compute is done.
        `deadline_s` is the time the request has left. Exactly one LoadDone or LoadFailed follows; a second `load` of a
        key that is open is a mistake of the caller, which is logged and ignored.
        """
        if self._full(request_key, "load"):
            missing = sum(
                len(ids) * layout.num_layers
                for tag, (_, ids) in wanted.items()
                if (layout := self.identity.group(tag)) is not None
            )
            refusal = _queue_full()
            self._post(self._do_refuse_load, request_key, source, refusal)
            self._emit(LoadFailed(request_key, refusal, 0, missing, retriable_here=False))
            return
        now = self._clock()
        deadline = math.inf if deadline_s is None else now + deadline_s
        own = {tag: (first, list(ids)) for tag, (first, ids) in wanted.items()}
        self._post(
            self._do_load,
            request_key,
            source,
            prompt_tokens,
            own,
            deadline,
            reload,
            now,
            self.mark(),
            traceparent,
            together,
        )

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        """Gives up: P may free the KV at once. An open load ends with LoadFailed once nothing can write its blocks.

        For a key that is only kept alive, or whose load has failed already, no event follows.
        """
        self._post(self._do_cancel_load, request_key, error)

    def stop_load(self, request_key: str, error: BatonError) -> None:
        """Another rank's load of the key has failed: an open one here ends with LoadFailed once nothing can write its
        blocks. P keeps the KV for a reload. Does nothing when none is open."""
        self._post(self._do_stop_load, request_key, error)

    def finish_load(self, request_key: str) -> None:
        """Every rank's load of the key is done: P may free the KV."""
        self._post(self._do_finish_load, request_key)

    # ---- both

    def poll_events(self) -> list[AgentEvent]:
        """News since the last call, in order."""
        events: list[AgentEvent] = []
        with contextlib.suppress(IndexError):
            while True:
                events.append(self._events.popleft())
        return events

    def stats(self) -> AgentStats:
        """State at this moment."""
        now = self._clock()
        holds: dict[str, float] = {}
        staged = self._table.oldest_computed()
        if staged is not None:
            holds["staged"] = max(0.0, now - staged)
        loads = 0
        peers = dict.fromkeys(PeerState, 0)
        if self._puller is not None:
            loads = len(self._puller)
            oldest = self._puller.oldest()
            if oldest is not None:
                holds["receiving"] = max(0.0, now - oldest)
            peers = {state: self._puller.peers.count(state) for state in PeerState}
        return AgentStats(
            leases=len(self._table),
            readers=self._table.readers(),
            parked=len(self._parking),
            loads=loads,
            queue_depth=len(self._parking) + len(self._commands),
            tombstones=self._table.tombstones,
            peers_connected=peers[PeerState.CONNECTED],
            peers_incompatible=peers[PeerState.INCOMPATIBLE],
            peers_lost=peers[PeerState.LOST],
            oldest_hold_seconds=holds,
        )

    def take_observations(self) -> list[Observation]:
        """Metric news since the last call; counters are summed up."""
        return self._observations.take()

    # ---- from the engine's threads to the agent's

    def _full(self, key: str, what: str) -> bool:
        marks = self._equipment.marks
        waiting = len(self._commands) + (0 if marks is None else len(marks))
        full = waiting >= MAX_WAITING_PER_SLOT * self.settings.queue_size
        return full or bool(faults.fault("cache_store.queue", key=key, what=what, rank=self.identity.rank))

    def _post_after(self, after: Ticket | None, key: str, command: Callable[..., None], *arguments: Any) -> None:
        """`command(*arguments, when it became true)`, in the order of these calls; the request fails with its mark."""
        marks = self._equipment.marks
        if marks is None:
            self._post(command, *arguments, self._clock())
            return

        def reached(failure: BaseException | None) -> None:
            if failure is None:
                self._post(command, *arguments, self._clock())
            else:
                self._post(self._staged.fail, key, store_failed(failure))

        marks.add(after, reached)

    def _post(self, command: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            self._commands.append((command, arguments))
            if self._drain_due or self._loop is None:
                return
            self._drain_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            self._drain_due = False
        with contextlib.suppress(IndexError):
            while True:
                command, arguments = self._commands.popleft()
                try:
                    command(*arguments)
                except Exception:  # a mistake of the caller must not stop the others' transfers
                    _log.exception("cache store: %s failed", command.__name__)
        self._changed()

    def _emit(self, event: AgentEvent) -> None:
        self._events.append(event)
        try:
            self._wake()
        except Exception:  # the engine finds the event with its next step; whatever else ends now ends all the same
            _log.exception("waking the engine failed")

    def _changed(self) -> None:
        """Passes on which leases ended."""
        for ended in self._table.take_ended():
            _log.debug("a lease has ended", extra={"request_key": ended.request_key, "outcome": ended.outcome})
            self._emit(ended)

    # ---- commands, on the agent's thread

    def _do_keep_alive(self, key: str, source: KvSourceRef) -> None:
        self._pulling.keep_alive(key, source)

    def _do_forget(self, key: str) -> None:
        self._pulling.forget(key)

    def _do_load(self, *arguments: Any) -> None:
        self._pulling.load(*arguments)

    def _do_refuse_load(self, key: str, source: KvSourceRef, error: BatonError) -> None:
        self._pulling.refuse_load(key, source, error)

    def _do_cancel_load(self, key: str, error: BatonError) -> None:
        self._pulling.cancel_load(key, error)

    def _do_stop_load(self, key: str, error: BatonError) -> None:
        self._pulling.stop_load(key, error)

    def _do_finish_load(self, key: str) -> None:
        self._pulling.finish_load(key)

    @property
    def _pulling(self) -> Puller:
        if self._puller is None:
            raise RuntimeError("the agent is not running")
        return self._puller

    # ---- the agent's thread

    def _thread_main(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.get_loop().set_exception_handler(on_loop_exception)
                runner.run(self._main_and_nixl(host, port, started))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            _log.exception("the cache store's thread ended")

    async def _main_and_nixl(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        nixl = self._equipment.nixl
        try:
            if nixl is not None and self._equipment.nixl_alone:
                await nixl.running()
            await self._main(host, port, started)
        except NixlUnavailable as error:
            started.set_exception(nixl_impossible(str(error)))
        finally:
            if nixl is not None:
                await nixl.close()

    async def _main(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        own = self._equipment
        if own.staging is not None:
            own.staging.bind(asyncio.get_running_loop())
        server = GrpcServer(extra=bulk_server_options())
        server.add_service(self._service.add_to, None, SERVICE)
        try:
            own.listen(host)
            self._service.offer = own.offer
            bound = await server.start(host, port, flag="--cache-store-port")
        except SystemExit as error:  # the one line for a start-up; the engine decides what ends with it
            if own.listener is not None:
                own.listener.close()
            started.set_exception(BatonError(ErrorCode.CONNECT_FAILED, str(error)))
            return
        await server.set_serving(True)
        async with asyncio.TaskGroup() as tasks:

            def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                task = tasks.create_task(guarded(work))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it never ran
                return task

            self._puller = Puller(
                self.identity,
                self._pool,
                own.staging,
                own.offer,
                own.fetchers,
                self.settings,
                self._observations.observe,
                self._emit,
                spawn,
                self._clock,
                own.workers,
            )
            with self._lock:
                self._loop = asyncio.get_running_loop()
            started.set_result(bound)
            self._drain()
            await self._keep_time()
            await self._shut_down(server)

    async def _keep_time(self) -> None:
        """Runs what is due by the clock, whether or not a request comes, until the agent closes."""
        while not self._closing.is_set():
            parked = self._parking.next_expiry_in()
            wait_s = min(
                self._table.next_tick_in(), self._pulling.next_tick_in(), math.inf if parked is None else parked
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closing.wait()
            try:
                self._table.tick(self._may_renew)
                self._parking.expire()
                self._pulling.tick()
                self._changed()
            except Exception:
                _log.exception("cache store: the clock's work failed")

    def _may_renew(self, key: str) -> bool:
        return not faults.fault("cache_store.renew", key=key, side="prefill", rank=self.identity.rank)

    async def _shut_down(self, server: GrpcServer) -> None:
        error = BatonError(ErrorCode.SERVER_DRAINING, "the server is shutting down; ask another server")
        await server.set_serving(False)
        self._drain()
        self._parking.close(error)
        self._table.close(error)
        self._pulling.cancel_all(error)
        self._changed()
        await server.stop(SHUTDOWN_GRACE_S)
        own = self._equipment
        if own.nixl is not None:
            await own.nixl.close()  # and with it reads that hang, for which loads wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in list(self._tasks):
            task.cancel()
        await self._pulling.peers.close()
        if own.listener is not None:
            own.listener.close()
        self._changed()


def _queue_full() -> BatonError:
    return BatonError(ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED, "the cache store's queue is full; try again later")
