"""The life of every request in the engine, from its arrival to the release of its last block.

Pure: events go in (requests, aborts, results of steps, ends of loads and leases, the clock), decisions come out (the
next batch, news for the front, calls of the `Transfer`). A request ends for its caller exactly once, with its first
cause; finish, abort and transfer events commute, and an event about a request that is gone does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.grammar.compiling import GrammarWorkers
from engine.grammar.matching import GrammarMatching
from engine.input_embeddings import read_embeddings
from engine.kv_cache.cache import KvCache
from engine.messages import (
    AbortRequest,
    AddRequest,
    FinishReason,
    LoadTime,
    PrefillInfo,
    RunMode,
    StagedEnd,
    TimelineEvent,
    TokenLogprob,
    TokenOutput,
)
from engine.requests import Answer, Request, RequestState, StepTime
from engine.runner.batch import StepResult
from engine.scheduler.batching import Batcher, StepPlan
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.finish import finish_of
from engine.scheduler.holds import Holds
from engine.scheduler.limits import Limits, check_request
from engine.scheduler.load_policy import AfterFailure, after_failed_load
from engine.scheduler.news import News, engine_error
from engine.scheduler.prefix_fetches import PrefixFetches, Tiers
from engine.scheduler.transfer import Transfer, for_readers
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import not_offered
from rpc.graph_status import PrefillGraphStatus
from rpc.input_embeddings import digest_of
from rpc.status import load_failed


class Scheduler:
    """Not thread-safe. `time` is refreshed by the caller at each moment that matters."""

    def __init__(
        self,
        kv: KvCache,
        limits: Limits,
        transfer: Transfer,
        time: StepTime,
        grammars: GrammarWorkers | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """grammars: compiles what requests are to keep to; without it, requests with a grammar are refused. tiers:
        below the KV pool."""
        self.grammars = grammars
        self.kv = kv
        self.limits = limits
        self.transfer = transfer
        self.time = time
        self.news = News()
        self.fetches: PrefixFetches | None = None
        if tiers is not None:
            self.fetches = PrefixFetches(
                kv, tiers, self.news, time, timeout_s=limits.tier_timeout_s, min_tokens=limits.tier_min_tokens
            )
        self.batcher = Batcher(
            kv,
            limits,
            self.news,
            fail=self._fail,
            admitted=self._admitted,
            reserved=self._reserved,
            postponed=transfer.keep_alive,
            load_prefix=self.fetches.load if self.fetches is not None else lambda _: False,
        )
        self._smallest_block = min(group.block_size for group in kv.groups)
        self.open: dict[str, Request] = {}  # not ended for their callers
        self.holds = Holds(kv, time)
        self.deadlines = Deadlines(self.open, time, limits.queue_limit_s)
        self._sequence = 0
        self._eos = tuple(sorted(limits.eos_token_ids))

    # -- from the front -------------------------------------------------------------------------------------

    def add(self, add: AddRequest) -> None:
        """Takes a request. A refusal is its last output."""
        key = add.request_key
        if key in self.open or key in self.holds.staged or key in self.holds.leaving:
            if key not in self.open:  # the caller of an open one would take the refusal for its own
                self._refuse(key, BatonError(ErrorCode.DUPLICATE_REQUEST, "a request with this key is here already"))
            return
        try:
            check_request(add, self.limits)
            embeddings = read_embeddings(add.input_embeddings, len(add.prompt_token_ids), self.limits.embedding_size)
            chains = self.kv.chains(add.cache_salt, digest_of(add.input_embeddings))
            request = Request(add, self._sequence, self.time, chains, self._eos, embeddings, self._matching(add))
            self.batcher.check_fits(request)
        except BatonError as error:
            if error.code is ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN:
                self.news.count("baton_kv_allocation_failures_total", code=error.code.name)
            if add.mode is RunMode.PREFILL:
                self.transfer.fail(key, error)
            self._refuse(key, error)
            return
        self._sequence += 1
        self.open[key] = request
        if self.grammars is not None and add.grammar is not None:
            self.grammars.submit(key, add.grammar)
        self.deadlines.add(request)
        if request.compute_here:
            self._queue(request)
            self.batcher.reaches(request, "queue")
        else:
            self.batcher.reserving.add(request)
            if self.batcher.reaches(request, "prepare"):
                request.clock.next_stage()  # prepare is over: allocate
                self.batcher.reaches(request, "allocate")

    def _matching(self, add: AddRequest) -> GrammarMatching | None:
        if add.grammar is None:
            return None
        if self.grammars is None:
            raise not_offered()
        if not self._eos:
            raise BatonError(
                ErrorCode.GRAMMAR_EOS_OUT_OF_VOCAB, "the model has no end-of-sequence token, which a grammar ends with"
            )
        return GrammarMatching(self.grammars.compiler)

    def take_grammars(self) -> None:
        """Lets requests go on whose grammars have been compiled since, and ends those whose have not."""
        for key, result in self.grammars.take() if self.grammars is not None else ():
            request = self.open.get(key)
            if request is None or request.grammar is None or request.grammar.ready:
                continue
            error = result if isinstance(result, BatonError) else request.grammar.begin(result, request.outputs)
            if error is not None:
                self._fail(request, error)

    def take_fetches(self) -> None:
        """Lets requests go on for whose beginnings the tiers have done what they can."""
        if self.fetches is not None:
            self.fetches.deliver()
            self.fetches.tick()

    def flush_cache(self) -> None:
        """Forgets every block of a prefix that no request needs, in the pool and in the tiers of this server."""
        if self.fetches is not None:
            self.fetches.flush()
        self.kv.flush()

    def abort(self, abort: AbortRequest) -> None:
        """Ends a request in whatever state it is, within this step."""
        message = "request cancelled by client" if abort.code == ErrorCode.CANCELLED else ""
        error = BatonError.from_number(abort.code, message, metadata={"source": abort.source})
        request = self.open.get(abort.request_key)
        if request is not None:
            self._fail(request, error)
        elif abort.request_key in self.holds.staged:
            self.transfer.fail(abort.request_key, for_readers(error))
        elif abort.request_key not in self.holds.leaving:
            if abort.source == "error":  # the front refused it: a load that is parked for it ends with the refusal
                self.transfer.fail(abort.request_key, error)
            else:
                self.transfer.tombstone(abort.request_key)

    def end_all(self, error: BatonError) -> None:
        """Ends every open request, and every lease."""
        for request in list(self.open.values()):
            self._fail(request, BatonError(error.code, error.message))
        for key in self.holds.staged:
            self.transfer.fail(key, error)

    # -- the clock ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ends what has waited too long."""
        for request, error in self.deadlines.take_passed():
            self._fail(request, error)

    def next_tick_in(self) -> float:
        """Seconds until `tick` or another attempt to reserve has something to do; infinity if nothing has."""
        due = self.deadlines.next_due_s()
        if self.fetches is not None:
            due = min(due, self.fetches.next_due_s())
        for request in self.batcher.reserving:
            due = min(due, request.retry_at_s)
        return max(0.0, due - self.time.now)

    # -- steps ----------------------------------------------------------------------------------------------

    def form(self) -> StepPlan:
        """The next step; without rows when there is nothing to compute."""
        return self.batcher.form()

    def book(self, plan: StepPlan, result: StepResult) -> None:
        """The step has been executed: its KV is complete, its tokens are final. A row that failed ends its request."""
        ended = self.time.now
        self._book_graph(plan, result)
        for request, row, outcome in zip(plan.requests, plan.rows, result.rows, strict=True):
            if outcome.failure is not None:
                # Before anything of it is booked: what was computed must not enter the prefix cache.
                self._fail(request, outcome.failure)
                continue
            request.computed = row.start + len(row.token_ids)
            if outcome.prompt_logprobs:
                request.prompt_logprobs = (request.prompt_logprobs or []) + outcome.prompt_logprobs
            if request.computed // self._smallest_block > row.start // self._smallest_block:
                assert request.allocation is not None
                new = self.kv.commit(request.allocation, request.tokens, request.computed)
                if self.fetches is not None and request.compute_here:
                    self.fetches.committed(request, new, row.start)
            if not row.sample:
                continue
            if outcome.token_id is None:
                raise AssertionError(f"the runner sampled no token for {request.key}")
            request.prefilling = False
            if not request.generating and not self.batcher.reaches(request, "sample"):
                continue
            if request.grammar is not None:
                rejected = request.grammar.commit(outcome.token_id)
                if rejected is not None:  # before anybody sees the token
                    self._fail(request, rejected)
                    continue
            if request.generating:
                self._append(request, outcome.token_id, outcome.logprob, outcome.top_logprobs)
                continue
            self.time.now = max(0.0, ended - result.sample_seconds)
            request.clock.next_stage()  # sample
            self.time.now = ended
            request.clock.finish_stage()
            self._first_token(request, outcome.token_id, outcome.logprob, outcome.top_logprobs)

    def _book_graph(self, plan: StepPlan, result: StepResult) -> None:
        """Tells every prompt of the step how it was computed. The first step of a prompt decides for good: what
        becomes of a later chunk, or of a prompt that is computed again, is an event alone."""
        status = result.prefill_status.value
        tell = result.prefill_status is not PrefillGraphStatus.NOT_REQUESTED
        for request, row in zip(plan.requests[plan.num_decode :], plan.rows[plan.num_decode :], strict=True):
            assert request.allocation is not None
            if tell and row.start == request.allocation.cached_tokens:
                request.event(f"prefill_cuda_graph:{status}")
            if request.graph_status.decide(status):
                self.news.count("baton_prefill_cuda_graph_requests_total", status=status)
        if result.replay is not None:
            bucket, tokens = result.replay.bucket, result.replay.tokens
            self.news.count("baton_prefill_cuda_graph_replays_total", bucket=str(bucket))
            self.news.count("baton_prefill_cuda_graph_tokens_total", tokens, kind="real")
            if bucket > tokens:
                self.news.count("baton_prefill_cuda_graph_tokens_total", bucket - tokens, kind="padding")

    def fail_step(self, plan: StepPlan, error: BatonError) -> None:
        """The step could not be executed: every request of it ends."""
        for request in plan.requests:
            self._fail(request, BatonError(error.code, error.message, metadata=error.metadata))

    def _first_token(
        self,
        request: Request,
        token_id: int,
        logprob: TokenLogprob | None,
        top_logprobs: tuple[TokenLogprob, ...],
    ) -> None:
        """The prompt was computed here: the first token, with what goes with it."""
        request.event("computed")
        assert request.allocation is not None
        prefill = request.mode is RunMode.PREFILL
        info = PrefillInfo(
            cached_tokens=min(request.allocation.cached_tokens, len(request.prompt)),
            cuda_graph_status=request.graph_status.value,
            kv_generation=request.allocation.generation if prefill else 0,
        )
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is None and request.wants_prompt_logprobs:
            prompt_logprobs = []  # a prompt of one token has none
        index = len(request.outputs)
        request.generating = True
        output = self.news.output(request.key)
        output.prefill = info
        output.prompt_logprobs = prompt_logprobs
        if not prefill:
            request.begin_generate()
            self._append(request, token_id, logprob, top_logprobs)
            return
        request.outputs.append(token_id)
        request.tokens.append(token_id)
        output.tokens.append(TokenOutput(index, token_id, logprob, top_logprobs))
        reason = self._finish_of(request)
        answer = Answer(index, token_id, logprob, top_logprobs, info, prompt_logprobs, reason)
        answer.stop_token_id = token_id if reason is FinishReason.STOP else None
        self.transfer.computed(request, answer)
        self.batcher.running.remove(request)
        if request.lease_over:
            self.holds.free(request)
            self.news.staged_end(StagedEnd(request.key, "aborted"))
        else:
            self.holds.stage(request)
        state = RequestState.ENDED if request.lease_over else RequestState.STAGED
        self._close(request, state, reason, answer.stop_token_id)

    def _append(
        self,
        request: Request,
        token_id: int,
        logprob: TokenLogprob | None,
        top_logprobs: tuple[TokenLogprob, ...],
    ) -> None:
        """One more token of a request that decodes here; ends it when it is the last."""
        output = self.news.output(request.key)
        output.tokens.append(TokenOutput(len(request.outputs), token_id, logprob, top_logprobs))
        request.outputs.append(token_id)
        request.tokens.append(token_id)
        reason = self._finish_of(request)
        if reason is not None:
            self._finish(request, reason, token_id if reason is FinishReason.STOP else None)

    def _finish_of(self, request: Request) -> FinishReason | None:
        limits = self.limits
        return finish_of(
            request.params,
            request.tokens[-1],
            len(request.outputs),
            len(request.tokens),
            limits.eos_token_ids,
            limits.max_model_len,
        )

    # -- from the cache store -------------------------------------------------------------------------------

    def load_done(self, key: str, answer: Answer | BatonError, events: Sequence[tuple[str, int]]) -> None:
        """The KV is complete and verified. An error in place of the answer: the peer's result is unusable."""
        if key in self.holds.leaving:
            self.holds.leave(key)
            return
        request = self.holds.loading.get(key)
        if request is None:
            self._stale("unknown")
            return
        request.events += [TimelineEvent(name, at_ns) for name, at_ns in events]
        if isinstance(answer, BatonError):
            self._load_failed(request, answer, retriable_here=False)
            return
        del self.holds.loading[key]
        allocation = request.allocation
        assert allocation is not None
        self.kv.received(allocation)
        request.computed = len(request.tokens)
        self.kv.commit(allocation, request.tokens, request.computed)
        request.clock.next_stage()  # wait_to_run
        request.generating = True
        request.graph_status.decide(answer.info.cuda_graph_status)  # the prefill server's, which stays
        request.state = RequestState.READY
        self.batcher.ready.add(request)
        if request.grammar is not None and request.grammar.ready:
            rejected = request.grammar.commit(answer.token_id)
            if rejected is not None:
                self._fail(request, rejected)
                return
        self.deadlines.limit_wait(request)
        output = self.news.output(key)
        output.loaded = True
        output.prefill = answer.info
        output.prompt_logprobs = answer.prompt_logprobs
        output.tokens.append(TokenOutput(answer.index, answer.token_id, answer.logprob, answer.top_logprobs))
        request.outputs.append(answer.token_id)
        request.tokens.append(answer.token_id)
        if not self.batcher.reaches(request, "wait_to_run"):
            return
        reason = answer.finish_reason or self._finish_of(request)
        if reason is not None:
            stop = answer.stop_token_id if answer.stop_token_id is not None else answer.token_id
            self._finish(request, reason, stop if reason is FinishReason.STOP else None)

    def load_failed(self, key: str, error: BatonError, retriable_here: bool, events: Sequence[tuple[str, int]]) -> None:
        """The load is over, and nothing writes its blocks any more."""
        if key in self.holds.leaving:
            if retriable_here:
                self.transfer.cancel_load(key, error)
            self.holds.leave(key)
            return
        request = self.holds.loading.get(key)
        if request is None:
            self._stale("unknown")
            return
        request.events += [TimelineEvent(name, at_ns) for name, at_ns in events]
        self._load_failed(request, error, retriable_here)

    def _stale(self, kind: str) -> None:
        """A completion of blocks that are not held for it any more: dropped, and counted."""
        self.news.count("baton_kv_stale_references_total", kind=kind)

    def _load_failed(self, request: Request, error: BatonError, retriable_here: bool) -> None:
        """A load is over for a request that still wants its KV. Its blocks are quiet."""
        action = after_failed_load(
            self.limits.load_failure_policy,
            error,
            loads=request.loads,
            retriable_here=retriable_here,
            may_recompute=self.limits.allow_local_prefill,
        )
        del self.holds.loading[request.key]
        self.holds.free(request)
        # What was just freed suffices for the same request again.
        if action is AfterFailure.RELOAD and self.batcher.acquire_for_load(request):
            request.clock.restore_stage("load")
            self.news.count("baton_stage_retries_total", stage="load")
            self._load(request, reload=True)
            return
        if retriable_here:
            self.transfer.cancel_load(request.key, error)
        if action is AfterFailure.FAIL:
            request.error = error if self.deadlines.ended_load(request, error) else load_failed(error)
            self._close(request, RequestState.ENDED, None, None)
            return
        request.begin_compute()
        self._queue(request)

    def lease_ended(
        self,
        key: str,
        generation: int,
        outcome: str,
        cause: str,
        error: BatonError | None,
        publish_seconds: float,
        held_seconds: float,
        events: Sequence[tuple[str, int]],
        load_times: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        """Nothing reads the blocks of that allocation any more."""
        request = self.holds.staged.get(key) or self.holds.leaving.get(key) or self.open.get(key)
        if request is None or request.allocation is None or request.allocation.generation != generation:
            self._stale("unknown" if request is None else "reused")
            return
        if key in self.holds.staged:
            del self.holds.staged[key]
            self.holds.free(request)
            request.state = RequestState.ENDED
            timeline = [TimelineEvent(name, at_ns) for name, at_ns in events]
            loads = [LoadTime(*load) for load in load_times]
            self.news.staged_end(StagedEnd(key, outcome, cause, publish_seconds, held_seconds, timeline, loads))
        elif key in self.holds.leaving:
            self.holds.leave(key)
        else:
            # The decode server gave up before the prompt was computed. Its first token is still of use, its KV is
            # not.
            request.lease_over = True
            if error is not None and error.code is ErrorCode.REQUEST_TOMBSTONED:
                self._fail(request, error)

    # -- states ---------------------------------------------------------------------------------------------

    def _queue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        request.since_s = self.time.now
        self.deadlines.limit_wait(request)
        self.batcher.waiting.add(request)
        if self.fetches is not None:
            self.fetches.begin(request)

    def _admitted(self, request: Request) -> None:
        """It got its blocks and computes from this step on."""
        if request.preemptions == 0:
            request.event("admitted")
        if self.fetches is not None:
            self.fetches.admitted(request)
        if request.mode is RunMode.PREFILL:
            self.transfer.admit(request)

    def _reserved(self, request: Request) -> None:
        """It got its blocks: the load may begin."""
        allocation = request.allocation
        assert allocation is not None
        self.batcher.note_lookup(request)
        skipped = sum(held.receiving[0] for held in allocation.groups.values())
        self.news.count("baton_kv_blocks_skipped_total", skipped, model_name=self.limits.model_name)
        self._note_retries(request)
        output = self.news.output(request.key)
        output.reserved = True
        output.blocks_in_cache = skipped
        self._load(request, reload=False)

    def _load(self, request: Request, reload: bool) -> None:
        request.clock.next_stage()
        request.state = RequestState.LOADING
        request.loads += 1
        self.holds.load(request)
        deadline_s = request.deadline_s - self.time.now if request.deadline_s else None
        self.transfer.load(request, deadline_s, reload)

    def _note_retries(self, request: Request) -> None:
        for stage, retries in request.clock.retries().items():
            self.news.count("baton_stage_retries_total", retries, stage=stage)
            self.news.sample("baton_stage_retry_wait_seconds", request.clock.retry_waits()[stage], stage=stage)

    def _finish(self, request: Request, reason: FinishReason, stop_token_id: int | None) -> None:
        """The generation is done; the request has a seat or waits for one."""
        if request.stage == "generate" and not self.batcher.reaches(request, "release"):
            return
        if request.state is RequestState.RUNNING:
            self.batcher.running.remove(request)
        else:
            self.batcher.ready.remove(request)
        if not request.clock.finished and request.stage == "generate":
            request.clock.next_stage()  # release
        self.holds.free(request)
        self._close(request, RequestState.ENDED, reason, stop_token_id)

    def _fail(self, request: Request, error: BatonError) -> None:
        """Ends a request that is open, from any state. Its first error stays."""
        if request.error is not None:
            return
        request.error = error
        error.stage = error.stage or request.stage
        key, state = request.key, request.state
        after = RequestState.ENDED
        if state is RequestState.WAITING:
            if request.compute_here:
                self.batcher.waiting.remove(request)
                if self.fetches is not None:
                    self.fetches.abandon(request)
                if request.mode is RunMode.PREFILL:
                    self.transfer.fail(key, for_readers(error))
            else:
                self.batcher.reserving.remove(request)
                self._note_retries(request)
                # For want of blocks here another decode server may load the KV; after an abort nobody wants it.
                if error.code is ErrorCode.MALLOC_FAILED:
                    self.transfer.forget(key)
                else:
                    self.transfer.cancel_load(key, error)
        elif state is RequestState.LOADING:
            self.transfer.cancel_load(key, error)
            self.holds.quarantine(request)
            after = RequestState.LEAVING
        elif state is RequestState.READY:
            self.batcher.ready.remove(request)
            self.holds.free(request)
        elif state is RequestState.RUNNING:
            self.batcher.running.remove(request)
            if request.mode is RunMode.PREFILL and not request.lease_over:
                self.transfer.fail(key, for_readers(error))
                self.holds.stage(request, ended=True)
                after = RequestState.LEAVING
            else:
                self.holds.free(request)
        self._close(request, after, None, None)

    def _close(
        self, request: Request, state: RequestState, reason: FinishReason | None, stop_token_id: int | None
    ) -> None:
        """The last output. Blocks that a transfer may still touch stay with the request."""
        request.state = state
        del self.open[request.key]
        output = self.news.output(request.key)
        output.last = True
        if request.error is not None:
            output.error = engine_error(request.error)
        else:
            output.finish_reason, output.stop_token_id = reason, stop_token_id
        output.preemptions = request.preemptions
        output.stages = request.seconds()
        if request.add.traceparent:
            output.stage_times = request.stage_times()
        output.events = request.events

    def _refuse(self, key: str, error: BatonError) -> None:
        output = self.news.output(key)
        output.last = True
        output.error = engine_error(error)

    # -- for the statistics -----------------------------------------------------------------------------------

    def oldest_hold_seconds(self) -> Mapping[str, float]:
        """Age of the oldest hold per state in which blocks wait for a peer; absent when there is none."""
        ages, now = self.holds.oldest_seconds(), self.time.now
        for name, since_s in self.fetches.holds() if self.fetches is not None else ():
            ages[name] = max(ages.get(name, 0.0), now - since_s)
        return ages
