"""Invariants 12, 25 and 29 of docs/cuda_graphs.md: a request's status is counted once, sticks, and is one word
everywhere."""

from __future__ import annotations

import threading

import pytest

from engine.messages import PrefillInfo, RequestOutput, RunMode, TokenOutput
from engine.requests import Answer
from engine.runner.batch import PrefillReplay, StepResult
from engine.transfer import from_wire, to_wire
from front.request import Request as FrontRequest
from front.wire import prefill_result
from protos import common_pb2
from rpc.graph_status import INIT_STATUSES, REQUEST_STATUSES, PrefillGraphStatus, StickyStatus, status_from_wire
from rpc.metric_families import FAMILIES
from rpc.stages import DECODE_STAGES
from tests.unit.engine.scripted_engine import ScriptedEngine

REPLAYED, PREFIX, EXCEEDED = (
    PrefillGraphStatus.REPLAYED,
    PrefillGraphStatus.PREFIX_NOT_SUPPORTED,
    PrefillGraphStatus.INPUT_TOKENS_EXCEED_CAPTURE_LIMIT,
)


class GraphEngine(ScriptedEngine):
    """Every step's prompts have the status `status`."""

    status = REPLAYED

    def execute(self, plan) -> StepResult:
        result = super().execute(plan)
        result.prefill_status = self.status
        if self.status is REPLAYED and plan.num_decode < len(plan.rows):
            result.replay = PrefillReplay(16, plan.num_tokens)
        return result

    def status_of(self, key: str) -> str:
        [info] = [output.prefill for output in self.outputs[key] if output.prefill is not None]
        return info.cuda_graph_status


# -- sticky -----------------------------------------------------------------------------------------------------


def test_status_when_decided_then_it_stays():
    status = StickyStatus()
    assert status.value == ""
    assert status.decide(REPLAYED)
    assert not status.decide("not_requested")
    assert not status.decide(PREFIX)
    assert status.value == "replayed"
    with pytest.raises(ValueError, match="empty"):
        StickyStatus().decide("")


def test_request_when_it_decodes_after_a_replay_then_its_status_stays_and_counts_once():
    engine = GraphEngine()
    engine.add("a", [5, 6, 7], max_tokens=5)
    engine.step()
    engine.status = PrefillGraphStatus.NOT_REQUESTED
    engine.run()
    assert engine.status_of("a") == "replayed"
    assert engine.counts["prefill_cuda_graph_requests_total"] == 1
    assert engine.counts["prefill_cuda_graph_requests_total:replayed"] == 1


def test_request_when_its_prompt_comes_in_chunks_then_the_first_one_decides():
    engine = GraphEngine()
    engine.status = EXCEEDED
    engine.add("a", list(range(1, 25)), max_tokens=2)  # the steps hold 16 tokens
    engine.step()
    engine.status = PREFIX  # the second chunk has a prefix
    engine.run()
    assert engine.status_of("a") == EXCEEDED
    assert engine.counts["prefill_cuda_graph_requests_total"] == 1


def test_request_when_preempted_and_computed_again_then_the_second_status_is_an_event_alone():
    engine = GraphEngine(num_blocks=8, block_size=4, prefix_caching=False)
    for key in "ab":
        engine.add(key, list(range(1, 9)), max_tokens=20)
    engine.step()
    engine.status = PREFIX
    engine.run()
    last = engine.last("b")
    assert last.preemptions >= 1
    assert (engine.status_of("a"), engine.status_of("b")) == ("replayed", "replayed")
    named = [event.name for event in last.events if event.name.startswith("prefill_cuda_graph:")]
    assert named[0] == "prefill_cuda_graph:replayed"
    assert set(named[1:]) == {f"prefill_cuda_graph:{PREFIX}"}
    assert engine.counts["prefill_cuda_graph_requests_total"] == 2


def test_request_when_its_step_fails_then_no_status_is_counted():
    from rpc.errors import BatonError, ErrorCode

    engine = GraphEngine()
    engine.fail_next = BatonError(ErrorCode.EXECUTION_EXCEPTION, "no")
    engine.add("a", [5, 6, 7])
    engine.step()
    assert engine.error("a") is ErrorCode.EXECUTION_EXCEPTION
    assert "prefill_cuda_graph_requests_total" not in engine.counts


def test_batch_when_replayed_then_every_request_counts_and_the_replay_once():
    engine = GraphEngine()
    engine.add("a", [5, 6, 7], max_tokens=1)
    engine.add("b", [5, 6, 7, 8], max_tokens=1)
    engine.step()
    counts = engine.counts
    assert counts["prefill_cuda_graph_requests_total:replayed"] == 2
    assert counts["prefill_cuda_graph_replays_total:16"] == 1
    assert counts["prefill_cuda_graph_tokens_total:real"] == 7
    assert counts["prefill_cuda_graph_tokens_total:padding"] == 9


def test_batch_when_it_fills_its_bucket_then_no_padding_is_counted():
    engine = GraphEngine()
    engine.add("a", range(5, 21), max_tokens=1)
    engine.step()
    assert engine.counts["prefill_cuda_graph_replays_total:16"] == 1
    assert engine.counts["prefill_cuda_graph_tokens_total:real"] == 16
    assert "prefill_cuda_graph_tokens_total:padding" not in engine.counts


def test_front_when_later_outputs_say_otherwise_then_the_first_status_stays():
    request = FrontRequest(RunMode.LOCAL, DECODE_STAGES)
    request.note(RequestOutput("k", tokens=[TokenOutput(0, 5)], prefill=PrefillInfo(cuda_graph_status="replayed")))
    request.note(RequestOutput("k", tokens=[TokenOutput(1, 5)]))
    request.note(RequestOutput("k", prefill=PrefillInfo()))
    assert request.page()["prefill_cuda_graph_status"] == "replayed"


# -- one word everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", REQUEST_STATUSES)
def test_word_when_it_travels_from_engine_to_client_then_it_is_the_enums(status):
    info = PrefillInfo(cached_tokens=3, cuda_graph_status=status.value)
    by_front = prefill_result(TokenOutput(0, 5), info, None, None, None)
    by_agent = to_wire(Answer(0, 5, info=info))
    for message in (by_front, by_agent):
        raw = common_pb2.PrefillResult.FromString(message.SerializeToString())
        assert raw.prefill_cuda_graph_status == status.value
        assert status_from_wire(raw.prefill_cuda_graph_status) == status.value
    answer = from_wire(by_agent, index=0, vocab_size=100, with_prompt_logprobs=False)
    assert answer.info.cuda_graph_status == status.value
    assert status.value.encode("ascii").replace(b"_", b"").isalpha()  # as a header it needs no escaping


def test_word_when_a_peer_sends_none_then_it_is_not_requested():
    message = to_wire(Answer(0, 5, info=PrefillInfo(cuda_graph_status="")))
    assert message.prefill_cuda_graph_status == ""
    answer = from_wire(message, index=0, vocab_size=100, with_prompt_logprobs=False)
    assert answer.info.cuda_graph_status == "not_requested"
    assert status_from_wire("") == "not_requested"
    assert status_from_wire("something_newer") == "something_newer"


def test_metrics_when_they_have_a_status_then_its_values_are_the_enums():
    assert FAMILIES["baton_prefill_cuda_graph_requests_total"].values["status"] == set(REQUEST_STATUSES)
    assert FAMILIES["baton_prefill_cuda_graph_init"].values["status"] == set(INIT_STATUSES)
    assert set(INIT_STATUSES) | set(REQUEST_STATUSES) == set(PrefillGraphStatus)


# -- 29: threads ------------------------------------------------------------------------------------------------


def test_status_when_threads_read_and_decide_then_only_one_change_is_ever_seen():
    rounds, names = 200, [status.value for status in REQUEST_STATUSES]
    for _ in range(rounds):
        status = StickyStatus()
        barrier = threading.Barrier(len(names) + 2)
        firsts: list[str] = []
        seen: list[list[str]] = [[], []]

        def decide(name: str, status=status, barrier=barrier, firsts=firsts) -> None:
            barrier.wait(60)
            if status.decide(name):
                firsts.append(name)

        def read(into: list[str], status=status, barrier=barrier) -> None:
            barrier.wait(60)
            into.extend(status.value for _ in range(50))

        threads = [threading.Thread(target=decide, args=(name,)) for name in names]
        threads += [threading.Thread(target=read, args=(into,)) for into in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(firsts) == 1
        assert status.value == firsts[0]
        for values in seen:
            changes = [value for value, before in zip(values, ["", *values], strict=False) if value != before]
            assert changes in ([], [firsts[0]])
