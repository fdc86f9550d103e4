"""What an agent of the cache store and its NIXL process say to each other, and how it is framed on their socket.

A frame is its length (4 bytes, little-endian) and a MessagePack value. Layers are named by their index in the list of
`Start` or `Open`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


class Start(msgspec.Struct, tag=True, array_like=True):
    """First frame. Of each layer: descriptor of its file (or -1), address in this process (or 0), bytes. The same of
    the words of leases (0 bytes: there are none)."""

    name: str
    memory: str
    device: int
    layers: list[tuple[int, int, int]]
    words: tuple[int, int, int]


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The memory is registered: what others have to know of the NIXL agent, and the address for them of each layer and
    of the words (0: there are none)."""

    agent: bytes
    addresses: list[int]
    words: int


class Failed(msgspec.Struct, tag=True, array_like=True):
    """Last frame: there is no NIXL agent. `reason`: absent or failed."""

    reason: str
    text: str


class Open(msgspec.Struct, tag=True, array_like=True):
    """A peer's memory: address and bytes of each layer, and of its words. It has `within_s` seconds to answer a first
    read."""

    peer: int
    agent: bytes
    memory: str
    device: int
    layers: list[tuple[int, int]]
    words: tuple[int, int]
    within_s: float


class Opened(msgspec.Struct, tag=True, array_like=True):
    """`problem` is empty when the first bytes of the peer's memory have been read."""

    peer: int
    problem: str


class Shut(msgspec.Struct, tag=True, array_like=True):
    """The peer's memory is not needed any more."""

    peer: int


class Read(msgspec.Struct, tag=True, array_like=True):
    """Row `source[i]` of a peer's layer -> row `target[i]` of an own one, for each pair (theirs, own) of `layers`.

    Rows: int64 in the machine's order.
    """

    number: int
    peer: int
    layers: list[tuple[int, int]]
    unit_bytes: int
    source: bytes
    target: bytes


class Look(msgspec.Struct, tag=True, array_like=True):
    """Read a word of the peer."""

    number: int
    peer: int
    index: int


class Ended(msgspec.Struct, tag=True, array_like=True):
    """Nothing of the read is written any more. `problem` is empty when all of it is there. `word`: the one that was
    looked at."""

    number: int
    problem: str
    word: int = 0


Request = Start | Open | Shut | Read | Look
Answer = Ready | Failed | Opened | Ended

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Request | Answer) -> bytes:
    data = _encoder.encode(frame)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes a stream of bytes apart again."""

    def __init__(self, kind: object) -> None:
        """kind: `Request` or `Answer`."""
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(kind)
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """The frames that are complete with `data`. Raises ValueError for bytes that are none."""
        self._held += data
        while len(self._held) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._held)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._held) < _LENGTH.size + size:
                return
            body = bytes(self._held[_LENGTH.size : _LENGTH.size + size])
            del self._held[: _LENGTH.size + size]
            yield self._decoder.decode(body)
