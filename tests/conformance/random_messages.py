"""Protobuf messages that nobody would send on purpose: random, changed, and damaged ones. Seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MOST_REPEATED = 6
MOST_DEPTH = 4

_INTS: dict[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-1, 2**31 - 1),
}
_FLOATS = (0.0, -0.0, 1.0, 0.5, 2.0, -2.0, 100.0, 1e-30, 1e30, 3.4e38, math.inf, -math.inf, math.nan)
_TEXTS = (
    "", "a", "0", " ", "#", "a#0", "a#0.00000000", "x#1.abcdef01", "%s%n", "../..", "\x00", "\u202eevil", "日本語",
    "localhost:1", "127.0.0.1:1", "127.0.0.1:99999", "[::1]:1", "http://x", "full", "tiny", "all", "off", "grpc", "ipc",
    "client", "float32", "A" * 129, "é" * 300,
)  # fmt: skip


class Maker:
    """`texts`: further strings that are worth a try, such as names that exist."""

    def __init__(self, rng: random.Random, texts: tuple[str, ...] = ()) -> None:
        self.rng = rng
        self.texts = (*_TEXTS, *texts)

    def value(self, field: FieldDescriptor, depth: int) -> Any:
        """A value for one element of `field`, which is no message."""
        rng = self.rng
        if field.type in _INTS:
            low, high = _INTS[field.type]
            return rng.choice(
                (low, high, 0, 1, 2, 7, 16, 64, 255, 1 << 16, rng.randint(low, high), rng.randint(0, 300))
            )
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return rng.choice((*_FLOATS, rng.uniform(-3, 3)))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 4, 64, 1000)))
        return rng.choice(self.texts)

    def put(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        """Sets `field`, or clears it."""
        rng = self.rng
        message.ClearField(field.name)
        if rng.random() < 0.15:
            return
        count = rng.randint(0, MOST_REPEATED) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = getattr(message, field.name)
            key, item = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            for _ in range(count):
                entry[self.value(key, depth)] = self.value(item, depth)
        elif field.message_type is not None:
            for _ in range(count):
                inner = getattr(message, field.name)
                target = inner.add() if field.is_repeated else inner
                if not field.is_repeated:
                    target.SetInParent()
                if depth < MOST_DEPTH:
                    self.fill(target, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(self.value(field, depth) for _ in range(count))
        else:
            setattr(message, field.name, self.value(field, depth))

    def fill(self, message: Message, depth: int = 0) -> Message:
        """Random values for about half of the fields."""
        for field in message.DESCRIPTOR.fields:
            if self.rng.random() < 0.5:
                self.put(message, field, depth)
        return message

    def change(self, message: Message, times: int, depth: int = 0) -> Message:
        """A few fields of a good message, at any depth, get other values."""
        rng = self.rng
        for _ in range(times if message.DESCRIPTOR.fields else 0):
            field = rng.choice(message.DESCRIPTOR.fields)
            inner = getattr(message, field.name)
            deeper = field.message_type is not None and not field.message_type.GetOptions().map_entry
            if deeper and not field.is_repeated and rng.random() < 0.8:
                self.change(inner, 1, depth + 1)
            elif deeper and field.is_repeated and len(inner) and rng.random() < 0.7:
                self.change(rng.choice(inner), 1, depth + 1)
            else:
                self.put(message, field, depth)
        return message

    def damage(self, data: bytes) -> bytes:
        """Bytes that were a message: some changed, left out, repeated or put in."""
        rng, raw = self.rng, bytearray(data or b"\x00")
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw) + 1)
            match rng.randrange(4):
                case 0 if at < len(raw):
                    raw[at] ^= 1 << rng.randrange(8)
                case 1:
                    del raw[at : at + rng.randint(1, 8)]
                case 2:
                    raw[at:at] = rng.randbytes(rng.randint(1, 8))
                case _:
                    raw[at:at] = raw[max(0, at - 8) : at]
        return bytes(raw)

    def bytes_of(self, good: Callable[[], Message]) -> bytes:
        """One case: what is sent in place of a good message."""
        rng, message = self.rng, good()
        match rng.randrange(8):
            case 0 | 1:
                return self.fill(type(message)()).SerializeToString()
            case 2 | 3 | 4 | 5:
                return self.change(message, rng.randint(1, 3)).SerializeToString()
            case 6:
                return self.damage(message.SerializeToString())
        return rng.randbytes(rng.choice((0, 1, 5, 40, 400)))
