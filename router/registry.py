"""The servers that the router knows, each watched by a task of its own.

Start order never matters: a server that cannot be reached is tried again, at most `RECONNECT_MAX_S` apart,
for as long as it is registered. Whether it can serve is its `state`: what it says about itself, whether it
answers, and whether it fits the others. Servers are never dropped by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from protos import worker_pb2, worker_pb2_grpc
from router.breaker import Breaker, BreakerSettings, BreakerState
from router.pairing import (
    ROLES,
    Difference,
    Role,
    WorkerFacts,
    differences,
    reference_fingerprint,
)
from router.settings import split_address
from router.worker import STATES, Worker
from rpc.channels import ChannelPool
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import GaugeSeries
from rpc.metrics import Registry as Metrics
from rpc.status import from_rpc_error
from rpc.version import PROTOCOL_VERSION

RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 1.0
TICK_S = 0.25
# A server that was lost more recently than this may only have lost its connection.
RECENTLY_S = 1.0
# A status stream is opened anew after this time, so that no call lives without a deadline.
WATCH_S = 3600.0

_CONNECTION_CODES = frozenset(
    (
        ErrorCode.GET_HOST_FAILED,
        ErrorCode.CONNECT_FAILED,
        ErrorCode.CONNECT_TIMEOUT,
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.KEEP_ALIVE_TIMEOUT,
        ErrorCode.ENGINE_DEAD,
    )
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """`interval_s`: longest silence asked of a server. `timeout_s`: wait for an answer to a check."""

    interval_s: float = 5.0
    timeout_s: float = 2.0
    failure_threshold: int = 3
    success_threshold: int = 2


class _EngineChanged(Exception):
    """The server's engine is another one than its facts say."""


class WorkerRegistry:
    """All registered servers; an async context manager, within which they are watched.

    `on_lost(worker)` runs when a server that was connected no longer answers, `on_added(worker)` and
    `on_removed(worker)` after it has become a member, or is none any more. Belongs to one event loop. Methods without
    `async` never block.
    """

    def __init__(
        self,
        pool: ChannelPool,
        metrics: Metrics,
        *,
        health: HealthSettings | None = None,
        breaker: BreakerSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.health = health if health is not None else HealthSettings()
        self._metrics = metrics
        self._breaker = breaker if breaker is not None else BreakerSettings()
        self._rng = rng if rng is not None else random.Random()
        self._clock = clock
        self._workers: dict[tuple[Role, str], Worker] = {}
        self._inflight: dict[Worker, GaugeSeries] = {}
        self._order = 0
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._checks: dict[Worker, asyncio.Task[None]] = {}
        self._watches: dict[Worker, grpc.aio.UnaryStreamCall[Any, Any]] = {}
        self._fits: dict[tuple[Worker, Worker], tuple[Difference, ...]] = {}
        self._changed = asyncio.Event()
        self.on_lost: list[Callable[[Worker], None]] = []
        self.on_added: list[Callable[[Worker], None]] = []
        self.on_removed: list[Callable[[Worker], None]] = []
        for role in ROLES:
            self._count_states(role)

    # -- members

    def workers(self, role: Role | None = None) -> list[Worker]:
        """In the order of registration."""
        return [w for w in self._workers.values() if role is None or w.role == role]

    def get(self, role: Role, address: str) -> Worker | None:
        return self._workers.get((role, address))

    def add(self, role: Role, address: str) -> Worker:
        """Registers a server; one that is registered already is returned. Takes no traffic before it fits.

        Raises INVALID_PARAMS for an address that is none, or that is registered for the other role.
        """
        try:
            split_address(address)
        except ValueError as error:
            raise BatonError(ErrorCode.INVALID_PARAMS, f"address {error}", param="address") from None
        known = self._workers.get((role, address))
        if known is not None:
            return known
        other: Role = "decode" if role == "prefill" else "prefill"
        if (other, address) in self._workers:
            message = f"address {address} is registered as a {other} server; remove it first"
            raise BatonError(ErrorCode.INVALID_PARAMS, message, param="address")
        breaker = Breaker(
            self._breaker, on_change=lambda state: self._breaker_changed(worker, state), clock=self._clock
        )
        worker = Worker(
            role,
            address,
            self._order,
            breaker,
            # A status may be one interval old by design; after that and a check's time it says nothing any
            # more.
            status_fresh_s=self.health.interval_s + self.health.timeout_s,
            on_inflight=self._inflight_changed,
            clock=self._clock,
        )
        self._order += 1
        self._workers[role, address] = worker
        self._metrics.set("baton_breaker_state", 0, role=role, worker=address)
        self._show_inflight(worker)
        self._refresh()
        if self._group is not None:
            self._watch_over(worker)
        for callback in self.on_added:
            callback(worker)
        return worker

    def remove(self, role: Role, address: str) -> bool:
        """Takes a server out of the choice; requests that are open there go on. False: there was none."""
        worker = self._workers.pop((role, address), None)
        if worker is None:
            return False
        worker.removed = True
        for task in (self._tasks.pop(worker, None), self._checks.pop(worker, None)):
            if task is not None:
                task.cancel()
        self._fits = {pair: found for pair, found in self._fits.items() if worker not in pair}
        self._inflight.pop(worker, None)
        self._metrics.remove_worker(address)
        for other in self._workers.values():
            if other.address == address:  # in the other role
                self._show_inflight(other)
        self.pool.evict(address)
        self._refresh()
        for callback in self.on_removed:
            callback(worker)
        return True

    def describe(self) -> list[dict[str, Any]]:
        """For `/workers`; with each server the partners that it fits, or why not."""
        described = []
        for worker in self._workers.values():
            line = worker.describe()
            partners = self.workers("decode" if worker.role == "prefill" else "prefill")
            line["pairs"] = [
                {"address": p.address, "differences": [str(d) for d in self.pair_differences(worker, p)]}
                for p in partners
                if p.facts is not None and worker.facts is not None
            ]
            described.append(line)
        return described

    def pair_differences(self, one: Worker, other: Worker) -> tuple[Difference, ...]:
        """What keeps two servers of different roles apart; both have said what they are."""
        prefill, decode = (one, other) if one.role == "prefill" else (other, one)
        found = self._fits.get((prefill, decode))
        if found is None:
            assert prefill.facts is not None
            assert decode.facts is not None
            found = self._fits[prefill, decode] = differences(prefill.facts, decode.facts)
        return found

    def known_facts(self) -> list[WorkerFacts]:
        """Of the servers of the model that the cluster serves, in the order of registration."""
        facts = [w.facts for w in self._workers.values() if w.facts is not None and w.facts.role == w.role]
        fingerprint = reference_fingerprint(facts)
        return [f for f in facts if f.model_fingerprint == fingerprint]

    async def wait_change(self, timeout_s: float) -> None:
        """Returns once any server's state may have changed, after `timeout_s` at the latest."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def recovering(self) -> bool:
        """Whether some server is out only for moments, as far as one can tell: in doubt, or lost just now."""
        return any(w.doubt or w.lost_s() < RECENTLY_S for w in self._workers.values() if w.state == "unhealthy")

    # -- what requests report

    def note_failure(self, worker: Worker, error: BatonError, *, told: bool = False) -> None:
        """A call to the server failed. A failure that puts its life in doubt takes it out until a check
        passes. `told`: the server said so itself, hence its connection works, whatever code it names."""
        if worker.removed:
            return
        if error.code is ErrorCode.SERVER_DRAINING and worker.state == "ready":
            worker.doubt = "refused a request because it is shutting down"
        elif error.code in _CONNECTION_CODES and (not told or error.code is ErrorCode.ENGINE_DEAD):
            worker.doubt = f"a call failed with {error.code.name}"
        elif error.code is ErrorCode.PEER_RESTARTED:
            # The facts are of an engine that is gone. Its server's status stream will tell, and may have
            # told.
            worker.doubt = "its engine restarted"
        else:
            return
        self._refresh()
        self.suspect(worker)

    def suspect(self, worker: Worker) -> None:
        """Checks whether the server answers, unless that is being done already."""
        if self._group is None or worker.removed or worker in self._checks or worker.disconnected:
            return
        self._checks[worker] = self._group.create_task(self._check(worker))

    # -- the scope

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        self._ticker = self._group.create_task(self._tick())
        for worker in self._workers.values():
            self._watch_over(worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        assert group is not None
        for task in (self._ticker, *self._tasks.values(), *self._checks.values()):
            task.cancel()
        self._tasks.clear()
        self._checks.clear()
        await group.__aexit__(None, None, None)

    # -- watching

    def _watch_over(self, worker: Worker) -> None:
        assert self._group is not None
        self._tasks[worker] = self._group.create_task(self._supervise(worker))

    async def _supervise(self, worker: Worker) -> None:
        wait_s = RECONNECT_FIRST_S
        while True:
            began = self._clock()
            try:
                await self._connect(worker)
                await self._watch(worker)
            except _EngineChanged:
                pass  # what it is now has to be asked anew
            except BatonError as error:
                if error.breach:
                    self._metrics.inc("baton_contract_breaches_total", kind=error.breach)
                self._disconnect(worker, error.message)
            except Exception as error:
                # A defect in the watching of one server must not end the router.
                _log.exception("watching %s failed", worker.address)
                self._disconnect(worker, f"cannot be watched ({type(error).__name__})")
            if self._clock() - began > 2 * RECONNECT_MAX_S:
                wait_s = RECONNECT_FIRST_S
            await asyncio.sleep(wait_s * (1 + 0.1 * self._rng.uniform(-1, 1)))
            wait_s = min(RECONNECT_MAX_S, 2 * wait_s)

    def _stub(self, worker: Worker) -> worker_pb2_grpc.WorkerAsyncStub:
        return worker_pb2_grpc.WorkerStub(self.pool.get(worker.address))

    def _typed(self, worker: Worker, exc: grpc.RpcError) -> BatonError:
        self.pool.check(worker.address)
        was_ready = self.pool.was_ready(worker.address)
        return from_rpc_error(exc, leg=worker.role, deadline_passed=False, was_ready=was_ready)

    async def _connect(self, worker: Worker) -> None:
        """Learns what the server is. Raises BatonError when it cannot be reached or is no server of ours."""
        stub, timeout_s = self._stub(worker), self.health.timeout_s
        try:
            info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout_s)
            # The answer above and the first status count as two.
            for _ in range(self.health.success_threshold - 2):
                await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as exc:
            raise self._typed(worker, exc) from None
        worker.heard()
        self._take_facts(worker, WorkerFacts.from_info(info))

    def _take_facts(self, worker: Worker, facts: WorkerFacts) -> None:
        old, worker.facts = worker.facts, facts
        if old == facts:
            return
        self._fits = {pair: found for pair, found in self._fits.items() if worker not in pair}
        if old is not None and old.engine_id != facts.engine_id:
            _log.info("%s server %s has a new engine", worker.role, worker.address)
            worker.breaker.reset()
        self._refresh()

    async def _watch(self, worker: Worker) -> None:
        """Follows the server's status until the stream ends; raises BatonError when it broke."""
        request = worker_pb2.WatchStatusRequest(interval_seconds=self.health.interval_s)
        call = self._watches[worker] = self._stub(worker).WatchStatus(request, timeout=WATCH_S)
        try:
            async for status in call:
                worker.heard()
                self._take_status(worker, status)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A check gave the stream up.
            raise BatonError(ErrorCode.KEEP_ALIVE_TIMEOUT, worker.disconnected or worker.doubt) from None
        except grpc.aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._typed(worker, exc) from None
        finally:
            self._watches.pop(worker, None)
            call.cancel()

    def _take_status(self, worker: Worker, status: worker_pb2.WorkerStatus) -> None:
        if not status.HasField("version") or not status.engine_id:
            self._metrics.inc("baton_contract_breaches_total", kind="absent_field")
            return
        if not worker.take_status(status):
            return
        worker.disconnected = worker.doubt = ""
        self._refresh()
        if worker.facts is None or worker.facts.engine_id != status.engine_id:
            raise _EngineChanged

    def _disconnect(self, worker: Worker, reason: str) -> None:
        was_connected, worker.disconnected = not worker.disconnected, reason
        if was_connected:
            worker.lost_at = self._clock()
        self._refresh()
        if was_connected:
            _log.warning("%s server %s is lost: %s", worker.role, worker.address, reason)

    async def _check(self, worker: Worker) -> None:
        """Asks the server for its status, a few times; one that does not answer is lost."""
        try:
            for _ in range(self.health.failure_threshold):
                try:
                    status = await self._stub(worker).GetStatus(
                        worker_pb2.GetStatusRequest(), timeout=self.health.timeout_s
                    )
                except grpc.RpcError as exc:
                    error = self._typed(worker, exc)
                    # A quick refusal may be about a connection that has just broken.
                    await asyncio.sleep(0.05)
                    continue
                worker.heard()
                worker.doubt = ""
                worker.take_status(status)
                self._refresh()
                if worker.facts is None or worker.facts.engine_id != status.engine_id:
                    self._give_up_watch(worker, "its engine restarted")
                return
            self._give_up_watch(worker, f"does not answer ({error.code.name})")
            self.pool.evict(worker.address)
            for callback in self.on_lost:
                callback(worker)
        except Exception:
            # A defect in a check must not end the router.
            _log.exception("checking %s failed", worker.address)
        finally:
            self._checks.pop(worker, None)

    def _give_up_watch(self, worker: Worker, reason: str) -> None:
        """Takes the server out at once and lets its watching task begin anew."""
        self._disconnect(worker, reason)
        call = self._watches.get(worker)
        if call is not None:
            call.cancel()

    async def _tick(self) -> None:
        """Looks for servers that have been silent for too long."""
        limit_s = self.health.interval_s + self.health.timeout_s
        while True:
            await asyncio.sleep(TICK_S)
            for worker in self.workers():
                if worker.silence_s() > limit_s:
                    self.suspect(worker)

    # -- states

    def _refresh(self) -> None:
        """Derives every server's state anew. Cheap: a handful of servers, a few comparisons each."""
        reference = reference_fingerprint(
            w.facts for w in self._workers.values() if w.facts is not None and w.facts.role == w.role
        )
        conditions = {w: w.condition() for w in self._workers.values()}
        for worker, (state, reasons) in conditions.items():
            if state in ("ready", "draining"):
                misfit = self._misfit(worker, reference, conditions)
                if misfit:
                    state, reasons = "incompatible", misfit
            if (state, reasons) != (worker.state, worker.reasons):
                _log.log(
                    logging.WARNING if state == "incompatible" else logging.INFO,
                    "%s server %s is %s%s",
                    worker.role,
                    worker.address,
                    state,
                    f": {'; '.join(reasons)}" if reasons else "",
                )
                worker.state, worker.reasons = state, reasons
        for role in ROLES:
            self._count_states(role)
        self._changed.set()

    def _misfit(self, worker: Worker, reference: str | None, conditions: Iterable[Worker]) -> tuple[str, ...]:
        """Why a server cannot be used beside the others; empty when it can."""
        facts = worker.facts
        assert facts is not None
        if facts.protocol_version != PROTOCOL_VERSION:
            return (f"protocol_version: {facts.protocol_version}, the router speaks {PROTOCOL_VERSION}",)
        if facts.model_fingerprint != reference:
            return (f"model_fingerprint: {facts.model_fingerprint}, most servers have {reference}",)
        if facts.allows_local_prefill:
            return ()
        partners = [
            other
            for other in conditions
            if other.role != worker.role and other.facts is not None and other.facts.role == other.role
        ]
        if not partners or any(not self.pair_differences(worker, other) for other in partners):
            return ()
        return tuple(
            f"{other.address}: {difference}"
            for other in partners
            for difference in self.pair_differences(worker, other)
        )

    def _count_states(self, role: Role) -> None:
        states = [w.state for w in self._workers.values() if w.role == role]
        for state in STATES:
            self._metrics.set("baton_router_workers", states.count(state), role=role, state=state)

    def _show_inflight(self, worker: Worker) -> None:
        labels = {"role": worker.role, "worker": worker.address}
        series = self._metrics.series("baton_router_worker_inflight", labels)
        assert isinstance(series, GaugeSeries)
        series.set(worker.inflight)
        self._inflight[worker] = series

    def _inflight_changed(self, worker: Worker) -> None:
        if not worker.removed:
            self._inflight[worker].set(worker.inflight)

    def _breaker_changed(self, worker: Worker, state: BreakerState) -> None:
        if worker.removed:
            return
        _log.warning("breaker of %s server %s is %s", worker.role, worker.address, state.name.lower())
        self._metrics.set("baton_breaker_state", int(state), role=worker.role, worker=worker.address)
        self._metrics.inc(
            "baton_breaker_transitions_total", role=worker.role, worker=worker.address, to=state.name.lower()
        )
