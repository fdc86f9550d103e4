"""Checksums of events, and the rule which of them have one."""

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


def test_digest_is_xxh3_64_of_all_views_together() -> None:
    data = bytes(range(256)) * 4
    views = [memoryview(data)[:100], memoryview(data)[100:]]
    assert checksum.digest(views) == checksum.digest([memoryview(data)]) == xxhash.xxh3_64(data).intdigest()


def test_compare_when_a_byte_differs_then_says_where_and_both_sums() -> None:
    data = bytearray(1024)
    good = checksum.digest([memoryview(data)])
    checksum.compare(checksum.digest([memoryview(data)]), good, "layer 3")
    data[600] ^= 1
    have = checksum.digest([memoryview(data)])
    with pytest.raises(BatonError) as caught:
        checksum.compare(have, good, "layer 3")
    assert caught.value.code is ErrorCode.KV_CHECKSUM_MISMATCH
    assert caught.value.metadata == {"piece": "layer 3", "expected": f"{good:016x}", "got": f"{have:016x}"}
