"""One campaign: a clean run that records the right answers, the same questions under fire, and the state afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bench.chaos.client import Clients
from bench.chaos.cluster import POLL_S, START_LIMIT_S, ChaosCluster, Layout
from bench.chaos.faults import Blow, Kind, blows, can_start_again
from bench.chaos.memory import Memory
from bench.chaos.report import Report, Tally
from bench.chaos.verdict import Ending, Right, judge
from bench.chaos.workload import Ask, Asks, Case, Manner, make_cases
from cache_store.transports import TRANSPORTS
from cli.process import LaunchError

_T = TypeVar("_T")

CASES = 48
END_BOUND_S = 5.0  # beyond the router's own limit of a request, after which it is hung
FLUSH_LIMIT_S = 5.0
BACK_OFF_S = 0.5  # of a client that got an error, before its next request
SAMPLE_S = 2.0
SPECIAL_CLIENTS = 0.15  # share of those that do not stay to the end
_MANNERS = {
    Kind.LEAVE: (Manner.CANCELS, Manner.ABORTS, Manner.DISCONNECTS),
    Kind.DEADLINE: (Manner.HURRIES,),
}


@dataclass(frozen=True)
class Plan:
    """What a campaign does. `seconds` and `requests`: whichever is reached first ends it; on a machine so slow that not
    every transport has been had by then, up to twice as many seconds."""

    layout: Layout
    requests: int
    seconds: float
    concurrency: int
    gap_s: float  # between two blows, on average
    vocabulary: int
    longest_prompt: int
    settle_s: float  # from the last fault to clean ledgers, at the most
    cases: int = CASES


class CampaignFailed(Exception):
    """The campaign could not be held; one line that says why."""


class Campaign:
    """`run()` once. `state` then holds a dump of everything if something was wrong."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.state = ""
        self._say = say
        self._cluster = ChaosCluster(plan.layout, say)
        self._tally = Tally()
        self._memory = Memory()
        self._right: dict[int, Right] = {}
        self._calm: Counter[str] = Counter()  # loads of the clean run, by transport
        self._under_fire_loads: Counter[str] = Counter()
        self._began = time.monotonic()

    async def run(self) -> Report:
        """Raises CampaignFailed when the cluster does not come up or answers wrongly without any fault."""
        cluster = self._cluster
        ledger_s: float | None = None
        try:
            self._say("starting the cluster")
            await cluster.start()
            began = time.monotonic()
            await self._record()
            clean_s = time.monotonic() - began
            self._say(f"{len(self._right)} right answers recorded in {clean_s:.1f} s; faults begin")
            cluster.arm()
            began = time.monotonic()
            await self._under_fire()
            cluster.disarm()
            fire_s = time.monotonic() - began
            self._say("no more faults; looking at what is left")
            ledger_s = await self._settle()
            await self._ask_every_pair()
        except (LaunchError, CampaignFailed, ExceptionGroup) as error:
            causes = list(_causes(error))
            if not all(isinstance(cause, LaunchError | CampaignFailed) for cause in causes):
                raise
            self.state = await cluster.describe()
            raise CampaignFailed("; ".join(dict.fromkeys(map(str, causes)))) from error
        finally:
            if self._violations():
                self.state = await cluster.describe()
            await cluster.stop()
        layout = self.plan.layout
        return Report(
            settings={
                "seed": layout.seed,
                "requests": self.plan.requests,
                "seconds": self.plan.seconds,
                "concurrency": self.plan.concurrency,
                "prefill_servers": layout.prefill_servers,
                "decode_servers": layout.decode_servers,
                "faults": sorted(kind.value for kind in layout.kinds),
                "model": layout.model,
                "transports": list(layout.transports),
                "tiers": layout.tiers,
                "intensity": layout.intensity,
                "server_flags": list(layout.server_flags),
            },
            tally=self._tally,
            clean_seconds=clean_s,
            campaign_seconds=fire_s,
            ledger_s=ledger_s,
            loads=self._under_fire_loads,
            hits=cluster.hits,
            recoveries=cluster.recoveries,
            memory=self._memory.longest(),
            starts={member.name: member.starts for member in cluster.members},
            failed_starts=sum(member.failed_starts for member in cluster.members),
            violations=self._violations(),
        )

    def _violations(self) -> list[str]:
        cluster = self._cluster
        logged = [f"an ERROR line without a code: {line}" for line in dict.fromkeys(cluster.errors_without_code)]
        return [*self._tally.violations, *cluster.defects, *logged, *self._memory.violations()]

    def _clients(self) -> Clients:
        ready = self._cluster.router.process.ready
        return Clients(ready["grpc"], ready["http"], self.plan.layout.request_timeout_s + END_BOUND_S)

    # ---- the clean run

    async def _record(self) -> None:
        plan = self.plan
        cases = make_cases(plan.layout.seed, plan.cases, plan.vocabulary, plan.longest_prompt)
        clients = self._clients()
        try:
            for again in (False, True):  # the second time from the prefix cache, and in another company
                asked = reversed(cases) if again else iter(cases)
                await _side_by_side(plan.concurrency, asked, lambda case: self._record_one(clients, case))
        finally:
            await clients.close()
        self._cases = cases

    async def _record_one(self, clients: Clients, case: Case) -> None:
        outcome = await clients.send(Ask(case.number, case, "grpc", Manner.STAYS, 0.0, ""))
        if outcome.finish_reason != "length" or outcome.code is not None or outcome.untyped:
            raise CampaignFailed(f"without any fault, a request ended with {outcome}")
        found = Right(tuple(outcome.tokens), outcome.text)
        first = self._right.setdefault(case.number, found)
        if first != found or len(first.tokens) != case.max_tokens:
            raise CampaignFailed(f"without any fault, two answers to one question differ: {first}, {found}")

    # ---- under fire

    async def _under_fire(self) -> None:
        plan = self.plan
        self._began = time.monotonic()
        limit = self._began + plan.seconds
        manners = [manner for kind, found in _MANNERS.items() if kind in plan.layout.kinds for manner in found]
        asks = Asks(plan.layout.seed, self._cases, manners, SPECIAL_CLIENTS)

        await self._cluster.note_loads()
        self._calm = self._cluster.loads()

        def next_asks() -> Iterator[Ask]:
            while asks.count < plan.requests:
                now = time.monotonic()
                if now >= limit and (now >= limit + plan.seconds or not self._transports_missing()):
                    return
                yield asks.next()

        clients = self._clients()
        servers = {"prefill": plan.layout.prefill_servers, "decode": plan.layout.decode_servers}
        schedule = blows(plan.layout.seed, plan.layout.kinds, servers, plan.gap_s, plan.layout.turns)
        stopped = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                attack = tasks.create_task(self._attack(schedule, stopped))
                watches = [tasks.create_task(self._cluster.look_after()), tasks.create_task(self._watch())]
                await _side_by_side(plan.concurrency, next_asks(), lambda ask: self._ask(clients, ask))
                stopped.set()
                await attack
                for watch in watches:
                    watch.cancel()
                await self._cluster.note_loads()
                self._under_fire_loads = self._cluster.loads() - self._calm
        finally:
            await clients.close()

    async def _ask(self, clients: Clients, ask: Ask, pins: tuple[str, str] | None = None) -> Ending:
        outcome = await clients.send(ask, pins)
        right = self._right[ask.case.number]
        ending, wrong = judge(ask, outcome, right)
        self._tally.book(ask.manner.value, ending, outcome)
        if self._tally.requests % 100 == 0:
            self._say(self._tally.line())
        if wrong:
            at = outcome.began_s - self._began
            text = f"{ask.request_id} ({ask.door}, {ask.manner}, case {ask.case.number}, sent at {at:.1f} s): {wrong}"
            self._say("VIOLATION " + text)
            if not self._tally.violations:
                self.state = await self._cluster.describe()
            self._tally.violations.append(text)
        if ending is Ending.TYPED_ERROR:
            await asyncio.sleep(BACK_OFF_S)
        return ending

    async def _attack(self, schedule: Iterator[Blow], stopped: asyncio.Event) -> None:
        """Blows overlap: each is seen through by a task of its own."""
        async with asyncio.TaskGroup() as tasks:
            for blow in schedule:
                if blow.waits:
                    tasks.create_task(self._deal_once_possible(blow, stopped))
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(blow.after_s):
                        await stopped.wait()
                if stopped.is_set():
                    return
                tasks.create_task(self._deal(blow))

    async def _deal(self, blow: Blow) -> bool:
        dealt = await self._cluster.strike(blow)
        if dealt:
            self._tally.blows[f"{blow.kind} {blow.part}"] += 1
        elif not blow.waits:
            self._tally.skipped_blows += 1
        return dealt

    async def _deal_once_possible(self, blow: Blow, stopped: asyncio.Event) -> None:
        """Not before its time, nor before the server's transport has been had; and not when chance was quicker."""
        began, layout = time.monotonic(), self.plan.layout
        while not stopped.is_set():
            due = time.monotonic() - began >= blow.after_s
            if blow.turn:
                starts = self._cluster.member(blow.role, blow.index).starts
                if starts > blow.turn:
                    return
                due = due and not self._missing(layout.transport_of(blow.index, starts))
            if due and await self._deal(blow):
                return
            await asyncio.sleep(POLL_S)
        self._tally.skipped_blows += 1

    def _missing(self, transport: str) -> bool:
        """Whether a transport has completed no load since the clean run."""
        return transport in TRANSPORTS and not (self._cluster.loads() - self._calm)[transport]

    def _transports_missing(self) -> bool:
        layout = self.plan.layout
        return any(
            map(self._missing, layout.transports[: None if can_start_again(layout.kinds) else layout.decode_servers])
        )

    async def _watch(self) -> None:
        while True:
            pids: dict[str, int] = {}
            for member in self._cluster.members:
                pids[member.name] = member.pid
                if member.engine_pid:
                    pids[f"{member.name} engine"] = member.engine_pid
            self._memory.sample(time.monotonic(), pids)
            await self._cluster.note_loads()
            await asyncio.sleep(SAMPLE_S)

    # ---- afterwards

    async def _settle(self) -> float | None:
        """Seconds until every server is used again and every ledger is clean."""
        limit_s = self.plan.settle_s
        await self._cluster.wait_ready(max(limit_s, START_LIMIT_S))
        began = time.monotonic()
        while dirty := await self._cluster.dirty_ledgers():
            if time.monotonic() - began > limit_s:
                self._tally.violations.append(f"ledgers not clean after {limit_s:g} s: {'; '.join(dirty)}")
                return None
            await asyncio.sleep(0.2)
        seconds = time.monotonic() - began
        # What is cached must be free for others: nothing may hold it any more.
        while held := await self._held_blocks():
            if time.monotonic() - began > seconds + FLUSH_LIMIT_S:
                self._tally.violations.append(f"blocks that nobody holds are not free: {'; '.join(held)}")
                break
            await asyncio.sleep(0.2)
        return seconds

    async def _held_blocks(self) -> list[str]:
        """What is not free in flushed caches of servers at rest."""
        await self._cluster.post(self._cluster.router, "/flush_cache")
        found = []
        for member in self._cluster.servers:
            for rank in (await self._cluster.page(member, "/debug/ledger"))["ranks"]:
                for counts in rank["groups"]:
                    if counts["free"] != counts["total"]:
                        found.append(f"{member.name}: {counts['free']} of {counts['total']} free")
        return found

    async def _ask_every_pair(self) -> None:
        """An ordinary request works through every pair."""
        servers = self._cluster.servers
        prefill = [member.process.ready["grpc"] for member in servers if member.role == "prefill"]
        decode = [member.process.ready["grpc"] for member in servers if member.role == "decode"]
        case = max(self._cases, key=lambda case: (case.max_tokens > 1, len(case.prompt)))
        clients = self._clients()
        try:
            for number, pins in enumerate(itertools.product(prefill, decode)):
                ask = Ask(10**6 + number, case, "grpc", Manner.STAYS, 0.0, f"pair-{number}")
                outcome = await clients.send(ask, pins)
                ending, wrong = judge(ask, outcome, self._right[case.number])
                if wrong or ending is not Ending.RIGHT or outcome.path != "pd":
                    self._tally.violations.append(f"through the pair {pins}: {wrong or ending.value}: {outcome}")
        finally:
            await clients.close()


async def _side_by_side(width: int, items: Iterator[_T], work: Callable[[_T], Awaitable[object]]) -> None:
    """Does the work for every item, `width` at a time."""

    async def one_after_the_other() -> None:
        for item in items:
            await work(item)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(width):
            tasks.create_task(one_after_the_other())


def _causes(error: Exception) -> Iterator[Exception]:
    """The exceptions that an exception is made of."""
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            yield from _causes(each)
    else:
        yield error
