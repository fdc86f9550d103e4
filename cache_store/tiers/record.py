"""A block outside of the pool: its key, its length and its checksum before its bytes.

    offset  bytes
         0      8  magic "BATONKV1", the form's version included
         8     16  key, see keys.py
        24      8  length of the payload, little-endian
        32     16  xxh3-128 of key and payload, big-endian
        48     16  zeros
        64         payload: the block of layer 0, of layer 1, ..., each as in the pool

The checksum finds damage, by accident or by a write that was torn. It is no signature: whoever may write to a tier can
put there what he likes.
"""

from __future__ import annotations

import struct

import xxhash

KEY_BYTES = 16
HEADER_BYTES = 64
_MAGIC = b"BATONKV1"
_HEADER = struct.Struct("<8s16sQ16s16x")
assert _HEADER.size == HEADER_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Size of the record of a payload."""
    return HEADER_BYTES + payload_bytes


def _digest(key: bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(key)
    state.update(payload)
    digest: bytes = state.digest()
    return digest


def seal_record(key: bytes, record: bytearray | memoryview) -> None:
    """Writes the header of a record whose payload is in its place. `key` has KEY_BYTES bytes."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    view = memoryview(record)
    payload = view[HEADER_BYTES:]
    _HEADER.pack_into(view, 0, _MAGIC, key, payload.nbytes, _digest(key, payload))


def open_record(key: bytes, record: bytes | bytearray | memoryview) -> memoryview | None:
    """The payload, which aliases `record`; None for anything but the undamaged record of `key`."""
    view = memoryview(record)
    if view.nbytes < HEADER_BYTES:
        return None
    payload = view[HEADER_BYTES:]
    expected = _HEADER.pack(_MAGIC, key, payload.nbytes, _digest(key, payload))
    return payload if view[:HEADER_BYTES] == expected else None
