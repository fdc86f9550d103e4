"""Checksums per block, and the rule which events have them."""

from __future__ import annotations

import pytest
import xxhash

from cache_store import checksum
from rpc.errors import BatonError, ErrorCode


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [("off", "off", "off"), ("off", "sample", "sample"), ("all", "sample", "all"), ("off", "all", "all")],
)
def test_stricter_of_two_modes_decides(one: str, other: str, together: str) -> None:
    assert checksum.stricter(one, other) == together == checksum.stricter(other, one)


def test_covered_follows_the_mode() -> None:
    events = [(layer, first) for layer in range(30) for first in (0, 85)]
    assert all(checksum.covered("all", *event) for event in events)
    assert not any(checksum.covered("off", *event) for event in events)
    sampled = [event for event in events if checksum.covered("sample", *event)]
    assert 0 < len(sampled) < len(events) / 4
    assert (0, 0) in sampled  # the smallest load is never without one


def test_checksums_are_xxh3_64_of_each_block() -> None:
    data = bytes(range(256)) * 4
    assert checksum.checksums(memoryview(data), 512) == [
        xxhash.xxh3_64(data[:512]).intdigest(),
        xxhash.xxh3_64(data[512:]).intdigest(),
    ]


def test_verify_names_the_damaged_block() -> None:
    data = bytearray(1024)
    good = checksum.checksums(memoryview(data), 256)
    checksum.verify(memoryview(data), 256, [4, 5, 6, 7], good, "layer 3")
    data[600] ^= 1
    with pytest.raises(BatonError) as caught:
        checksum.verify(memoryview(data), 256, [4, 5, 6, 7], good, "layer 3")
    assert caught.value.code is ErrorCode.KV_CHECKSUM_MISMATCH
    assert caught.value.metadata["piece"] == "layer 3, block 6"
