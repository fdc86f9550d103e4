"""Any order of what two servers, their network and their clocks do to hand-overs: each request ends once and right, and
both ledgers come back."""

from __future__ import annotations

from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store.events import LeaseEnded
from cache_store.serving.reader import ReaderState
from engine.messages import RunMode
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.engine.handover_pair import LEASE_S, PROGRESS_S, PUBLISH_S, STALL_S, Decode, Prefill, Stream, refusal_of
from tests.unit.engine.scripted_engine import ScriptedEngine, continuation

SHARED = list(range(40, 48))  # two blocks that prompts begin with
MAX_TOKENS = 3
MOST = 6  # requests of one run
LONG = 40  # tokens of a prompt that needs most of P's blocks
SOURCES = st.sampled_from(["both"] * 5 + ["decode first", "prefill first", "decode alone", "prefill alone"])
DELIVERIES = st.sampled_from(["deliver"] * 5 + ["twice", "lost"])


class HandoverMachine(RuleBasedStateMachine):
    """A router sends a request to P and to D, in any order; everything after that is a rule."""

    @initialize(ranks=st.sampled_from([1, 1, 2, 3]), direct=st.booleans())
    def start(self, ranks: int, direct: bool) -> None:
        self.p = Prefill(1, 1000.0)
        self.d = Decode(self.p, 2000.0, ranks, direct=direct)
        self.prompts: dict[str, list[int]] = {}
        self.missing: dict[str, set[str]] = {}  # halves that the router has not sent yet
        if direct:  # few runs would get as far as to copies
            for length in (9, 12):
                self.request(length, False, "both")
            self.everything_moves(5, False, False)

    # ---- the router

    @precondition(lambda self: len(self.prompts) < MOST)
    @rule(length=st.integers(1, 12), shared=st.booleans(), how=SOURCES)
    def request(self, length: int, shared: bool, how: str) -> None:
        key = f"r{len(self.prompts)}#0.00000000"
        self.prompts[key] = [*(SHARED if shared else []), *range(1, 1 + length)]
        self.missing[key] = {"prefill", "decode"}
        for half in ("prefill", "decode"):
            if how == "both" or how.startswith(half):
                self.send_half(key, half)
        if how.endswith("alone"):
            self.missing[key] = set()

    def send_half(self, key: str, half: str) -> None:
        self.missing[key].discard(half)
        if half == "prefill":
            self.p.engine.add(key, self.prompts[key], RunMode.PREFILL, max_tokens=MAX_TOKENS)
        else:
            self.d.engine.add(key, self.prompts[key], RunMode.DECODE, max_tokens=MAX_TOKENS, deadline_in=120.0)

    @precondition(lambda self: any(self.missing.values()))
    @rule(index=st.integers(0, MOST))
    def other_half(self, index: int) -> None:
        waiting = [key for key, halves in self.missing.items() if halves]
        key = waiting[index % len(waiting)]
        self.send_half(key, next(iter(self.missing[key])))

    @precondition(lambda self: self.prompts)
    @rule(index=st.integers(0, MOST), where=st.sampled_from(["p", "d", "both", "unknown", "", "", ""]))
    def abort(self, index: int, where: str) -> None:
        if not where:
            return
        key = list(self.prompts)[index % len(self.prompts)] if where != "unknown" else "nobody#0.00000000"
        if where in ("p", "both", "unknown"):
            self.p.engine.abort(key)
            self.p.deliver()
        if where in ("d", "both"):
            self.d.engine.abort(key)

    # ---- the servers

    @rule(count=st.integers(1, 4))
    def p_steps(self, count: int) -> None:
        for _ in range(count):
            self.p.step()

    @rule(count=st.integers(1, 4))
    def d_steps(self, count: int) -> None:
        for _ in range(count):
            self.d.engine.step()

    @rule(count=st.integers(1, 6), settles=st.booleans(), copies=st.booleans(), what=DELIVERIES)
    def everything_moves(self, count: int, settles: bool, copies: bool = True, what: str = "deliver") -> None:
        """So that much of what the other rules disturb gets far."""
        for _ in range(count):
            self.p.step()
            self.d.engine.step()
            for stream in self.streams():
                self.d.open(stream)
                self.d.send(stream)
                if stream.on_the_way:
                    self.d.receive(stream, what)
                    what = "deliver"
                else:
                    self.d.receive(stream)
                if copies:
                    self.d.copy(stream)
                    self.d.prove(stream)
            if settles:
                for key in list(self.d.pulls):
                    self.d.settle(key)

    @rule(broken=st.sampled_from(["p", "d", "", "", "", ""]))
    def a_step_fails(self, broken: str) -> None:
        if broken:
            server = self.p if broken == "p" else self.d
            server.engine.fail_next = BatonError(ErrorCode.EXECUTION_EXCEPTION)

    @rule(really=st.sampled_from([True, False, False, False, False, False, False]))
    def p_restarts(self, really: bool) -> None:
        """Another engine at the same address. Streams break; what D has kept is of an engine that is gone."""
        if not really:
            return
        old, self.p = self.p, Prefill(self.p.engine_id + 1, self.p.engine.now)
        self.d.source = self.p
        for pull in list(self.d.pulls.values()):
            for stream in pull.streams:
                if stream.source is old and (stream.reader is not None or stream.parked is not None):
                    self.d.break_off(stream)

    # ---- the network

    def streams(self) -> list[Stream]:
        return [stream for pull in self.d.pulls.values() for stream in pull.streams]

    def pick(self, index: int) -> Stream:
        streams = self.streams()
        return streams[index % len(streams)]

    @precondition(lambda self: self.streams())
    @rule(index=st.integers(0, 20))
    def stream_opens(self, index: int) -> None:
        self.d.open(self.pick(index))

    @precondition(lambda self: self.streams())
    @rule(index=st.integers(0, 20), count=st.integers(1, 8))
    def p_sends(self, index: int, count: int) -> None:
        stream = self.pick(index)
        for _ in range(count):
            self.d.send(stream)

    @precondition(lambda self: self.streams())
    @rule(
        index=st.integers(0, 20),
        count=st.integers(1, 10),
        what=DELIVERIES,
    )
    def d_receives(self, index: int, count: int, what: str) -> None:
        stream = self.pick(index)
        for number in range(count):
            self.d.receive(stream, what if number == 0 else "deliver")

    def reading(self) -> list[Stream]:
        """Those that read P's memory themselves, and have copies under way or are to know whether they were good."""
        return [stream for stream in self.streams() if stream.copying or (stream.asked and not stream.proof)]

    @precondition(lambda self: self.reading())
    @rule(index=st.integers(0, 20), which=st.integers(0, 20), count=st.integers(1, 8))
    def d_copies(self, index: int, which: int, count: int) -> None:
        streams = self.reading()
        stream = streams[index % len(streams)]
        for _ in range(count):
            self.d.copy(stream, which)

    @precondition(lambda self: self.reading())
    @rule(index=st.integers(0, 20), how=st.sampled_from(["aborted", "expired", "released"]), sent=st.booleans())
    def blocks_are_taken_under_a_copy(self, index: int, how: str, sent: bool) -> None:
        """The lease ends while D reads, and another prompt gets the blocks. `sent`: P has said all that it had to."""
        streams = self.reading()
        stream = streams[index % len(streams)]
        for _ in range(8 if sent else 1):
            self.p.step()
            self.d.send(stream)
            self.d.receive(stream)
        if how == "aborted":
            self.p.engine.abort(stream.key)
        elif how == "expired":
            self.p.engine.wait(STALL_S + LEASE_S)
            self.p.tick()
        elif (lease := self.p.table.get(stream.key)) is not None and stream.source is self.p:
            for rank in self.d.group:  # before everything is sent that is refused
                caller = self.d.caller(rank)
                refusal_of(partial(self.p.table.release, stream.key, lease.generation, True, None, caller))
        self.p.deliver()
        key = f"r{len(self.prompts)}#0.00000000"
        self.prompts[key] = [len(self.prompts)] * LONG
        self.missing[key] = set()
        self.send_half(key, "prefill")
        for _ in range(LONG // 8 + 1):
            self.p.step()
        self.p.engine.abort(key)
        self.p.deliver()
        if sent:  # whatever D has read by now, it finds out
            while stream.copying:
                self.d.copy(stream)
            self.d.prove(stream)
            self.d.receive(stream)

    @precondition(lambda self: self.reading())
    @rule(index=st.integers(0, 20))
    def p_is_asked(self, index: int) -> None:
        streams = self.reading()
        self.d.prove(streams[index % len(streams)])

    @precondition(lambda self: self.streams())
    @rule(index=st.integers(0, 20))
    def stream_breaks(self, index: int) -> None:
        self.d.break_off(self.pick(index))

    @precondition(lambda self: self.d.pulls)
    @rule(index=st.integers(0, 20))
    def puller_settles(self, index: int) -> None:
        self.d.settle(list(self.d.pulls)[index % len(self.d.pulls)])

    @precondition(lambda self: self.streams())
    @rule(index=st.integers(0, 20))
    def second_load(self, index: int) -> None:
        """Beside an open one, or one that was served: refused, and nothing changes for the first."""
        stream = self.pick(index)
        reader, table = stream.reader, self.p.table
        if reader is None or stream.source is not self.p or table.get(stream.key) is not reader.lease:
            return
        caller, tokens = self.d.caller(stream.rank), len(self.prompts[stream.key])
        refusal = refusal_of(lambda: table.open_load(stream.key, None, tokens, (), 1, caller=caller))
        assert refusal is not None, "a second load was opened"
        # A reload has to name its generation.
        expected = {ErrorCode.DUPLICATE_REQUEST, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT}
        stop = reader.lease.error
        assert refusal.code in (expected if stop is None else {stop.code})

    @precondition(lambda self: self.prompts)
    @rule(index=st.integers(0, MOST), generation=st.sampled_from([None, 10_000]))
    def late_release(self, index: int, generation: int | None) -> None:
        """From nobody who has had the KV, or of another allocation."""
        key = list(self.prompts)[index % len(self.prompts)]
        lease = self.p.table.get(key)
        before = None if lease is None else (lease.state, lease.error)
        refusal = refusal_of(lambda: self.p.table.release(key, generation, True, None, self.d.caller(0)))
        if refusal is not None:
            assert refusal.code in (ErrorCode.KV_STALE_REFERENCE, ErrorCode.INVALID_PARAMS)
            assert lease is not None
            assert (lease.state, lease.error) == before
        self.p.deliver()

    @rule()
    def late_completion(self) -> None:
        """P's agent tells of a lease that its engine knows to have ended, and of one of another allocation of a key
        whose KV is held; D's of a load that is over."""
        self.p.deliver(again=True)
        for key in self.prompts:
            if (lease := self.p.table.get(key)) is not None:
                self.p.tell(LeaseEnded(key, lease.generation + 10_000, "released"))
                break
        self.d.engine.scheduler.load_failed("nobody#0.00000000", BatonError(ErrorCode.CANCELLED), False, [])
        self.d.engine.collect()

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.0, PROGRESS_S, PUBLISH_S, LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.p.engine.wait(seconds)
        self.d.engine.wait(seconds)
        self.p.tick()
        self.d.tick()

    # ---- what always holds

    @invariant()
    def blocks_are_held_for_a_reason(self) -> None:
        if not hasattr(self, "p"):
            return
        self.p.deliver()
        live = {(key, lease.generation) for key in self.prompts if (lease := self.p.table.get(key)) is not None}
        assert live == self.p.admitted - self.p.ended.keys(), "a lease is there and has ended, or the other way round"
        engine = self.p.engine
        for key, generation in live:
            scheduler = engine.scheduler
            request = scheduler.open.get(key) or scheduler.holds.staged.get(key) or scheduler.holds.leaving.get(key)
            assert request is not None and request.allocation is not None, f"{key}: the lease has lost its blocks"
            assert request.allocation.generation == generation
        counts = engine.ledger()
        assert not counts.get("staged") or live, "staged for nobody"
        for stream in self.streams():
            reader = stream.reader
            if reader is not None and reader.state is ReaderState.OPEN and stream.source is self.p:
                assert (stream.key, reader.lease.generation) not in self.p.ended, "blocks given back under a reader"
        written = 0
        for key, pull in self.d.pulls.items():
            assert pull.request.allocation is not None, f"{key}: blocks were given back under a load"
            written += sum(len(wanted.block_ids) for wanted in pull.streams[0].load.wanted)
            own = set(pull.request.allocation.groups["full"].blocks)
            for copy in (copy for stream in pull.streams for copy in stream.copying):
                assert own.issuperset(copy.targets), f"{key}: a copy writes blocks of somebody else"
        held = self.d.engine.ledger()
        assert held.get("receiving", 0) + held.get("quarantined", 0) == written

    def teardown(self) -> None:
        """Left alone, everything ends."""
        if not hasattr(self, "p"):
            return
        for key, halves in self.missing.items():
            for half in list(halves):
                self.send_half(key, half)
        for _ in range(200):
            if self.quiet():
                break
            self.everything_moves(4, True)
            self.time_passes(0.5)
        assert self.quiet(), "something never ends"
        self.blocks_are_held_for_a_reason()
        self.time_passes(2 * LEASE_S)
        self.p.engine.assert_clean()
        self.d.engine.assert_clean()
        assert not self.d.pulls and not len(self.p.table) and not len(self.p.parking)
        for key, prompt in self.prompts.items():
            self.check_end(self.d.engine, key, continuation(prompt, MAX_TOKENS))
            self.check_end(self.p.engine, key, continuation(prompt, 1))

    def quiet(self) -> bool:
        open_ = [*self.p.engine.scheduler.open, *self.d.engine.scheduler.open, *self.d.engine.scheduler.holds.leaving]
        return not open_ and not self.d.pulls

    @staticmethod
    def check_end(engine: ScriptedEngine, key: str, expected: list[int]) -> None:
        """One terminal state, and only right tokens before it. A server that never got the request, or a later engine
        of it, has nothing."""
        outputs = engine.outputs.get(key)
        if outputs is None:
            return
        assert sum(output.last for output in outputs) == 1
        tokens = engine.tokens(key)
        assert tokens == expected[: len(tokens)], f"{key}: wrong tokens"
        if outputs[-1].error is None:
            assert len(tokens) == len(expected)


HandoverMachine.TestCase.settings = settings(
    max_examples=extent(80, 3000),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_handover_against_any_order_of_events = HandoverMachine.TestCase
