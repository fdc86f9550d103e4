"""One request inside the engine: its tokens, its blocks, where it stands and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.grammar.matching import GrammarMatching
from engine.input_embeddings import EmbeddingRows
from engine.kv_cache.cache import Allocation, Chains
from engine.messages import (
    AddRequest,
    FinishReason,
    PrefillInfo,
    PromptLogprob,
    RunMode,
    SamplingParams,
    TimelineEvent,
    TokenLogprob,
)
from engine.runner.batch import BatchRow
from engine.sampling.row import SamplingRow
from rpc.errors import BatonError
from rpc.graph_status import StickyStatus
from rpc.stages import DECODE_STAGES, PREFILL_STAGES, StageClock

if TYPE_CHECKING:
    from engine.scheduler.prefix_fetches import PrefixFetch

# Without `admit`, which is the front's; a prefill's `publish` and `held` come after its answer, from the cache store.
COMPUTE_STAGES = tuple(stage for stage in PREFILL_STAGES if stage not in ("admit", "publish", "held"))
LOAD_STAGES = tuple(stage for stage in DECODE_STAGES if stage != "admit")
GENERATE_STAGES = ("generate", "release")


class RequestState(StrEnum):
    """Where a request stands. One that has ended for its caller may still own blocks (staged, leaving)."""

    WAITING = "waiting"  # for a seat, a token budget or blocks, before its first step or after a preemption
    LOADING = "loading"  # blocks are reserved, the KV is arriving
    READY = "ready"  # the KV is here; waiting for a seat
    RUNNING = "running"  # has a seat
    STAGED = "staged"  # prefill: answered; the blocks stay until the lease ends
    LEAVING = "leaving"  # ended, but a transfer may still read or write its blocks
    ENDED = "ended"


class StepTime:
    """One reading of the monotonic clock for everything that happens at one moment of a step."""

    __slots__ = ("_clock", "now")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.now = clock()  # seconds

    def __call__(self) -> float:
        return self.now

    def refresh(self) -> float:
        self.now = self._clock()
        return self.now

    @property
    def now_ns(self) -> int:
        return int(self.now * 1e9)


@dataclass(slots=True)
class Answer:
    """What a computed prompt led to: the first token and what goes with it."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    info: PrefillInfo = field(default_factory=PrefillInfo)
    prompt_logprobs: list[PromptLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Request:
    """A request from its arrival in the engine to the release of its last block. Belongs to the engine's main thread.

    `tokens` are the prompt and everything generated, `outputs` the generated ones alone (those of earlier attempts
    included). The KV of `tokens[:computed]` is in the pool; in a decode step the last token is the only one without.
    """

    __slots__ = (
        "add",
        "allocation",
        "attempts",
        "block_table",
        "capacity",
        "chains",
        "clocks",
        "compute_here",
        "computed",
        "deadline_s",
        "embeddings",
        "error",
        "events",
        "fetch",
        "generating",
        "given",
        "grammar",
        "graph_status",
        "held_since_s",
        "key",
        "lease_over",
        "loads",
        "mode",
        "order",
        "outputs",
        "params",
        "preemptions",
        "prefilling",
        "prompt",
        "prompt_logprobs",
        "retry_at_s",
        "row",
        "sampling",
        "since_s",
        "slept_since_s",
        "state",
        "time",
        "tokens",
        "tried_at_releases",
        "wait_until_s",
    )

    def __init__(
        self,
        add: AddRequest,
        sequence: int,
        time: StepTime,
        chains: Chains,
        eos_token_ids: Sequence[int],
        embeddings: tuple[EmbeddingRows, ...] = (),
        grammar: GrammarMatching | None = None,
    ) -> None:
        self.add = add
        self.key = add.request_key
        self.mode = add.mode
        self.params: SamplingParams = add.sampling
        self.order = (add.priority, add.arrival_ns, sequence)  # who is served first
        self.prompt = add.prompt_token_ids
        self.outputs = list(add.output_token_ids)
        self.tokens = self.prompt + self.outputs
        self.given = len(self.outputs)
        self.chains = chains
        self.embeddings = embeddings  # in place of those of prompt tokens
        self.time = time
        self.deadline_s = add.deadline_ns / 1e9 if add.deadline_ns else 0.0  # 0: none
        self.since_s = time.now  # begin of its wait
        self.held_since_s = 0.0  # begin of the time in which its blocks wait for a peer
        self.wait_until_s = 0.0  # end of the longest time in the queue; 0: none

        self.state = RequestState.WAITING
        self.compute_here = add.mode is not RunMode.DECODE
        self.fetch: PrefixFetch | None = None  # of its beginning, from tiers below the pool, while it is queued
        self.allocation: Allocation | None = None
        self.block_table: list[int] = []
        self.capacity = 0  # tokens that fit into its blocks
        self.computed = 0
        self.prefilling = False  # has a seat, and its known tokens are not all computed
        self.generating = False  # its first token of this server has been sent
        self.lease_over = False  # the cache store has let go of the KV before the prompt was computed
        self.loads = 0
        self.attempts = 0  # failed attempts to reserve blocks
        self.retry_at_s = 0.0
        self.slept_since_s = 0.0
        self.tried_at_releases = -1
        self.preemptions = 0
        self.error: BatonError | None = None

        self.graph_status = StickyStatus()  # of the prefill graph, decided by the first step that computes the prompt
        self.prompt_logprobs: list[PromptLogprob] | None = None
        self.events: list[TimelineEvent] = []
        self.clocks = [self._stage_clock(COMPUTE_STAGES if self.compute_here else LOAD_STAGES)]
        self.clocks[0].next_stage()
        self.grammar = grammar
        self.sampling = SamplingRow(self.params, self.given, self.prompt, self.outputs, eos_token_ids, grammar)
        self.row = BatchRow(self.key, [], 0, self.block_table, True, self.sampling)

    @property
    def waits_for_grammar(self) -> bool:
        """Its grammar is still being compiled: nothing can be drawn for it."""
        return self.grammar is not None and not self.grammar.ready

    @property
    def waits_for_prefix(self) -> bool:
        """Its beginning is being looked for, or on its way from a tier; see `PrefixFetches`."""
        return self.fetch is not None and self.fetch.waited_for

    @property
    def clock(self) -> StageClock:
        """The stage clock that runs now. A request that prefills and decodes here has one after the other."""
        return self.clocks[-1]

    @property
    def stage(self) -> str:
        return self.clocks[-1].stage

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is not in the pool."""
        return len(self.tokens) - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are computed once, for the attempt that computes the prompt for the first time."""
        return self.params.prompt_logprobs >= 0 and self.given == 0 and not self.generating

    def hold(self, allocation: Allocation, group: str, block_size: int) -> None:
        """Takes the blocks of `allocation`; `group` is the one whose table the runner gets."""
        self.allocation = allocation
        self.block_table = allocation.table(group)
        self.row.block_table = self.block_table
        self.capacity = len(self.block_table) * block_size

    def let_go(self) -> Allocation | None:
        """Gives up its allocation, for the caller to free."""
        allocation, self.allocation = self.allocation, None
        self.block_table = self.row.block_table = []
        self.capacity = self.computed = 0
        self.prefilling = False
        return allocation

    def sleep(self, until_s: float) -> None:
        """Its attempt to reserve blocks has failed: the time until the next one belongs to no stage."""
        self.clock.finish_stage()
        self.slept_since_s = self.time.now
        self.retry_at_s = until_s

    def wake(self) -> None:
        """Another attempt begins."""
        self.clock.restore_stage()
        self.clock.next_stage()
        self.clock.add_retry_wait(self.time.now - self.slept_since_s)

    def begin_compute(self) -> None:
        """It is queued to be computed here after all."""
        self.clock.finish_stage()
        self.compute_here = True
        self.clocks.append(self._stage_clock(COMPUTE_STAGES))
        self.clock.next_stage()

    def begin_generate(self) -> None:
        """Its prompt was computed here, and it goes on here."""
        self.clock.finish_stage()
        self.clocks.append(self._stage_clock(GENERATE_STAGES))
        self.clock.next_stage()

    def event(self, name: str) -> None:
        self.events.append(TimelineEvent(name, self.time.now_ns))

    def _stage_clock(self, stages: Sequence[str]) -> StageClock:
        clock = StageClock(stages, self.time)
        if self.add.traceparent:
            clock.keep_intervals()
        return clock

    def stage_times(self) -> dict[str, tuple[int, int]]:
        """First begin and last end of each stage that was left, in nanoseconds, of a request that is traced."""
        times: dict[str, tuple[int, int]] = {}
        for clock in self.clocks:
            for stage, (begin, end) in clock.intervals().items():
                known = times.get(stage)
                times[stage] = (int(begin * 1e9) if known is None else known[0], int(end * 1e9))
        return times

    def seconds(self) -> dict[str, float]:
        """Seconds per stage that was reached."""
        total: dict[str, float] = {}
        for clock in self.clocks:
            clock.finish_stage()
            for stage, seconds in clock.seconds().items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total
