"""Hand-assembled events are ordinary protobuf messages, both ways."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store import wire
from protos import cache_store_pb2 as pb
from protos import errors_pb2
from rpc.errors import BatonError, ErrorCode

headers = st.builds(
    pb.PieceHeader,
    group=st.text(max_size=200),
    layer=st.integers(0, 2**32 - 1),
    blocks=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_bytes=st.integers(0, 2**32 - 1),
    checksum=st.none() | st.integers(0, 2**64 - 1),
)
payloads = st.lists(st.binary(max_size=300), max_size=4)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(header=headers, parts=payloads)
def test_encode_piece_is_what_the_generated_class_reads(header: pb.PieceHeader, parts: list[bytes]) -> None:
    event = pb.LoadEvent.FromString(wire.encode_piece(header, [memoryview(part) for part in parts]))
    assert event.pieces == header
    assert event.data == b"".join(parts)
    assert not event.HasField("started") and not event.HasField("done")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(header=headers, parts=payloads)
def test_split_piece_reads_what_the_generated_class_writes(header: pb.PieceHeader, parts: list[bytes]) -> None:
    data = b"".join(parts)
    message = pb.LoadEvent(pieces=header, data=data).SerializeToString()
    split = wire.split_piece(message)
    if not data:  # proto3 leaves an empty field out: the slow path reads it
        assert split is None
        return
    assert split is not None
    assert split[0] == header
    assert bytes(split[1]) == data


def test_split_piece_of_fields_in_another_order_leaves_them_to_the_generated_class() -> None:
    header = pb.PieceHeader(group="full", layer=0, blocks=[1])
    message = pb.LoadEvent(data=b"abc").SerializeToString() + pb.LoadEvent(pieces=header).SerializeToString()
    assert wire.split_piece(message) is None
    assert pb.LoadEvent.FromString(message) == pb.LoadEvent(pieces=header, data=b"abc")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.binary(max_size=60))
def test_split_piece_of_any_bytes_gives_an_answer_or_a_decode_error(message: bytes) -> None:
    with contextlib.suppress(DecodeError):
        wire.split_piece(b"\x0a" + message)


@pytest.mark.parametrize(
    "event",
    [
        pb.LoadEvent(started=pb.Started(generation=1)),
        pb.LoadEvent(state=pb.COMPUTE_STATE_RUNNING),
        pb.LoadEvent(done=pb.Done(pieces=1)),
        pb.LoadEvent(),
        pb.LoadEvent(pieces=pb.PieceHeader(group="full"), data=b"x", state=pb.COMPUTE_STATE_RUNNING),
    ],
)
def test_split_piece_of_another_event_is_none(event: pb.LoadEvent) -> None:
    assert wire.split_piece(event.SerializeToString()) is None


def test_parse_of_bytes_that_are_no_message_is_a_format_error() -> None:
    with pytest.raises(BatonError) as caught:
        wire.parse(pb.LoadRequest, b"\xff\xff\xff")
    assert caught.value.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT


def test_error_detail_round_trip_keeps_code_message_stage_and_metadata() -> None:
    error = BatonError(ErrorCode.KV_CHECKSUM_MISMATCH, "damaged", stage="load", metadata={"piece": "x"})
    again = wire.error_of(wire.detail_of(error))
    assert (again.code, again.message, again.stage, again.metadata) == (
        error.code,
        error.message,
        error.stage,
        error.metadata,
    )


@pytest.mark.invariant("RPC-10")
def test_error_detail_without_a_code_is_a_contract_breach() -> None:
    assert wire.error_of(errors_pb2.ErrorDetail(message="x")).code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
