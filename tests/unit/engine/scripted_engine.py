"""A scheduler with doubles of what surrounds it: a model whose KV can be read, a cache store driven by the test, a
clock.

The model's next token is a function of the tokens that it finds in the KV pool by way of the block table, so a wrong,
stale or missing block leads to a wrong token or to a failed assertion.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.cache import KvCache
from engine.messages import (
    AbortRequest,
    AddRequest,
    KvGroupInfo,
    KvSource,
    PrefillInfo,
    RequestOutput,
    RunMode,
    SamplingParams,
)
from engine.requests import Answer, Request, StepTime
from engine.runner.batch import RowResult, StepResult
from engine.scheduler.batching import StepPlan
from engine.scheduler.limits import Limits
from engine.scheduler.scheduler import Scheduler
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.scripted_tiers import ScriptedTiers

VOCAB = 97
SOURCE = KvSource("e" * 32, ("127.0.0.1:1",), 1)


def next_token(tokens: Sequence[int]) -> int:
    """The double's greedy choice after `tokens`; never 0, which is the end-of-sequence token."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return 1 + value % (VOCAB - 1)


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


class RecordingTransfer:
    """Notes every call; the test decides what comes of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.leases: dict[str, int] = {}  # key -> generation of leases that have not ended
        self.loads: dict[str, Request] = {}  # loads that are open or being cancelled
        self.reloads = 0
        self.errors: dict[str, BatonError] = {}
        self.answers: dict[str, Answer] = {}

    def names(self, key: str) -> list[str]:
        return [name for name, of in self.calls if of == key]

    def admit(self, request: Request) -> None:
        assert request.key not in self.leases
        assert request.allocation is not None
        self.calls.append(("admit", request.key))
        self.leases[request.key] = request.allocation.generation

    def computed(self, request: Request, answer: Answer) -> None:
        self.calls.append(("computed", request.key))
        self.answers[request.key] = answer

    def fail(self, request_key: str, error: BatonError) -> None:
        self.calls.append(("fail", request_key))
        self.errors.setdefault(request_key, error)

    def tombstone(self, request_key: str) -> None:
        self.calls.append(("tombstone", request_key))

    def load(self, request: Request, deadline_s: float | None, reload: bool) -> None:
        assert request.key not in self.loads, "a second load beside an open one"
        self.calls.append(("reload" if reload else "load", request.key))
        self.loads[request.key] = request

    def keep_alive(self, request: Request) -> None:
        self.calls.append(("keep_alive", request.key))

    def forget(self, request_key: str) -> None:
        self.calls.append(("forget", request_key))

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        self.calls.append(("cancel_load", request_key))
        self.errors.setdefault(request_key, error)


class ScriptedEngine:
    """`step()` is one turn of the engine's loop. Outputs gather in `outputs`, by key."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        prefix_caching: bool = True,
        tiers: ScriptedTiers | None = None,
        **limits: object,
    ) -> None:
        self.now = 1000.0
        self.step_s = 0.5  # duration of a model step, of which a tenth is sampling
        self.time = StepTime(lambda: self.now)
        group = KvGroupInfo("full", 1, 1, 8, block_size, "float32")
        self.kv = KvCache([group], num_blocks, prefix_caching)
        settings = {
            "block_size": block_size,
            "max_model_len": 64,
            "vocab_size": VOCAB,
            "eos_token_ids": frozenset({0}),
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "model_name": "m",
            **limits,
        }
        self.limits = Limits(**settings)  # type: ignore[arg-type]
        self.transfer = RecordingTransfer()
        self.tiers = tiers
        if tiers is not None:
            tiers.attach(self)
        self.scheduler = Scheduler(self.kv, self.limits, self.transfer, self.time, tiers=tiers)
        self.pool: dict[tuple[int, int], int] = {}  # (block, slot) -> token whose KV is there
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.staged_ends: list[tuple[str, str]] = []
        self.counts: dict[str, float] = {}
        self.fail_next: BatonError | None = None
        self.scripted: dict[tuple[str, int], int] = {}  # (key, index) -> token to sample instead
        self.broken: set[str] = set()  # keys whose rows come out of the model unusable
        self.plans: list[list[tuple[str, int, int]]] = []

    # -- driving --------------------------------------------------------------------------------------------

    def add(
        self,
        key: str,
        prompt: Sequence[int],
        mode: RunMode = RunMode.LOCAL,
        *,
        max_tokens: int = 8,
        outputs: Sequence[int] = (),
        priority: int = 0,
        salt: str = "",
        deadline_in: float | None = None,
        **sampling: object,
    ) -> None:
        self.time.refresh()
        self.scheduler.add(
            AddRequest(
                request_key=key,
                mode=mode,
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
                output_token_ids=list(outputs),
                cache_salt=salt,
                priority=priority,
                arrival_ns=int(self.now * 1e9),
                deadline_ns=int((self.now + deadline_in) * 1e9) if deadline_in is not None else 0,
                kv_source=SOURCE if mode is RunMode.DECODE else None,
            )
        )

    def abort(self, key: str, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        self.time.refresh()
        self.scheduler.abort(AbortRequest(key, int(code)))
        self.collect()

    def step(self) -> StepPlan:
        self.time.refresh()
        self.scheduler.take_fetches()
        self.scheduler.tick()
        plan = self.scheduler.form()
        assert plan.num_tokens == sum(len(row.token_ids) for row in plan.rows)
        self.plans.append([(row.request_key, row.start, len(row.token_ids)) for row in plan.rows])
        if plan.rows:
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                self.scheduler.fail_step(plan, error)
            else:
                result = self.execute(plan)
                self.now += self.step_s
                self.time.refresh()
                self.scheduler.book(plan, result)
        self.collect()
        return plan

    def run(self, limit: int = 200) -> None:
        """Steps until nothing computes."""
        for _ in range(limit):
            if not self.step().rows:
                return
        raise AssertionError(f"still computing after {limit} steps")

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def collect(self) -> None:
        outputs, ends, observations = self.scheduler.news.take()
        for output in outputs:
            seen = self.outputs.setdefault(output.request_key, [])
            assert not (seen and seen[-1].last), f"{output.request_key}: news after the last output"
            seen.append(output)
        self.staged_ends += [(end.request_key, end.outcome) for end in ends]
        for item in observations:
            name = item.name.removeprefix("baton_")
            self.counts[name] = self.counts.get(name, 0) + item.value
            for label in item.labels.values():
                self.counts[f"{name}:{label}"] = self.counts.get(f"{name}:{label}", 0) + item.value

    # -- the model ------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        size = self.limits.block_size
        assert len(plan.rows) <= self.limits.max_num_seqs
        assert len({row.request_key for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            for position, token in enumerate(row.token_ids, row.start):
                block = row.block_table[position // size]
                assert block != 0
                self.pool[(block, position % size)] = token
        results = []
        for request, row in zip(plan.requests, plan.rows, strict=True):
            end = row.start + len(row.token_ids)
            found = [self.pool[(row.block_table[i // size], i % size)] for i in range(end)]
            assert found == request.tokens[:end], f"{request.key}: wrong KV"
            result = RowResult()
            if request.key in self.broken:
                result.failure = BatonError(ErrorCode.EXECUTION_EXCEPTION, "not finite")
            elif row.sample:
                assert row.sampling is not None
                assert row.sampling.token_index == len(request.outputs)
                scripted = self.scripted.get((request.key, len(request.outputs)))
                result.token_id = next_token(found) if scripted is None else scripted
            results.append(result)
        return StepResult(results, 0.9 * self.step_s, 0.1 * self.step_s)

    # -- the cache store ------------------------------------------------------------------------------------

    def load_done(self, key: str, answer: Answer | BatonError | None = None) -> None:
        """The prompt's KV arrives whole."""
        self.time.refresh()
        request = self.transfer.loads.pop(key)
        held = request.allocation.groups["full"] if request.allocation is not None else None
        tokens = list(request.tokens)
        if held is not None and held.blocks:
            size = self.limits.block_size
            first, last = held.receiving
            for index in range(first, last):
                for slot, token in enumerate(tokens[index * size : (index + 1) * size]):
                    self.pool[(held.blocks[index], slot)] = token
        if answer is None:
            info = PrefillInfo(3, "replayed")
            answer = Answer(len(request.outputs), next_token(tokens), info=info)
        self.scheduler.load_done(key, answer, [("load_complete", 1)])
        self.collect()

    def load_failed(self, key: str, code: ErrorCode, retriable_here: bool = False) -> None:
        self.time.refresh()
        self.transfer.loads.pop(key, None)
        self.scheduler.load_failed(key, BatonError(code, "scripted"), retriable_here, [])
        self.collect()

    def lease_ended(self, key: str, outcome: str = "released", error: BatonError | None = None) -> None:
        self.time.refresh()
        generation = self.transfer.leases.pop(key)
        self.scheduler.lease_ended(key, generation, outcome, "", error, 0.1, 0.2, [("lease_ended", 2)])
        self.collect()

    # -- looking --------------------------------------------------------------------------------------------

    def tokens(self, key: str) -> list[int]:
        found = [token for output in self.outputs.get(key, []) for token in output.tokens]
        if found:
            first = found[0].index
            assert [token.index for token in found] == list(range(first, first + len(found)))
        return [token.token_id for token in found]

    def last(self, key: str) -> RequestOutput:
        output = self.outputs[key][-1]
        assert output.last, f"{key} has not ended"
        return output

    def error(self, key: str) -> ErrorCode:
        error = self.last(key).error
        assert error is not None, f"{key} ended well"
        return ErrorCode(error.code)

    def ledger(self) -> dict[str, int]:
        ledger = self.kv.ledgers()[0]
        states = ("free", "running", "staged", "receiving", "quarantined", "cached")
        counts = {state: getattr(ledger, state) for state in states}
        assert sum(counts.values()) == ledger.total
        return {state: count for state, count in counts.items() if count}

    def assert_clean(self) -> None:
        """Nothing is held, everything can be used again."""
        assert set(self.ledger()) <= {"free", "cached"}
        scheduler, batcher = self.scheduler, self.scheduler.batcher
        for table in (scheduler.open, scheduler.holds.loading, scheduler.holds.staged, scheduler.holds.leaving):
            assert not table
        for queue in (batcher.waiting, batcher.reserving, batcher.ready, batcher.running):
            assert not queue
