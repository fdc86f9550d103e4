"""Messages of the CacheStore service as bytes.

A piece event is put together from the header and views of the pool with one copy, and taken apart again without any:
KV never passes through a protobuf message object. What is on the wire is an ordinary `LoadEvent` all the same, so
generated clients read it and any order of its fields is understood (more slowly).

Requests are checked here for presence: an absent field is ERROR_GENERATE_CONFIG_FORMAT naming it, never read
as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from cache_store.checksum import MODES
from cache_store.settings import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from cache_store.transports import TRANSPORTS
from protos import cache_store_pb2, errors_pb2
from rpc.errors import BatonError, ErrorCode
from rpc.ids import split_request_key

SERVICE = cache_store_pb2.DESCRIPTOR.services_by_name["CacheStore"].full_name

_PIECES_TAG = 0x0A  # field 1, length-delimited
_DATA_TAG = 0x12  # field 2, length-delimited

_M = TypeVar("_M", bound=Message)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and the index behind it. Raises IndexError or ValueError when there is none."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint of more than ten bytes")


def encode_piece(header: cache_store_pb2.PieceHeader, data: Sequence[memoryview]) -> bytes:
    """A serialized LoadEvent with `pieces` = header and `data` = the views one after the other. Copies them once."""
    head = header.SerializeToString()
    size = sum(view.nbytes for view in data)
    return b"".join((b"\x0a", _varint(len(head)), head, b"\x12", _varint(size), *data))


def split_piece(message: bytes) -> tuple[cache_store_pb2.PieceHeader, memoryview] | None:
    """Header and payload (a view of `message`) of a piece event; None when it is another event or another encoding.

    Raises DecodeError when the header cannot be parsed.
    """
    if not message or message[0] != _PIECES_TAG:
        return None
    try:
        size, at = _read_varint(message, 1)
        head_end = at + size
        if message[head_end] != _DATA_TAG:
            return None
        length, data_at = _read_varint(message, head_end + 1)
    except (IndexError, ValueError):
        return None
    if data_at + length != len(message):
        return None
    header = cache_store_pb2.PieceHeader.FromString(message[at:head_end])
    return header, memoryview(message)[data_at:]


def parse(kind: type[_M], data: bytes) -> _M:
    """A request message; ERROR_GENERATE_CONFIG_FORMAT when the bytes are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BatonError(
            ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, f"the bytes of the request are no {kind.__name__}"
        ) from None


def absent(field: str) -> BatonError:
    return BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, f"{field} is required", param=field)


def out_of_range(field: str, value: object, allowed: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, f"{field} is {value!s:.64}, allowed is {allowed}", param=field)


def require(message: Message, prefix: str, *fields: str) -> None:
    """Every field is set (fields with presence) or not empty (the others); else ERROR_GENERATE_CONFIG_FORMAT naming the
    first that is not."""
    for name in fields:
        field = message.DESCRIPTOR.fields_by_name[name]
        there = message.HasField(name) if field.has_presence else bool(getattr(message, name))
        if not there:
            raise absent(f"{prefix}{name}")


def check_reference(reference: cache_store_pb2.KvReference, prefix: str = "reference.") -> int | None:
    """The generation of a reference with engine and key, None when it is not known to the caller."""
    require(reference, prefix, "engine_id", "request_key")
    split_request_key(reference.request_key)
    return reference.generation if reference.HasField("generation") else None


def check_reader(reader: cache_store_pb2.ReaderRank) -> None:
    """Presence and range of the caller's rank."""
    require(reader, "reader.", "rank", "tp_size")
    if reader.rank >= reader.tp_size:
        raise out_of_range("reader.rank", reader.rank, f"[0, tp_size {reader.tp_size})")


def check_load(request: cache_store_pb2.LoadRequest) -> None:
    """Presence and ranges of a load request, as far as they do not depend on what is staged."""
    require(request, "", "reference")
    check_reference(request.reference)
    require(request, "", "wanted", "prompt_tokens", "checksum", "chunk_bytes", "reader")
    check_reader(request.reader)
    if request.prompt_tokens < 1:
        raise out_of_range("prompt_tokens", request.prompt_tokens, ">= 1")
    if request.checksum not in MODES:
        raise out_of_range("checksum", request.checksum, ", ".join(MODES))
    if not MIN_CHUNK_BYTES <= request.chunk_bytes <= MAX_CHUNK_BYTES:
        raise out_of_range("chunk_bytes", request.chunk_bytes, f"[{MIN_CHUNK_BYTES}, {MAX_CHUNK_BYTES}]")
    if request.transport not in ("", *TRANSPORTS):
        raise out_of_range("transport", request.transport, ", ".join(TRANSPORTS))
    seen: set[str] = set()
    for index, wanted in enumerate(request.wanted):
        prefix = f"wanted[{index}]."
        require(
            wanted,
            prefix,
            "group",
            "block_size",
            "first_block",
            "num_blocks",
            "block_bytes",
            "num_layers",
            "partition_count",
            "partition_id",
        )
        if wanted.group in seen:
            raise out_of_range(f"{prefix}group", wanted.group, "each group once")
        seen.add(wanted.group)
        if wanted.partition_count < 1:
            raise out_of_range(f"{prefix}partition_count", wanted.partition_count, ">= 1")
        if wanted.partition_id >= wanted.partition_count:
            raise out_of_range(f"{prefix}partition_id", wanted.partition_id, f"[0, {wanted.partition_count})")


def error_of(detail: errors_pb2.ErrorDetail) -> BatonError:
    """The failure inside a message."""
    return BatonError.from_number(detail.code, detail.message, stage=detail.stage, metadata=dict(detail.metadata))


def detail_of(error: BatonError) -> errors_pb2.ErrorDetail:
    return errors_pb2.ErrorDetail(
        code=int(error.code),
        name=error.code.name,
        message=error.message,
        stage=error.stage,
        metadata={key: value[:256] for key, value in list(error.metadata.items())[:16]},
    )
