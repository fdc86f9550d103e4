"""The device's sampler in Triton's interpreter: the host sampler's answers, and its own contract."""

from __future__ import annotations

import math
import random
import threading

import msgspec
import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling import SamplingRow, sample
from engine.sampling.biases import BiasEntries
from engine.sampling.device import DeviceSampler
from engine.sampling.penalties import PenaltySlots
from engine.sampling.processors import apply_processors
from kernels import jit
from kernels.sampling import scratch_for
from rpc.errors import ErrorCode
from tests.extent import extent
from tests.unit.engine.sampling_rows import FixedMask, assert_same, random_logits, random_row

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # rows with NaN, on purpose
]


def new_sampler(vocab: int, candidates: int = 16, max_rows: int = 8) -> DeviceSampler:
    scratch = scratch_for(max_rows, vocab, CPU, blocks=(64, 64), candidates=candidates)
    return DeviceSampler(max_rows, vocab, CPU, scratch=scratch)


def row_of(index: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=100, **params), index, [1, 2], [], [0])


def step(sampler: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]):
    """One step as the runner makes it."""
    if sampler.stage(rows):
        sampler.greedy(logits)
    else:
        sampler.run(logits)
    return sampler.collect(sampler.send(len(rows)))


@pytest.mark.parametrize("on_device", [False, True])
def test_logprobs_when_summed_over_steps_are_a_gather_of_each_row_alone(on_device: bool) -> None:
    """The log-probability of an answer, [rows]: also with top_k 1, which takes the likeliest token without a draw."""
    vocab, steps = 130, 4
    generator = torch.Generator().manual_seed(8)
    kinds = [{"top_k": 1}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.0}]
    rows = [row_of(logprobs=0, **kind) for kind in kinds]
    sampler = new_sampler(vocab)
    found, expected = np.zeros(3), np.zeros(3)
    for number in range(steps):
        logits = torch.randn(3, vocab, generator=generator) * 3
        for row in rows:
            row.token_index = number
        sampled = step(sampler, logits.clone(), rows) if on_device else sample(logits, rows)
        assert [token.token_id for token in sampled[::2]] == logits[::2].argmax(dim=1).tolist()
        chosen = torch.tensor([[token.token_id] for token in sampled])
        expected += torch.log_softmax(logits.double(), dim=1).gather(1, chosen)[:, 0].numpy()
        found += [token.logprob.logprob for token in sampled]
    assert found.shape == (3,)
    assert found == pytest.approx(expected, abs=1e-5)


def compare_random_steps(seed: int, steps: int, dtype: torch.dtype = torch.float32) -> None:
    choice = random.Random(seed)
    for _ in range(steps):
        vocab = choice.choice([3, 60, 130])
        sampler = new_sampler(vocab, choice.choice([4, 16]))
        rows = [random_row(choice, vocab, choice.choice([5, vocab + 3])) for _ in range(6)]
        logits = random_logits(choice, 6, vocab).to(dtype)
        before = logits.clone()
        assert_same(step(sampler, logits, rows), sample(before, rows), rows)
        assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_fail_also_where_a_mask_covers_it_and_rows_without_a_grammar_are_left_alone(
    bad: float,
) -> None:
    vocab = 70
    allowed = np.zeros(vocab, dtype=bool)
    allowed[[7, 8]] = True
    rows = [row_of(temperature=0.0), row_of(temperature=0.9, logprobs=2), row_of(temperature=0.0), row_of(seed=3)]
    rows.append(row_of(temperature=0.0, min_tokens=5, stop_token_ids=(50,)))
    for row in rows[:3]:
        row.grammar = FixedMask(allowed)  # type: ignore[assignment]
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(3))
    logits[[0, 1, 4], 50] = bad
    codes = [ErrorCode.EXECUTION_EXCEPTION, ErrorCode.EXECUTION_EXCEPTION, None, None, ErrorCode.EXECUTION_EXCEPTION]
    found = step(new_sampler(vocab), logits.clone(), rows)
    for results in (found, sample(logits, rows)):
        assert [result.failure and result.failure.code for result in results] == codes
        assert results[2].token_id in (7, 8)
    alone = step(new_sampler(vocab), logits[3:4].clone(), rows[3:4])
    assert_same(found, sample(logits, rows), rows)
    assert alone[0].token_id == found[3].token_id


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_random_rows_get_the_answers_of_the_host_sampler(seed: int) -> None:
    compare_random_steps(seed, 1)


def test_random_rows_of_narrow_logits_get_the_answers_of_the_host_sampler() -> None:
    compare_random_steps(21, 1, torch.bfloat16)


def test_many_random_rows_get_the_answers_of_the_host_sampler() -> None:
    compare_random_steps(31, extent(4, 40))


def test_a_row_gets_the_same_token_alone_and_in_a_batch() -> None:
    choice = random.Random(5)
    vocab = 130
    rows = [random_row(choice, vocab) for _ in range(4)]
    logits = random_logits(choice, 4, vocab)
    together = step(new_sampler(vocab), logits, rows)
    for i in (1, 3):
        assert_same(step(new_sampler(vocab), logits[i : i + 1], [rows[i]]), [together[i]], [rows[i]])


def test_entries_of_random_rows_bias_and_mask_as_the_host_does() -> None:
    choice, vocab = random.Random(8), 200
    builder = BiasEntries(vocab, remembered=20)
    for _ in range(30):
        rows = [random_row(choice, vocab) for _ in range(8)]
        for row in rows:
            row.params = msgspec.structs.replace(
                row.params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
            )
            row.grammar = None
        logits = random_logits(choice, 8, vocab).nan_to_num(0.0).numpy()
        entries = builder.of([(i, row) for i, row in enumerate(rows) if row.changes_logits])
        places = (entries[:, 0] >> 32) * vocab + (entries[:, 0] & 0xFFFFFFFF)
        assert len(np.unique(places)) == len(entries)
        biases = entries[:, 1].astype(np.uint32).view(np.float32)
        wanted = logits.copy()
        apply_processors(wanted, rows)
        flat = logits.reshape(-1)
        flat[places] = np.where(np.isneginf(biases), biases, flat[places] + biases)
        assert np.array_equal(logits, wanted)


def followed(slots: PenaltySlots, rows: list[SamplingRow], memory: dict[int, tuple[int, int]]) -> list[dict[int, int]]:
    """What the table says of each row, token to count, after its updates were written to `memory`."""
    capacity = slots.table.capacity
    places, updates = slots.follow(rows)
    if slots.table.capacity != capacity:
        memory.clear()
    memory |= {place: (value >> 32, value & 0xFFFFFFFF) for place, value in updates.tolist()}
    assert len({slot for slot, _ in places}) == len({id(row) for row in rows})
    capacity = slots.table.capacity
    return [dict(memory[slot * capacity + i] for i in range(count)) for slot, count in places]


def seen_by(row: SamplingRow, vocab: int) -> dict[int, int]:
    """token: how often generated, counted anew."""
    seen = {}
    if row.params.repetition_penalty != 1.0:
        seen = {token: 0 for token in row.prompt_token_ids if 0 <= token < vocab}
    for token in row.output_token_ids:
        if 0 <= token < vocab:
            seen[token] = seen.get(token, 0) + 1
    return seen


def test_penalty_slots_follow_requests_that_come_go_grow_and_shrink() -> None:
    choice, vocab = random.Random(4), 30
    slots, memory = PenaltySlots(4, vocab, CPU), {}
    requests: list[SamplingRow] = []
    for _ in range(200):
        while len(requests) < 6 or choice.random() < 0.1:
            params = SamplingParams(max_tokens=9, repetition_penalty=choice.choice([1.0, 2.0]), presence_penalty=1.0)
            requests.append(SamplingRow(params, 0, [choice.randrange(-1, vocab + 1) for _ in range(9)], [], []))
        if len(requests) > 8:
            requests.pop(choice.randrange(len(requests)))
        batch = choice.sample(requests, choice.randint(1, 4))
        for row in batch:
            row.output_token_ids.extend(choice.randrange(-1, vocab + 1) for _ in range(choice.randrange(3)))
            if choice.random() < 0.05:
                del row.output_token_ids[-2:]
        assert followed(slots, batch, memory) == [seen_by(row, vocab) for row in batch]


def test_penalty_slots_when_a_request_sees_more_tokens_than_fit_get_more_memory() -> None:
    slots, memory = PenaltySlots(2, 5000, CPU), {}
    params = SamplingParams(max_tokens=9, repetition_penalty=2.0)
    short = SamplingRow(params, 0, [7], [], [])
    long = SamplingRow(params, 0, list(range(1000)), [], [])
    assert followed(slots, [short, long], memory) == [seen_by(short, 5000), seen_by(long, 5000)]
    long.output_token_ids.extend(range(900, 1500))
    assert followed(slots, [long], memory) == [seen_by(long, 5000)]
    assert slots.table.capacity == 2048
    assert followed(slots, [short], memory) == [seen_by(short, 5000)]


def test_a_step_of_a_running_request_sends_one_update() -> None:
    slots = PenaltySlots(2, 5000, CPU)
    row = SamplingRow(SamplingParams(max_tokens=9, repetition_penalty=2.0), 0, list(range(1000)), [], [])
    assert len(slots.follow([row])[1]) == 1000
    row.output_token_ids.append(3)
    assert slots.follow([row])[1].tolist() == [[slots.follow([row])[0][0][0] * 1024 + 3, 3 << 32 | 1]]


def test_a_row_that_a_batch_has_twice_takes_one_slot() -> None:
    slots, memory = PenaltySlots(4, 30, CPU), {}
    params = SamplingParams(max_tokens=9, repetition_penalty=2.0)
    twice = SamplingRow(params, 0, [1, 2], [], [])
    assert followed(slots, [twice] * 3, memory) == [seen_by(twice, 30)] * 3
    rows = [SamplingRow(params, 0, [10 + i], [], []) for i in range(4)]  # as many as there are slots
    assert followed(slots, rows, memory) == [seen_by(row, 30) for row in rows]
    places, updates = slots.follow(rows)
    assert len({slot for slot, _ in places}) == 4
    assert len(updates) == 0  # nobody lost a slot to a neighbour


def test_penalised_rows_over_several_steps_get_the_answers_of_the_host_sampler() -> None:
    vocab = 60
    sampler = new_sampler(vocab)
    params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=2)
    rows = [SamplingRow(params, 0, [i, 5, i], [], [0]) for i in range(2)]
    logits = random_logits(random.Random(3), 2, vocab).nan_to_num(0.0)
    for _ in range(4):
        wanted = sample(logits, rows)
        assert_same(step(sampler, logits, rows), wanted, rows)
        for row, token in zip(rows, wanted, strict=True):
            row.output_token_ids.append(token.token_id)
            row.token_index += 1
    assert len(set(rows[0].output_token_ids)) > 1


def test_rows_that_outgrow_the_first_entries_get_more_room() -> None:
    vocab = 70
    sampler = new_sampler(vocab)
    sampler._make_room(4)
    rows = [row_of(logit_bias=dict.fromkeys(range(30, 40), 100.0)), row_of(), row_of(repetition_penalty=2.0)]
    logits = random_logits(random.Random(1), 3, vocab).nan_to_num(0.0, 0.0, 0.0)
    assert_same(step(sampler, logits, rows), sample(logits, rows), rows)
    assert sampler._room >= 20


# -- contract ----------------------------------------------------------------------------------------------------


def test_stage_when_rows_only_want_the_likeliest_token_is_plain() -> None:
    sampler = new_sampler(10)
    plain = row_of(temperature=0.0)
    waiting = row_of(temperature=0.0, min_tokens=3)
    done_waiting = row_of(3, temperature=0.0, min_tokens=3)
    assert sampler.stage([]) is True
    assert sampler.stage([plain, done_waiting]) is True
    for other in (waiting, row_of(), row_of(temperature=0.0, logprobs=0), row_of(temperature=0.0, logit_bias={1: 2.0})):
        assert sampler.stage([plain, other]) is False


def test_a_row_turns_plain_when_its_tokens_are_enough() -> None:
    logits = torch.tensor([[9.0, 1.0, 5.0]])
    sampler = new_sampler(3)
    row = row_of(temperature=0.0, min_tokens=1)  # token 0 ends the sequence
    assert [t.token_id for t in step(sampler, logits, [row])] == [2]
    row.token_index = 1
    assert [t.token_id for t in step(sampler, logits, [row])] == [0]


def test_run_after_greedy_gives_the_same_as_run_alone() -> None:
    vocab = 70
    rows = [row_of(i, seed=i, top_k=5, logprobs=2) for i in range(2)]
    logits = random_logits(random.Random(2), 2, vocab).nan_to_num(0.0)
    sampler = new_sampler(vocab)
    sampler.greedy(logits)
    sampler.stage(rows)
    sampler.run(logits, after_greedy=True)
    assert_same(sampler.collect(sampler.send(2)), sample(logits, rows), rows)


def test_failures_name_what_the_host_sampler_names() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    rows = [row_of(temperature=0.0, min_tokens=5, stop_token_ids=(1, 2, 3)), row_of(), row_of(temperature=0.0)]
    results = step(new_sampler(4), logits, rows)
    assert [r.failure and r.failure.code for r in results] == [
        ErrorCode.INVALID_PARAMS,
        ErrorCode.EXECUTION_EXCEPTION,
        None,
    ]
    assert_same(results, sample(logits, rows), rows)


def test_results_of_two_steps_may_be_on_their_way_and_older_ones_are_refused() -> None:
    sampler = new_sampler(5)
    rows = [row_of(temperature=0.0)]
    pending = []
    for token in (3, 1, 4):
        sampler.stage(rows)
        sampler.greedy(torch.nn.functional.one_hot(torch.tensor([token]), 5).float())
        pending.append(sampler.send(1))
    assert [t.token_id for t in sampler.collect(pending[1])] == [1]
    assert [t.token_id for t in sampler.collect()] == [4]
    with pytest.raises(RuntimeError, match="overwritten"):
        sampler.collect(pending[0])


def test_misuse_is_refused_by_name() -> None:
    sampler = new_sampler(5, max_rows=2)
    with pytest.raises(ValueError, match="max_rows"):
        sampler.stage([row_of()] * 3)
    with pytest.raises(RuntimeError, match="before any send"):
        sampler.collect()
    sampler.stage([row_of()])
    with pytest.raises(ValueError, match="1 rows were staged"):
        sampler.run(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="1 were staged"):
        sampler.send(2)


def test_staging_on_another_thread_is_refused_and_collecting_is_not() -> None:
    sampler = new_sampler(5)
    rows = [row_of(temperature=0.0)]
    step(sampler, torch.zeros(1, 5), rows)
    seen: list[object] = []

    def elsewhere() -> None:
        seen.append(sampler.collect())
        try:
            sampler.stage(rows)
        except RuntimeError as error:
            seen.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(timeout=30)
    assert len(seen) == 2
    assert "belongs to the thread" in str(seen[1])


def test_warm_up_leaves_a_sampler_that_answers_right() -> None:
    sampler = new_sampler(4, max_rows=2)
    sampler.warm_up()
    logits = torch.arange(8.0).reshape(2, 4)
    rows = [row_of(temperature=0.0), row_of(top_k=1)]
    assert [t.token_id for t in step(sampler, logits, rows)] == [3, 3]


def test_warm_up_leaves_a_penalty_slot_for_every_row() -> None:
    sampler = new_sampler(4, max_rows=2)
    sampler.warm_up()
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=4.0)
    rows = [SamplingRow(params, 0, [3, 2], [], [0]), SamplingRow(params, 0, [3], [], [0])]
    assert [t.token_id for t in step(sampler, logits, rows)] == [1, 2]
