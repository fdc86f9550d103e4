"""Steps as the other ranks get them: nothing that a forward needs is lost, and a long context travels once."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.input_embeddings import EmbeddingRows
from engine.parallel.agent_messages import Forget, Share
from engine.parallel.communicator import Communicator
from engine.parallel.hub import Hub
from engine.parallel.leader import LeadingRunner
from engine.parallel.messages import FollowerFrame, RowOrder, StepOrder
from engine.parallel.port import Port
from engine.parallel.step_orders import FollowedSteps, StepOrders, share_embeddings, take_embeddings
from engine.runner.batch import BatchRow, RowResult, StepBatch, StepResult
from tests.unit.engine.rank_processes import RankProcesses


class Both:
    """Rank 0's end and a follower's, with the wire between them."""

    def __init__(self) -> None:
        self.orders, self.steps = StepOrders(), FollowedSteps()
        self.size = 0

    def step(self, rows: list[BatchRow], **fields: object) -> StepBatch:
        frame = msgspec.msgpack.encode(FollowerFrame(1, step=self.orders.order(StepBatch(rows, **fields))))  # type: ignore[arg-type]
        self.size = len(frame)
        order = msgspec.msgpack.decode(frame, type=FollowerFrame).step
        assert order is not None
        batch = self.steps.batch(order)
        assert [seen(row) for row in batch.rows] == [seen(row) for row in rows]
        return batch


def seen(row: BatchRow) -> tuple[object, ...]:
    return (
        row.request_key, row.token_ids, row.start, row.block_table, row.sample, row.prompt_logprobs_from,
        list(row.prompt_next_ids), row.multimodal, list(row.position_ids),
        [(item.place, item.values.tolist()) for item in row.embeddings],
    )  # fmt: skip


def row(key: str, table: list[int], start: int = 0, tokens: list[int] | None = None, **fields: object) -> BatchRow:
    return BatchRow(key, tokens or [3], start, table, True, **fields)  # type: ignore[arg-type]


def test_order_when_a_request_decodes_on_then_only_what_is_new_travels() -> None:
    both = Both()
    table = list(range(1, 1001))
    first = both.step([row("a", table)])
    whole = both.size
    again = both.step([row("a", table, 1)])
    assert both.size < whole / 20
    table.append(2000)
    grown = both.step([row("a", table, 2)])
    # A follower's row keeps its list, by which a device's inputs know what they have
    assert first.rows[0].block_table is again.rows[0].block_table is grown.rows[0].block_table


def test_order_when_rows_move_leave_and_come_back_then_the_tables_are_theirs() -> None:
    both = Both()
    a, b, c = [1, 2], [3], [4, 5, 6]
    both.step([row("a", a), row("b", b), row("c", c)])
    b.append(7)
    both.step([row("c", c, 5), row("b", b, 6)])
    both.step([row("b", b, 7), row("a", [*a, 8]), row("c", c, 6)])  # preempted, and with blocks of its own again
    both.step([row("b", [3, 7], 8)])  # equal, and another list all the same
    assert both.size > 20
    both.step([row("b", [3], 9)])


def test_order_when_the_rows_of_a_step_decode_on_then_a_token_and_a_place_of_each_are_told() -> None:
    both = Both()
    tables = [list(range(place, place + 100)) for place in range(8)]
    chunk = {"tokens": [1, 2], "prompt_logprobs_from": 0, "prompt_next_ids": [5, 6]}
    both.step([row(str(place), table, **chunk) for place, table in enumerate(tables)])  # type: ignore[arg-type]
    both.step([row(str(place), table, 2) for place, table in enumerate(tables)])
    assert both.size < 100
    tables[3].append(7)
    tables[5] += [8, 9]
    both.step([row(str(place), table, 3) for place, table in enumerate(tables)])
    assert both.size < 110
    again = both.orders.order(StepBatch([row(str(place), table, 4) for place, table in enumerate(tables)]))
    assert again.again is not None and again.rows == []
    # Whatever is not like that is told row by row.
    both.orders.order(StepBatch([row(str(place), table, 4) for place, table in enumerate(tables)]))
    tables[0].pop()
    assert both.orders.order(StepBatch([row(str(i), t, 5) for i, t in enumerate(tables)])).again is None
    tables[1] = list(tables[1])
    assert both.orders.order(StepBatch([row(str(i), t, 6) for i, t in enumerate(tables)])).again is None
    longer = [row(str(i), t, 7, tokens=[1, 2] if i == 7 else None) for i, t in enumerate(tables)]
    assert both.orders.order(StepBatch(longer)).again is None
    with pytest.raises(ValueError, match="8 rows of a step before that had 0"):
        FollowedSteps().batch(again)


def test_order_when_rows_bring_more_than_tokens_then_the_followers_have_it() -> None:
    both = Both()
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows = [
        row("a", [1], tokens=[1, 2, 3], embeddings=[EmbeddingRows(0, values[:1]), EmbeddingRows(1, values[1:])]),
        row("b", [2], prompt_logprobs_from=1, prompt_next_ids=[5, 6], num_prompt_logprobs=2),
        row("c", [3], multimodal=True, position_ids=[0, 1, 2]),
    ]
    shares = {"full": [Share("a", 2, 1)]}
    batch = both.step(rows, kind="mixed", shares=shares)
    assert (batch.kind, batch.shares) == ("mixed", shares)
    both.step([row("a", rows[0].block_table, 3), row("c", rows[2].block_table, 1)])  # and none of it afterwards


def test_order_when_values_travel_apart_then_it_has_their_places_alone() -> None:
    values = np.zeros((100, 64), np.float32)
    batch = StepBatch([row("a", [1], tokens=[1] * 100, embeddings=[EmbeddingRows(0, values)])])
    order = StepOrders().order(batch, apart=True)
    assert len(msgspec.msgpack.encode(order)) < 400
    [placed] = FollowedSteps().batch(order).rows[0].embeddings
    assert (placed.place, len(placed.values)) == (0, 100)


HIDDEN = 8


def with_embeddings() -> StepBatch:
    values = np.arange(5 * HIDDEN, dtype=np.float32).reshape(5, HIDDEN)
    return StepBatch(
        [
            row("a", [1], tokens=[1] * 9, embeddings=[EmbeddingRows(0, values[:1]), EmbeddingRows(4, values[1:3])]),
            row("b", [2]),
            row("c", [3], tokens=[1] * 4, embeddings=[EmbeddingRows(2, values[3:])]),
        ]
    )


def move_embeddings(communicator: Communicator) -> list[tuple[object, ...]]:
    """The rows that this rank has afterwards."""
    cpu, batch, none = torch.device("cpu"), with_embeddings(), StepBatch([row("a", [1])])
    if communicator.rank == 0:
        share_embeddings(none, communicator, cpu)  # nothing, so no operation either
        share_embeddings(batch, communicator, cpu)
    else:
        batch = FollowedSteps().batch(StepOrders().order(batch, apart=True))
        take_embeddings(FollowedSteps().batch(StepOrders().order(none, apart=True)), communicator, cpu, HIDDEN)
        take_embeddings(batch, communicator, cpu, HIDDEN)
    return [seen(item) for item in batch.rows]


def test_embeddings_when_they_travel_apart_then_one_broadcast_brings_them_to_where_the_order_has_their_places() -> None:
    with RankProcesses(2) as ranks:
        sent, theirs = ranks.run(2, move_embeddings)
    assert theirs == sent == [seen(item) for item in with_embeddings().rows]


def test_batch_when_an_order_does_not_follow_the_one_before_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="row 3"):
        FollowedSteps().batch(StepOrder([RowOrder([1], 0, 3, [], True)], "decode"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=6), max_size=12))
def test_orders_when_requests_come_and_go_at_will_then_both_ends_agree(steps: list[list[tuple[int, int]]]) -> None:
    """Per step the requests in it, each with what happens to its table: nothing, a block more, or a new list."""
    both = Both()
    tables: dict[int, list[int]] = {number: [number + 1] for number in range(6)}
    for at, step in enumerate(steps):
        rows = []
        for number, change in dict(step).items():
            if change == 1:
                tables[number].append(100 + at)
            elif change == 2:
                tables[number] = [200 + at, number + 1]
            rows.append(row(f"r{number}", tables[number], at))
        both.step(rows)


def test_order_when_it_is_too_large_then_its_step_fails_alone_and_the_next_one_is_told_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.parallel.hub.MOST_BYTES", 1000)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    hub, port, steps = Hub([ours], 60.0), Port(theirs, 60.0), FollowedSteps()
    computed: list[StepBatch] = []

    def execute(batch: StepBatch, on_layer: object) -> StepResult:
        computed.append(batch)
        return StepResult([RowResult() for _ in batch.rows], 0.0, 0.0)

    runner = SimpleNamespace(
        groups=[], device=torch.device("cpu"), check=lambda batch: None, execute=execute,
        failed_blocks=lambda batch, results: [],
    )  # fmt: skip
    leading = LeadingRunner(runner, hub)  # type: ignore[arg-type]
    first, second = row("a", [1, 2]), row("b", [3, 4])
    leading.execute(StepBatch([first, second]))
    hub.post(Forget("c"))
    hub.wipe("full", [9])
    with pytest.raises(ValueError, match="at most 1000"):
        leading.execute(StepBatch([second, row("d", [5], 0, [7] * 2000)]))
    assert len(computed) == 1
    leading.execute(StepBatch([second, first]))
    frames = [port.receive(), port.receive()]
    batches = []
    for frame in frames:
        assert frame is not None and frame.step is not None
        batches.append(steps.batch(frame.step))
    assert [[seen(each) for each in batch.rows] for batch in batches] == [
        [seen(each) for each in batch.rows] for batch in computed
    ]
    # What was posted meanwhile is not lost with the order that nobody got
    assert frames[1] is not None and (frames[1].wipes, frames[1].calls) == ([("full", [9])], [Forget("c")])
    port.close()
    hub.close()
