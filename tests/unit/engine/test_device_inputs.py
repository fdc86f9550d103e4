"""Device inputs beside plain arithmetic, over steps whose rows come, go, grow and change seats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import pytest
import torch

from engine.attention.backend import BatchLimits
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.device_inputs import DeviceInputs, DeviceStepInputs
from kernels import jit
from tests.unit.engine.test_runner import sampled

BLOCK = 4
WIDTH = 6
ROWS = 5

pytestmark = pytest.mark.skipif(not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)")


def new_inputs() -> DeviceInputs:
    inputs = DeviceInputs(BatchLimits(ROWS, 32, WIDTH), BLOCK, torch.device("cpu"))
    inputs.num_blocks = 100
    return inputs


def check(found: DeviceStepInputs, rows: Sequence[BatchRow], padded_rows: int, padded_tokens: int) -> None:
    """Everything that attention and the model read, row by row."""
    device = found.device_rows
    tokens = [token for row in rows for token in row.token_ids]
    positions = [row.start + i for row in rows for i in range(len(row.token_ids))]
    slots = [
        row.block_table[p // BLOCK] * BLOCK + p % BLOCK
        for row in rows
        for p in range(row.start, row.start + len(row.token_ids))
    ]
    pad = padded_tokens - len(tokens)
    assert found.token_ids.tolist() == tokens + [0] * pad
    assert found.positions.tolist() == positions + [0] * pad
    assert device.slots.tolist() == slots + [-1] * pad
    seen = [row.start + len(row.token_ids) for row in rows] + [0] * (padded_rows - len(rows))
    assert device.kv_lens.tolist() == seen
    assert device.cu_kv_seqlens.tolist() == [sum(seen[:i]) for i in range(padded_rows + 1)]
    lengths = [len(row.token_ids) for row in rows] + [0] * (padded_rows - len(rows))
    assert device.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(padded_rows + 1)]
    for index, row in enumerate(rows):
        used = -(-seen[index] // BLOCK)
        assert device.block_tables[index, :used].tolist() == row.block_table[:used]
    assert not device.block_tables[len(rows) :].any()
    assert device.max_kv >= max(seen)
    assert device.max_q >= max(lengths)


def test_decode_inputs_when_rows_change_seats_grow_and_leave_then_tables_follow() -> None:
    generator = random.Random(5)
    inputs = new_inputs()
    free = list(range(1, 100))
    generator.shuffle(free)
    requests: list[BatchRow] = []
    sent_words = []
    for step in range(60):
        if len(requests) < ROWS and generator.random() < 0.4:
            start = generator.randrange(9)
            row = sampled(f"r{step}", [7], start, [free.pop() for _ in range(start // BLOCK + 1)])
            requests.insert(generator.randrange(len(requests) + 1), row)
        if not requests:
            continue
        if generator.random() < 0.15:
            gone = requests.pop(generator.randrange(len(requests)))
            free = gone.block_table + free
            if not requests:
                continue
        if generator.random() < 0.1:
            generator.shuffle(requests)
        batch = StepBatch(list(requests))
        padded = generator.choice([len(batch.rows), ROWS])
        if generator.random() < 0.1:
            check(inputs.prefill(batch), batch.rows, len(batch.rows), len(batch.rows))
        else:
            check(inputs.decode(batch, padded), batch.rows, padded, padded)
        sent_words.append(int(inputs._on_device[1]))
        for row in list(requests):
            row.start += 1
            row.token_ids = [generator.randrange(50)]
            if row.start >= len(row.block_table) * BLOCK:
                if len(row.block_table) == WIDTH or not free:
                    requests.remove(row)
                else:
                    row.block_table.append(free.pop())
    assert len(sent_words) > 40
    assert min(sent_words) == 0  # steps that sent no table at all


def test_decode_inputs_when_a_request_returns_with_other_blocks_then_its_table_is_sent_again() -> None:
    inputs = new_inputs()
    row = sampled("r", [1], 5, [3, 4])
    check(inputs.decode(StepBatch([row])), [row], 1, 1)
    row.block_table = [8, 9]  # preempted, and computed again
    check(inputs.decode(StepBatch([row])), [row], 1, 1)
    row.block_table.extend([10, 11])  # by more than a step needs
    check(inputs.decode(StepBatch([row])), [row], 1, 1)
    row.start = 13
    check(inputs.decode(StepBatch([row])), [row], 1, 1)


def test_decode_inputs_when_a_row_sat_out_a_step_that_was_padded_then_its_table_is_sent_again() -> None:
    inputs = new_inputs()
    stays, pauses = sampled("a", [1], 5, [3, 4]), sampled("b", [2], 9, [5, 6, 7])
    for batch in ([stays, pauses], [stays], [stays, pauses]):
        check(inputs.decode(StepBatch(batch), 2), batch, 2, 2)


def test_prefill_inputs_when_rows_decode_and_prefill_then_sampled_tokens_are_named() -> None:
    inputs = new_inputs()
    rows = [
        sampled("a", [1], 6, [5, 6]),
        BatchRow("b", [2, 3, 4], 4, [7, 8], False),
        sampled("c", [5, 6], 0, [9]),
    ]
    found = inputs.prefill(StepBatch(rows))
    check(found, rows, 3, 6)
    assert found.sampled_rows == [0, 2]
    assert found.sampled_tokens is not None
    assert found.sampled_tokens.tolist() == [0, 5]
    assert found.first_token == [0, 1, 4]
    assert found.rows.num_decode == 1


def test_prefill_inputs_when_every_token_is_sampled_then_none_is_named() -> None:
    rows = [sampled("a", [1], 6, [5, 6]), sampled("b", [2], 0, [7])]
    found = new_inputs().prefill(StepBatch(rows))
    check(found, rows, 2, 2)
    assert found.sampled_tokens is None
    assert found.rows.num_decode == 2


def test_inputs_when_there_are_too_many_rows_then_are_refused() -> None:
    rows = [sampled(str(i), [1], 0, [1 + i]) for i in range(ROWS + 1)]
    for build in (new_inputs().decode, new_inputs().prefill):
        with pytest.raises(ValueError, match=f"at most {ROWS}"):
            build(StepBatch(rows))


def test_inputs_when_a_table_is_wider_than_the_buffers_then_are_refused_and_nothing_is_written() -> None:
    widest = list(range(1, WIDTH + 1))
    inputs = new_inputs()
    row, below = sampled("r", [1], WIDTH * BLOCK - 1, list(widest)), sampled("s", [2], 0, [9])
    check(inputs.decode(StepBatch([row, below])), [row, below], 2, 2)
    row.start += 1
    row.block_table.append(50)  # the one step that sends no table, but a block for the column behind the last
    before = inputs.buffers.block_tables.clone()
    for other in (inputs, new_inputs()):
        for build in (other.decode, other.prefill):
            with pytest.raises(ValueError, match=f"a table of {WIDTH + 1} blocks, at most {WIDTH} fit"):
                build(StepBatch([row, below]))
    assert torch.equal(inputs.buffers.block_tables, before)


REFUSED = {
    "too many rows": [sampled(str(i), [1], 0, [1 + i]) for i in range(ROWS + 1)],
    "too many tokens": [sampled("r", list(range(24)), 0, [1, 2, 3, 4, 5, 6]), sampled("s", [1] * 9, 0, [7, 8, 9])],
    "no blocks for its token": [sampled("r", [1], 4, [3])],
    "no blocks for its tokens": [sampled("r", [1, 2, 3], 2, [3])],
    "a block that does not exist": [sampled("r", [1], 5, [3, 100])],
    "a block of the padding": [sampled("r", [1, 2, 3], 4, [0, 5])],
    "a table too wide": [sampled("r", [1, 2], 0, list(range(1, WIDTH + 2)))],
    "no tokens": [sampled("r", [], 0, [3]), sampled("s", [1, 2], 0, [4])],
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_check_when_a_batch_would_be_refused_then_says_so_beforehand(what: str) -> None:
    inputs = new_inputs()
    for refuses in (inputs.check, inputs.prefill):
        with pytest.raises(ValueError):
            refuses(StepBatch(REFUSED[what]))


def test_check_when_a_row_decodes_on_then_what_its_table_has_gained_is_looked_at() -> None:
    inputs = new_inputs()
    row = sampled("r", [1], 7, [3, 4])
    inputs.check(StepBatch([row]))
    inputs.decode(StepBatch([row]))
    for gained, row.start in (([100], 8), ([5, 0], 12)):
        row.block_table[2:] = gained
        with pytest.raises(ValueError, match="block ids must be in"):
            inputs.check(StepBatch([row]))
    row.block_table[2:], row.start = [5], 8
    inputs.check(StepBatch([row]))
    check(inputs.decode(StepBatch([row])), [row], 1, 1)


def test_g2_buffers_when_somebody_would_put_others_in_their_place_then_raise() -> None:
    buffers = new_inputs().buffers
    with pytest.raises(FrozenInstanceError):
        buffers.slots = torch.zeros_like(buffers.slots)  # type: ignore[misc]  # a graph reads the first ones


def test_blank_step_when_staged_for_a_capture_then_it_reads_block_zero_and_writes_nowhere() -> None:
    inputs = new_inputs()
    row = sampled("r", [1], 5, [3, 4])
    inputs.decode(StepBatch([row]), 3)
    inputs.stage_blank(3, vocab_size=2)
    inputs.prepare_decode(3)
    buffers = inputs.cut(3)
    assert buffers.token_ids.tolist() == [0, 1, 0]
    assert buffers.slots.tolist() == [-1, -1, -1]
    assert buffers.kv_lens.tolist() == [1, 1, 1]
    assert buffers.block_tables[:, 0].tolist() == [0, 0, 0]
    check(inputs.decode(StepBatch([row]), 3), [row], 3, 3)
