"""D's end of a load: completion by identity, one end, the first cause, and until when to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.checksum import covered, digest
from cache_store.geometry.layout import GroupLayout
from cache_store.loading.load import Load, LoadState, WantedHere
from protos import cache_store_pb2 as pb
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.lease_fixtures import Clock, Counts, prefill_result

LAYOUT = GroupLayout.of("full", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float16")
WINDOW = GroupLayout.of("window", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float16")
FIRST = 2
PROGRESS_S = 5.0
PUBLISH_S = 100.0


def block_data(layer: int, block: int) -> bytes:
    return bytes([layer * 16 + block]) * LAYOUT.block_bytes


NONE = -1  # as a checksum: the event has none


class Stream:
    """A load that is fed by hand. `send` checks, verifies and counts a piece event as the puller does."""

    def __init__(self, count: int = 2, mode: str = "all", deadline_s: float = 1e9, two_groups: bool = False) -> None:
        self.clock = Clock()
        self.counts = Counts()
        groups = [WantedHere(LAYOUT, FIRST, list(range(count)), LAYOUT.block_bytes, ((0, LAYOUT.block_bytes),))]
        if two_groups:
            groups.append(WantedHere(WINDOW, 0, [5, 6], WINDOW.block_bytes, ((0, WINDOW.block_bytes),)))
        self.load = Load(
            tuple(groups),
            mode,
            PROGRESS_S,
            PUBLISH_S,
            self.clock.now + deadline_s,
            self.clock,
            self.clock.ns,
            self.counts,
        )

    def started(self) -> Stream:
        self.load.on_started(pb.Started(generation=9, cached_blocks=0))
        self.load.on_state(pb.COMPUTE_STATE_RUNNING)
        return self

    def send(
        self,
        layer: int,
        blocks: Sequence[int],
        group: str = "full",
        data: bytes | None = None,
        checksum: int | None = None,
        block_bytes: int = LAYOUT.block_bytes,
    ) -> None:
        payload = b"".join(block_data(layer, block) for block in blocks) if data is None else data
        if checksum is None:
            checksum = digest([memoryview(payload)])
        header = pb.PieceHeader(group=group, layer=layer, blocks=blocks, block_bytes=block_bytes)
        if checksum != NONE:
            header.checksum = checksum
        piece = self.load.read_header(header)
        self.load.expect(piece, len(payload))
        self.load.verify(piece, memoryview(payload))
        self.load.on_taken(piece)
        self.load.on_delivered(piece)

    def computed(self) -> Stream:
        self.load.on_state(pb.COMPUTE_STATE_COMPUTED)
        return self

    def done(self, pieces: int, result: common_pb2.PrefillResult | None = None) -> None:
        """COMPUTED, unless it came before, and Done."""
        if self.load.state is LoadState.RUNNING:
            self.computed()
        self.load.on_done(pb.Done(result=prefill_result() if result is None else result, pieces=pieces))


def fails(call: Callable[[], object], load: Load) -> ErrorCode:
    """The code with which `call` ends the load; afterwards the load is over and holds the same error."""
    with pytest.raises(BatonError) as caught:
        call()
    assert load.state is LoadState.FAILED
    assert load.error is caught.value
    return caught.value.code


def test_load_with_everything_and_the_result_is_complete() -> None:
    stream = Stream().started()
    stream.send(0, [2, 3])
    stream.clock.now += 1
    stream.load.on_state(pb.COMPUTE_STATE_COMPUTED)
    stream.clock.now += 2
    stream.send(1, [2])
    stream.send(1, [3])
    stream.done(4)
    assert stream.load.state is LoadState.COMPUTED
    stream.load.on_end()
    assert stream.load.state is LoadState.COMPLETE
    assert (stream.load.delivered, stream.load.missing, stream.load.generation) == (4, 0, 9)
    assert stream.load.bytes_received == 4 * LAYOUT.block_bytes
    assert stream.load.exposed_seconds(stream.clock.now) == 2.0
    assert [name for name, _ in stream.load.events] == [
        "load_started",
        "load_running",
        "layer_received:0",
        "load_computed",
        "layer_received:1",
        "load_complete",
    ]
    stream.load.on_end()  # idempotent
    assert stream.counts.counters[("kv_transfer_pieces_total", "grpc", "ok")] == 4


@pytest.mark.invariant("RPC-14")
def test_load_of_zero_blocks_completes() -> None:
    stream = Stream(count=0).started()
    stream.load.on_state(pb.COMPUTE_STATE_COMPUTED)
    stream.done(0)
    stream.load.on_end()
    assert stream.load.state is LoadState.COMPLETE


@pytest.mark.invariant("RPC-14")
@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data())
def test_load_completes_with_any_order_and_split_of_its_blocks(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    pieces = [(layer, FIRST + block) for layer in range(2) for block in range(count)]
    order = data.draw(st.permutations(pieces))
    stream = Stream(count).started()
    while order:
        layer = order[0][0]
        size = data.draw(st.integers(1, 3))
        batch = sorted(block for at, block in order[:size] if at == layer)
        order = [piece for piece in order if piece not in {(layer, block) for block in batch}]
        stream.send(layer, batch)
    stream.load.on_state(pb.COMPUTE_STATE_COMPUTED)
    stream.done(2 * count)
    stream.load.on_end()
    assert stream.load.state is LoadState.COMPLETE


@pytest.mark.invariant("RPC-14")
@pytest.mark.parametrize(
    ("call", "code", "counted"),
    [
        (lambda s: (s.send(0, [2, 3]), s.send(0, [2, 3])), ErrorCode.READ_BUFFER_MISMATCH, "duplicate"),
        (lambda s: s.send(0, [2, 2]), ErrorCode.READ_BUFFER_MISMATCH, "duplicate"),
        (lambda s: s.send(0, [2, 3, 4]), ErrorCode.READ_BUFFER_MISMATCH, "unknown"),
        (lambda s: s.send(0, [1]), ErrorCode.READ_BUFFER_MISMATCH, "unknown"),
        (lambda s: s.send(2, [2]), ErrorCode.READ_BUFFER_MISMATCH, "unknown"),
        (lambda s: s.send(0, [2], group="other"), ErrorCode.READ_BUFFER_MISMATCH, "unknown"),
        (lambda s: s.send(0, [2], data=b""), ErrorCode.READ_BUFFER_MISMATCH, None),
        (lambda s: s.send(0, [], data=b""), ErrorCode.READ_BUFFER_MISMATCH, None),
        (lambda s: s.send(0, [2], data=bytes(LAYOUT.block_bytes - 1)), ErrorCode.READ_BUFFER_MISMATCH, None),
        (lambda s: s.send(0, [2], block_bytes=1), ErrorCode.READ_BUFFER_MISMATCH, None),
        (lambda s: s.send(0, [2], checksum=1), ErrorCode.KV_CHECKSUM_MISMATCH, "checksum"),
        (lambda s: s.send(0, [2], checksum=NONE), ErrorCode.KV_CHECKSUM_MISMATCH, "checksum"),
        (lambda s: s.done(0), ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT, "missing"),
        (lambda s: s.load.on_end(), ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT, "missing"),
        (lambda s: s.load.on_started(pb.Started(generation=1)), ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, None),
        (lambda s: s.load.on_state(0), ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, None),
    ],
)
def test_load_with_a_wrong_event_fails_with_its_code(
    call: Callable[[Stream], object], code: ErrorCode, counted: str | None
) -> None:
    stream = Stream().started()
    assert fails(lambda: call(stream), stream.load) is code
    if counted is not None:
        assert stream.counts.counters[("kv_transfer_pieces_total", "grpc", counted)] >= 1


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.send(0, [2]),
        lambda s: s.load.on_state(pb.COMPUTE_STATE_RUNNING),
        lambda s: s.done(0),
        lambda s: s.load.on_started(pb.Started()),
    ],
)
def test_load_with_an_event_before_started_is_a_breach(call: Callable[[Stream], object]) -> None:
    stream = Stream()
    assert fails(lambda: call(stream), stream.load) is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
    assert stream.load.error is not None and stream.load.error.breach


def notice(layer: int, num_layers: int, block_runs: Sequence[int], source_runs: Sequence[int] = ()) -> pb.Notice:
    return pb.Notice(
        group="full",
        layer=layer,
        num_layers=num_layers,
        block_runs=block_runs,
        block_bytes=LAYOUT.block_bytes,
        source_runs=source_runs,
    )


def test_notice_of_several_layers_counts_each_of_their_blocks_once() -> None:
    stream = Stream(count=3).started()
    load, layers = stream.load, LAYOUT.num_layers
    load.transport = "ipc"
    piece = load.read_notice(notice(0, layers, [FIRST, 2], [9, 1, 4, 1]))
    assert (piece.layers, list(piece.blocks), list(piece.sources)) == (range(layers), [FIRST, FIRST + 1], [9, 4])
    load.expect(piece, 0)
    load.on_taken(piece)
    load.on_delivered(piece.of(range(1, layers)))
    assert (load.delivered, load.missing) == (2 * (layers - 1), 3 * layers - 2 * (layers - 1))
    again = load.read_notice(notice(layers - 1, 1, [FIRST + 1, 2], [1, 2]))
    assert fails(lambda: load.expect(again, 0), load) is ErrorCode.READ_BUFFER_MISMATCH
    assert load.error is not None and f"layer {layers - 1}, block {FIRST + 1}" in load.error.metadata["piece"]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (notice(0, 1, [FIRST]), ErrorCode.READ_BUFFER_MISMATCH),  # half of a run
        (notice(0, 1, [FIRST, 0]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 1, [FIRST, 2**32 - 1]), ErrorCode.READ_BUFFER_MISMATCH),  # which nobody may try to hold
        (notice(0, 1, [FIRST, 1] * 3, [0, 1]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 1, [2**32 - 1, 1], [0, 1]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 1, [FIRST, 1, FIRST, 1], [0, 2]), ErrorCode.READ_BUFFER_MISMATCH),  # twice the same
        (notice(0, 1, [FIRST + 1, 1, FIRST, 1], [0, 2]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 0, [FIRST, 1], [0, 1]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 2**32 - 1, [FIRST, 1], [0, 1]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(LAYOUT.num_layers - 1, 2, [FIRST, 1], [0, 1]), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 1, []), ErrorCode.READ_BUFFER_MISMATCH),
        (notice(0, 1, [FIRST, 2], [0, 1]), ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        (notice(0, 1, [FIRST, 1]), ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        (pb.Notice(group="other", layer=0, num_layers=1, block_runs=[0, 1]), ErrorCode.READ_BUFFER_MISMATCH),
        (pb.Notice(), ErrorCode.READ_BUFFER_MISMATCH),
    ],
)
def test_notice_that_names_no_block_that_is_awaited_fails_the_load(made: pb.Notice, code: ErrorCode) -> None:
    load = Stream(count=2).started().load
    load.transport = "ipc"
    assert fails(lambda: load.expect(load.read_notice(made), 0), load) is code
    assert (load.delivered, load.missing) == (0, 2 * LAYOUT.num_layers)


def test_load_that_was_computed_before_it_came_skips_running() -> None:
    stream = Stream(count=0)
    stream.load.on_started(pb.Started(generation=9))
    stream.load.on_state(pb.COMPUTE_STATE_COMPUTED)
    assert stream.load.state is LoadState.COMPUTED
    assert [name for name, _ in stream.load.events][-2:] == ["load_running", "load_computed"]


@pytest.mark.invariant("RPC-10")
@pytest.mark.parametrize(
    "result",
    [
        common_pb2.PrefillResult(),
        common_pb2.PrefillResult(first_token=common_pb2.TokenOutput(index=0), cached_tokens=0),
        common_pb2.PrefillResult(first_token=common_pb2.TokenOutput(token_id=1)),
    ],
)
def test_done_without_its_result_is_a_breach_never_a_success(result: common_pb2.PrefillResult) -> None:
    stream = Stream(count=0).started()
    assert fails(lambda: stream.done(0, result), stream.load) is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR


@pytest.mark.invariant("RPC-14")
def test_done_with_another_number_of_pieces_is_a_mismatch() -> None:
    stream = Stream(count=0).started()
    assert fails(lambda: stream.done(1), stream.load) is ErrorCode.READ_BUFFER_MISMATCH


@pytest.mark.invariant("RPC-10")
def test_end_without_done_is_a_failure_even_with_every_block() -> None:
    stream = Stream(count=0).started()
    assert fails(stream.load.on_end, stream.load) is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR


@pytest.mark.invariant("RPC-10")
@pytest.mark.parametrize(
    "call", [lambda s: s.done(0), lambda s: s.load.on_state(pb.COMPUTE_STATE_COMPUTED), lambda s: s.send(0, [2])]
)
def test_event_after_done_fails_the_load(call: Callable[[Stream], object]) -> None:
    stream = Stream(count=0).started()
    stream.done(0)
    fails(lambda: call(stream), stream.load)


def test_failed_event_leaves_nothing_counted() -> None:
    stream = Stream().started()
    with pytest.raises(BatonError):
        stream.send(0, [2, 9])
    assert (stream.load.delivered, stream.load.missing, stream.load.bytes_received) == (0, 4, 0)


@pytest.mark.invariant("RPC-14")
def test_p2_pieces_of_two_groups_with_equal_block_numbers_do_not_meet() -> None:
    stream = Stream(two_groups=True).started()
    stream.send(0, [2, 3])
    header = pb.PieceHeader(
        group="window",
        layer=0,
        blocks=[0, 1],
        block_bytes=WINDOW.block_bytes,
        checksum=digest([memoryview(bytes(2 * WINDOW.block_bytes))]),
    )
    piece = stream.load.read_header(header)
    assert stream.load.expect(piece, 2 * WINDOW.block_bytes).block_ids == [5, 6]
    stream.load.on_delivered(piece)
    assert stream.load.missing == 2
    assert [name for name, _ in stream.load.events][-2:] == ["layer_received:full:0", "layer_received:window:0"]


@pytest.mark.parametrize("mode", ["sample", "all"])
def test_damage_is_found_in_every_event_that_has_checksums(mode: str) -> None:
    stream = Stream(mode=mode).started()
    good = digest([memoryview(block_data(0, 2))])
    damaged = bytes([1]) + block_data(0, 2)[1:]
    code = fails(lambda: stream.send(0, [2], data=damaged, checksum=good), stream.load)
    assert code is ErrorCode.KV_CHECKSUM_MISMATCH


def test_events_that_the_mode_does_not_cover_need_no_checksums() -> None:
    assert not covered("sample", 0, FIRST)
    Stream(mode="sample").started().send(0, [2], checksum=NONE)
    Stream(mode="off").started().send(0, [2], checksum=NONE)


@pytest.mark.invariant("RPC-14")
def test_first_cause_stays_and_names_what_is_missing() -> None:
    stream = Stream().started()
    stream.send(0, [2])
    first = BatonError(ErrorCode.KV_CHECKSUM_MISMATCH)
    assert stream.load.fail(first) is first
    assert stream.load.fail(BatonError(ErrorCode.CANCELLED)) is first
    assert (first.metadata["delivered"], first.metadata["missing"]) == ("1", "3")


# ---- time


def timeout_code(stream: Stream, seconds: float) -> ErrorCode:
    """The cause when nothing comes for `seconds`, which must be when the load itself says so."""
    assert stream.load.wait_until() == pytest.approx(stream.clock.now + seconds)
    stream.clock.now += seconds
    return stream.load.on_timeout().code


@pytest.mark.invariant("RPC-20")
def test_waiting_for_the_prefill_to_run_is_bounded_by_the_publish_timeout() -> None:
    assert timeout_code(Stream(), PUBLISH_S + 1) is ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT


def test_waiting_is_bounded_by_the_requests_deadline_first() -> None:
    assert timeout_code(Stream(deadline_s=3), 3) is ErrorCode.GENERATE_TIMEOUT
    assert timeout_code(Stream(deadline_s=3).started(), 3) is ErrorCode.GENERATE_TIMEOUT


@pytest.mark.invariant("RPC-20")
def test_progress_limit_starts_when_the_prefill_runs_however_long_it_was_queued() -> None:
    stream = Stream()
    stream.clock.now += 3 * PROGRESS_S
    assert stream.load.wait_until() > stream.clock.now
    stream.started()
    assert timeout_code(stream, PROGRESS_S) is ErrorCode.LOAD_CACHE_TIMEOUT


def test_waiting_begins_anew_after_this_process_stood_still_but_the_deadline_stays() -> None:
    stream = Stream(deadline_s=PROGRESS_S + 3).started()
    stream.clock.now += PROGRESS_S + 1
    stream.load.held_up()
    assert timeout_code(stream, 2) is ErrorCode.GENERATE_TIMEOUT


@pytest.mark.invariant("RPC-20")
def test_progress_limit_is_moved_by_each_new_block_and_by_signs_of_progress() -> None:
    stream = Stream().started()
    stream.clock.now += PROGRESS_S - 1
    stream.send(0, [2])
    stream.clock.now += PROGRESS_S - 1
    stream.load.on_state(pb.COMPUTE_STATE_RUNNING)
    stream.clock.now += PROGRESS_S - 1
    stream.load.on_state(pb.COMPUTE_STATE_COMPUTED)
    assert timeout_code(stream, PROGRESS_S) is ErrorCode.LOAD_CACHE_TIMEOUT
