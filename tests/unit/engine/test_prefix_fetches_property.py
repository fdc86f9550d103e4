"""Random lives of requests on an engine with tiers below its pool, whose threads come at any moment or late.

The double of the model reads its own KV, the tiers write rubbish wherever they still may, and at the end every request
must have the model's continuation of its prompt and every block be free or cached.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from engine.messages import RunMode
from engine.scheduler.prefix_fetches import Phase
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.engine.engine_machine import BASE, EngineMachine
from tests.unit.engine.scripted_engine import ScriptedEngine
from tests.unit.engine.scripted_tiers import ScriptedTiers

MODES = (RunMode.LOCAL, RunMode.LOCAL, RunMode.PREFILL, RunMode.DECODE)


class TieredEngine(EngineMachine):
    @initialize(
        num_blocks=st.integers(6, 16),
        budget=st.sampled_from([4, 7, 16]),
        chunked=st.sampled_from([True, True, False]),
        least=st.sampled_from([1, 1, 9]),
        quiet=st.sampled_from([False, False, True]),
        mode=st.sampled_from(MODES[:3]),
        filled=st.integers(-1, 5),
    )
    def start(self, num_blocks, budget, chunked, least, quiet, mode, filled):
        self.tiers = ScriptedTiers()
        self.tiers.quiet = quiet
        self.engine = ScriptedEngine(
            num_blocks=num_blocks,
            tiers=self.tiers,
            tier_min_tokens=least,
            tier_timeout_s=0.6,
            max_num_batched_tokens=budget if chunked else 64,
            chunked_prefill=chunked,
            reserve_timeout_s=2.0,
            reserve_interval_s=0.1,
            queue_limit_s=30.0,
        )
        self.engine.step_s = 0.05
        self.restore()
        # The first request's beginning is asked for, or so many of its blocks have come.
        self.add(mode, 20, [1, 2], 4, 0, None, -1)
        if filled >= 0:
            self.tiers.answer(self.tiers.looking[0])
            self.engine.step()
            for fetch in self.tiers.loading:
                self.tiers.fill(fetch, filled)

    # -- requests -------------------------------------------------------------------------------------------

    @rule(
        mode=st.sampled_from(MODES),
        length=st.sampled_from([3, 9, 13, 17, 20, 20]),
        tail=st.lists(st.integers(1, 2), max_size=2),
        max_tokens=st.integers(1, 8),
        priority=st.sampled_from([0, 0, 1]),
        deadline=st.sampled_from([None, None, None, 0.5]),
        logprobs=st.sampled_from([-1, -1, -1, 0]),
    )
    def add(self, mode, length, tail, max_tokens, priority, deadline, logprobs):
        self.ask(mode, length, tail, max_tokens, priority=priority, deadline_in=deadline, prompt_logprobs=logprobs)

    @rule(seconds=st.sampled_from([0.05, 0.05, 0.35, 2.0]))
    def wait(self, seconds):
        self.engine.wait(seconds)

    @rule(what=st.sampled_from(["pool", "pool", "pool", "everything", "step"]))
    def flush_or_fail_a_step(self, what):
        if what == "step":
            self.engine.fail_next = BatonError(ErrorCode.EXECUTION_EXCEPTION, "broken")
        elif what == "pool":
            self.engine.kv.flush()
        else:
            self.engine.scheduler.flush_cache()
            self.engine.collect()

    # -- tiers ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.tiers.writes)
    @rule(count=st.sampled_from([1, 3, 100]))
    def copy_down(self, count):
        self.tiers.copy_down(count)

    @precondition(lambda self: self.tiers.looking)
    @rule(data=st.data(), ends=st.sampled_from([True, True, False]))
    def answer(self, data, ends):
        fetch = data.draw(st.sampled_from(self.tiers.looking))
        (self.tiers.answer if ends else self.tiers.find)(fetch)

    @precondition(lambda self: self.tiers.looking)
    @rule(fills=st.booleans())
    def answer_all_and_begin_to_load(self, fills):
        for fetch in list(self.tiers.looking):
            self.tiers.answer(fetch)
        self.engine.step()
        if fills:
            for fetch in list(self.tiers.loading):
                self.tiers.fill(fetch)
                self.tiers.end(fetch)
            self.engine.step()

    @precondition(lambda self: self.tiers.loading)
    @rule(data=st.data(), count=st.integers(1, 5))
    def fill(self, data, count):
        self.tiers.fill(data.draw(st.sampled_from(self.tiers.loading)), count)

    @precondition(lambda self: self.tiers.loading)
    @rule(data=st.data())
    def end_fetch(self, data):
        self.tiers.end(data.draw(st.sampled_from(self.tiers.loading)))

    @precondition(lambda self: self.tiers.stored)
    @rule(data=st.data())
    def lose(self, data):
        del self.tiers.stored[data.draw(st.sampled_from(list(self.tiers.stored)))]

    @rule()
    def restore(self):
        """Another server has put the blocks of BASE there."""
        size = self.engine.limits.block_size
        hashes = self.engine.kv.chains()[size].extend(BASE, len(BASE) // size)
        for index, block_hash in enumerate(hashes):
            self.tiers.stored[block_hash] = tuple(BASE[index * size : (index + 1) * size])

    @rule(busy=st.sampled_from([False, False, True]))
    def hang(self, busy):
        self.tiers.busy = busy

    # -- what must hold -------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_where_the_states_say(self):
        if not self.started:
            return
        scheduler, counts = self.engine.scheduler, self.engine.ledger()
        fetches = list(scheduler.fetches._all.values())
        of_loads = sum(
            held.receiving[1] - held.receiving[0]
            for request in scheduler.holds.loading.values()
            for held in request.allocation.groups.values()
        )
        of_fetches = {
            phase: sum(
                held.receiving[1] - held.receiving[0]
                for fetch in fetches
                if fetch.phase is phase and fetch.allocation is not None
                for held in fetch.allocation.groups.values()
            )
            for phase in Phase
        }
        assert counts.get("receiving", 0) == of_loads + of_fetches[Phase.LOADING]
        assert counts.get("quarantined", 0) >= of_fetches[Phase.LEAVING]
        for fetch in fetches:
            assert (fetch.allocation is not None) == (fetch.phase in (Phase.LOADING, Phase.LEAVING))
            assert bool(fetch.requests) == (fetch.phase is not Phase.LEAVING)
            assert all(request.fetch is fetch and request.key in scheduler.open for request in fetch.requests)
        waiting = [request for request in scheduler.open.values() if request.fetch is not None]
        assert all(any(request in fetch.requests for fetch in fetches) for request in waiting)
        assert all(request in list(scheduler.batcher.waiting) for request in waiting)

    @invariant()
    def nobody_waits_longer_than_allowed(self):
        if self.started:
            for fetch in self.engine.scheduler.fetches._all.values():
                if fetch.waited_for:
                    assert fetch.deadline_s <= self.engine.time.now + 0.31

    def quiet(self):
        self.tiers.finish()  # threads that hung until now
        self.engine.step()
        fetches = self.engine.scheduler.fetches
        assert not fetches._all and not fetches._by_hash


TieredEngine.TestCase.settings = settings(
    max_examples=extent(40, 80),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_tiers_against_any_order_of_events = TieredEngine.TestCase
