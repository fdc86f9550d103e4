"""Random lives of requests on one engine, both roles at once, against what must hold in any order of events.

Tokens are checked twice: the double of the model reads its own KV (see scripted_engine), and at the end each
request's tokens must be the model's continuation of its prompt.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from engine.messages import RunMode
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.engine.engine_machine import EngineMachine
from tests.unit.engine.scripted_engine import ScriptedEngine

MODES = (RunMode.LOCAL, RunMode.LOCAL, RunMode.DECODE, RunMode.DECODE, RunMode.PREFILL)
FAILURES = (ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED, ErrorCode.KV_CHECKSUM_MISMATCH, ErrorCode.CANCELLED)


class OneEngine(EngineMachine):
    @initialize(
        num_blocks=st.integers(6, 20),
        caching=st.booleans(),
        budget=st.sampled_from([4, 7, 16]),
        policy=st.sampled_from(["retry", "recompute", "fail"]),
        local=st.sampled_from([True, True, False]),
        chunked=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks, caching, budget, policy, local, chunked):
        self.engine = ScriptedEngine(
            num_blocks=num_blocks,
            prefix_caching=caching,
            max_num_batched_tokens=budget if chunked else 64,
            chunked_prefill=chunked,
            load_failure_policy=policy,
            allow_local_prefill=local,
            reserve_timeout_s=2.0,
            reserve_interval_s=0.1,
            queue_limit_s=30.0,
        )
        self.engine.step_s = 0.1

    # -- rules ----------------------------------------------------------------------------------------------

    @rule(
        mode=st.sampled_from(MODES),
        length=st.integers(1, 20),
        tail=st.lists(st.integers(1, 3), max_size=2),
        max_tokens=st.integers(1, 12),
        given_tokens=st.sampled_from([0, 0, 0, 2]),
        priority=st.sampled_from([0, 0, 1]),
        deadline=st.sampled_from([None, None, None, 1.0]),
    )
    def add(self, mode, length, tail, max_tokens, given_tokens, priority, deadline):
        self.ask(mode, length, tail, max_tokens, given_tokens, priority=priority, deadline_in=deadline)

    @precondition(lambda self: self.engine.transfer.loads)
    @rule(data=st.data(), code=st.sampled_from(FAILURES), retriable=st.booleans())
    def break_load(self, data, code, retriable):
        self.engine.load_failed(data.draw(st.sampled_from(list(self.engine.transfer.loads))), code, retriable)

    @rule(seconds=st.sampled_from([0.05, 0.5, 5.0]))
    def wait(self, seconds):
        self.engine.wait(seconds)

    @rule(really=st.sampled_from([False, False, False, True]))
    def flush_or_fail_a_step(self, really):
        if really:
            self.engine.fail_next = BatonError(ErrorCode.EXECUTION_EXCEPTION, "broken")
        else:
            self.engine.kv.flush()

    # -- what must hold -------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_where_the_states_say(self):
        if not self.started:
            return
        counts, scheduler = self.engine.ledger(), self.engine.scheduler
        holders = [
            request
            for table in (scheduler.open, scheduler.holds.staged, scheduler.holds.leaving)
            for request in table.values()
            if request.allocation is not None
        ]
        if not holders:
            assert set(counts) <= {"free", "cached"}
        receiving = sum(
            held.receiving[1] - held.receiving[0]
            for request in scheduler.holds.loading.values()
            for held in request.allocation.groups.values()
        )
        assert counts.get("receiving", 0) == receiving
        queues = self.engine.scheduler.batcher
        assert len(queues.running) <= self.engine.limits.max_num_seqs
        placed = len(queues.running) + len(queues.waiting) + len(queues.reserving) + len(queues.ready)
        assert placed + len(scheduler.holds.loading) == len(scheduler.open)


OneEngine.TestCase.settings = settings(
    max_examples=extent(50, 100),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_engine_against_any_order_of_events = OneEngine.TestCase
