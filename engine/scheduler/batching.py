"""Forms the batch of the next step: decode rows first, then chunks of prompts, then whoever can be admitted.

Blocks run out for the latest request of the lowest priority first: it is preempted, which means that it gives all its
blocks back and is computed again later. A prompt whose KV is promised to a decode server is never preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.input_embeddings import embeddings_of_chunk
from engine.kv_cache.cache import KvCache
from engine.messages import RunMode
from engine.requests import Request, RequestState
from engine.runner.batch import BatchRow, StepBatch
from engine.scheduler.limits import Limits
from engine.scheduler.news import News
from engine.scheduler.queue import RequestQueue
from rpc import faults
from rpc.errors import BatonError, ErrorCode


@dataclass(slots=True)
class StepPlan:
    """One step: `requests[i]` has row i of the batch; the first `num_decode` rows decode."""

    requests: list[Request] = field(default_factory=list)
    rows: list[BatchRow] = field(default_factory=list)
    num_decode: int = 0
    num_tokens: int = 0

    @property
    def batch(self) -> StepBatch:
        return StepBatch(self.rows, self.kind)

    @property
    def kind(self) -> str:
        """Label `kind` of the step's metrics."""
        if self.num_decode == len(self.rows):
            return "decode"
        return "mixed" if self.num_decode else "prefill"


class Batcher:
    """The queues of an engine and the rule by which they become batches.

    `fail` ends a request with an error. `admitted` is told of each request that got blocks to compute, `reserved` of
    each that got blocks to load into, `postponed` of each that has to try again; all before its first step.
    `load_prefix` gives a request's prefix fetch its blocks, and answers whether there were enough.
    """

    def __init__(
        self,
        kv: KvCache,
        limits: Limits,
        news: News,
        *,
        fail: Callable[[Request, BatonError], None],
        admitted: Callable[[Request], None],
        reserved: Callable[[Request], None],
        postponed: Callable[[Request], None],
        load_prefix: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.news = news
        self._fail = fail
        self._admitted = admitted
        self._reserved = reserved
        self._postponed = postponed
        self._load_prefix = load_prefix
        self._group = kv.groups[0].tag
        self.waiting = RequestQueue()  # to be computed here
        self.reserving = RequestQueue()  # want blocks to load into
        self.ready = RequestQueue()  # loaded, want a seat
        self.running = RequestQueue()
        self.preempted = 0  # preemptions so far

    def reaches(self, request: Request, stage: str) -> bool:
        """Fault point `engine.stage`. False: the request failed where it would have entered `stage`."""
        if not faults.armed():
            return True
        try:
            faults.fault("engine.stage", stage=stage, request_key=request.key)
        except BatonError as error:
            error.stage = stage
            self._fail(request, error)
            return False
        return True

    # -- the batch ------------------------------------------------------------------------------------------

    def next_step(self) -> tuple[int, str]:
        """Requests that have a seat, and the kind of the step that they would make; nothing changes."""
        seated = len(self.running)
        prompts = sum(request.prefilling for request in self.running)
        if not prompts:
            return seated, "decode" if seated else ""
        return seated, "mixed" if prompts < seated else "prefill"

    def form(self) -> StepPlan:
        """The next step; without rows when nothing can run."""
        plan = StepPlan()
        preempted_before = self.preempted
        self._seat_loaded()
        for request in self.running:
            if request.prefilling or request.state is not RequestState.RUNNING:
                continue
            if request.computed >= request.capacity and not self._make_room(request):
                continue
            row = request.row
            row.token_ids = [request.tokens[-1]]
            row.start = request.computed
            row.sample = True
            row.sampling = request.sampling
            request.sampling.token_index = len(request.outputs)
            row.prompt_logprobs_from = -1
            row.embeddings = ()
            plan.requests.append(request)
            plan.rows.append(row)
        plan.num_decode = plan.num_tokens = len(plan.rows)
        for request in self.running:
            if request.prefilling:
                self._add_chunk(plan, request)
        if self.waiting or self.reserving:
            self._admit(plan, short_of_blocks=self.preempted > preempted_before)
        return plan

    def _seat_loaded(self) -> None:
        for request in list(self.ready):
            if len(self.running) >= self.limits.max_num_seqs:
                return
            if request.waits_for_grammar or not self.reaches(request, "generate"):
                continue
            self.ready.remove(request)
            request.state = RequestState.RUNNING
            self.running.add(request)
            request.clock.next_stage()  # wait_to_run ends, generate begins
            request.event("first_step")

    def _make_room(self, request: Request) -> bool:
        """One more block for a decoding request, at the cost of later ones.

        False: the request was preempted itself, or failed because it can never have that many blocks.
        """
        while not self.kv.grow(request.allocation, request.computed + 1):  # type: ignore[arg-type]
            if not self.kv.fits_empty(request.computed + 1):
                self.news.count("baton_kv_allocation_failures_total", code=ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN.name)
                self._fail(request, self._too_long(request.computed + 1))
                return False
            victim = self._latest()
            self.preempt(victim)
            if victim is request:
                return False
        request.capacity = len(request.block_table) * self.limits.block_size
        return True

    def _latest(self) -> Request:
        return next(
            request
            for request in reversed(self.running)
            if request.mode is not RunMode.PREFILL and request.state is RequestState.RUNNING
        )

    def preempt(self, request: Request) -> None:
        """Takes the request's seat and blocks away; it waits to be computed again, with all its tokens."""
        allocation = request.let_go()
        assert allocation is not None
        self.kv.free(allocation)
        self.running.remove(request)
        request.state = RequestState.WAITING
        request.preemptions += 1
        self.preempted += 1
        request.prompt_logprobs = None
        if not request.generating:
            request.clock.restore_stage("queue")
            request.clock.next_stage()
        self.waiting.add(request)
        self.news.count("baton_preemptions_total", reason="blocks")

    def _add_chunk(self, plan: StepPlan, request: Request) -> bool:
        """The next chunk of the request's tokens, as far as the budget goes. False: nothing fits."""
        limits = self.limits
        count, budget = request.remaining, limits.max_num_batched_tokens - plan.num_tokens
        if count > budget:
            if not limits.chunked_prefill:
                # A prompt of the full budget would otherwise wait until nobody decodes.
                if len(plan.rows) > plan.num_decode or count > limits.max_num_batched_tokens:
                    return False
            else:
                # A chunk ends with a block where it can, so that the block is complete and can travel.
                end = (request.computed + budget) // limits.block_size * limits.block_size
                count = end - request.computed if end > request.computed else budget
                if count <= 0:
                    return False
        start, end = request.computed, request.computed + count
        row = request.row
        row.token_ids = request.tokens[start:end]
        row.start = start
        row.sample = end == len(request.tokens)
        row.sampling = request.sampling if row.sample else None
        request.sampling.token_index = len(request.outputs)
        row.embeddings = embeddings_of_chunk(request.embeddings, start, end) if request.embeddings else ()
        row.prompt_logprobs_from, row.prompt_next_ids = -1, ()
        if request.wants_prompt_logprobs:
            row.prompt_next_ids = request.prompt[start + 1 : end + 1]
            row.num_prompt_logprobs = request.params.prompt_logprobs
            row.prompt_logprobs_from = start + 1 if row.prompt_next_ids else -1
        plan.requests.append(request)
        plan.rows.append(row)
        plan.num_tokens += count
        return True

    # -- admission ------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, short_of_blocks: bool) -> None:
        """Gives blocks to those who wait, in order, until they run out: nobody is overtaken for lack of blocks.

        A request that waits for a seat or for a share of the batch does not hold up those who only want to load; one
        whose grammar is being compiled, or whose beginning is on its way from a tier, holds up nobody.
        """
        computing, loading = iter(self.waiting), iter(self.reserving)
        compute, load = next(computing, None), next(loading, None)
        while compute is not None or load is not None:
            if load is None or (compute is not None and compute.order < load.order):
                assert compute is not None
                if compute.waits_for_grammar or compute.waits_for_prefix:
                    compute = next(computing, None)
                elif short_of_blocks or not self._may_start(plan, compute):
                    compute = None
                elif compute.fetch is not None:  # what was found of its beginning wants blocks
                    short_of_blocks = not self._load_prefix(compute)
                    if compute.fetch is not None:  # else there is nothing to wait for after all
                        compute = next(computing, None)
                elif not self.reaches(compute, "match"):
                    compute = next(computing, None)
                elif self._start(compute):
                    self._add_chunk(plan, compute)
                    compute = next(computing, None)
                else:
                    short_of_blocks = True
            else:
                if not self._reserve(load, short_of_blocks):
                    short_of_blocks = True
                load = next(loading, None)

    def _may_start(self, plan: StepPlan, request: Request) -> bool:
        if len(self.running) >= self.limits.max_num_seqs:
            return False
        budget = self.limits.max_num_batched_tokens - plan.num_tokens
        if self.limits.chunked_prefill:
            return budget > 0
        # Without chunks a prefix hit may make it fit, which is not known yet; whether it does not is.
        return budget >= len(request.tokens) or len(plan.rows) == plan.num_decode

    def _start(self, request: Request) -> bool:
        """Blocks and a seat for a request that is computed here. False for want of blocks."""
        if request.tried_at_releases == self.kv.releases:
            return False
        began = request.time.refresh()
        tokens = request.tokens
        wants_all = request.wants_prompt_logprobs  # positions that are not computed have no log-probabilities
        allocation = self.kv.acquire(
            tokens,
            request.chains,
            max_hit=0 if wants_all else len(tokens) - 1,
            extra=self.extra_tokens(request),
        )
        if allocation is None:
            request.tried_at_releases = self.kv.releases
            return False
        request.tried_at_releases = -1
        self.waiting.remove(request)
        request.hold(allocation, self._group, self.limits.block_size)
        request.computed = allocation.cached_tokens
        request.state = RequestState.RUNNING
        request.prefilling = True
        self.running.add(request)
        if request.preemptions == 0:
            self.note_lookup(request)
        if not request.generating:
            matched = request.time.refresh()
            request.time.now = began
            request.clock.next_stage()  # match
            request.time.now = matched
            request.clock.next_stage()  # compute
        self._admitted(request)
        return True

    def _reserve(self, request: Request, short_of_blocks: bool) -> bool:
        """Blocks for a load. False for want of blocks, and once attempts or time are used up the request has
        failed."""
        now, limits = request.time.now, self.limits
        if now < request.retry_at_s:
            return False
        if request.attempts:
            request.wake()
        may_have_room = not short_of_blocks and request.tried_at_releases != self.kv.releases
        if may_have_room and self.acquire_for_load(request):
            self.reserving.remove(request)
            self._reserved(request)
            return True
        request.tried_at_releases = self.kv.releases if not short_of_blocks else -1
        request.attempts += 1
        late = now + limits.reserve_interval_s > request.since_s + limits.reserve_timeout_s
        if request.attempts > limits.reserve_attempts or late:
            self.news.count("baton_kv_allocation_failures_total", code=ErrorCode.MALLOC_FAILED.name)
            self._fail(
                request,
                BatonError(
                    ErrorCode.MALLOC_FAILED,
                    "the server has no room for the KV of this prompt now; send the request again",
                    stage="allocate",
                    metadata={"attempts": str(request.attempts)},
                ),
            )
        else:
            request.sleep(now + limits.reserve_interval_s)
            if request.attempts == 1:
                self._postponed(request)
        return False

    def acquire_for_load(self, request: Request) -> bool:
        """Blocks for the known tokens, whose KV will arrive, and the reserve. False for want of blocks."""
        allocation = self.kv.acquire(
            request.tokens,
            request.chains,
            max_hit=len(request.tokens),
            extra=self.extra_tokens(request),
            receive=True,
        )
        if allocation is None:
            return False
        request.hold(allocation, self._group, self.limits.block_size)
        return True

    def extra_tokens(self, request: Request) -> int:
        """Tokens beyond the known ones for which blocks are taken at once.

        One for a prompt that goes on to be decoded here, a block for one that is loaded, none for one that leaves.
        """
        if request.mode is RunMode.PREFILL:
            return 0
        wanted = 1 if request.compute_here else self.limits.block_size
        known = len(request.tokens)
        # The last token that may be generated is never computed.
        left = min(request.params.max_tokens - len(request.outputs), self.limits.max_model_len - known)
        return max(0, min(wanted, left - 1))

    def note_lookup(self, request: Request) -> None:
        assert request.allocation is not None
        name, hit = self.limits.model_name, request.allocation.cached_tokens
        if self.kv.prefix_caching and not (request.compute_here and request.wants_prompt_logprobs):
            self.news.count("baton_prefix_cache_queried_tokens_total", len(request.tokens), model_name=name)
            self.news.count("baton_prefix_cache_hit_tokens_total", hit, model_name=name)  # 0 is a finding too

    def needed_when_alone(self, request: Request) -> int:
        return len(request.tokens) + self.extra_tokens(request)

    def _too_long(self, tokens: int) -> BatonError:
        return BatonError(
            ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN,
            f"{tokens} tokens do not fit into the KV cache even when it is empty; shorten the request",
        )

    def check_fits(self, request: Request) -> None:
        """Raises EXCEEDS_KV_CACHE_MAX_LEN for a request that can never get its blocks."""
        needed = self.needed_when_alone(request)
        if not self.kv.fits_empty(needed):
            raise self._too_long(needed)
