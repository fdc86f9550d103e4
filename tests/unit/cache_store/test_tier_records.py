"""Records and keys of the tiers: damage is seen, and nothing but the same block of the same model has the same name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.geometry.layout import GroupLayout
from cache_store.tiers.keys import TierKeys
from cache_store.tiers.record import HEADER_BYTES, KEY_BYTES, open_record, record_bytes, seal_record
from rpc.block_hashes import HashChain

KEY = bytes(range(KEY_BYTES))
LAYOUT = GroupLayout.of("default", num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype="float32")


def sealed(key: bytes, payload: bytes) -> bytearray:
    record = bytearray(record_bytes(len(payload)))
    record[HEADER_BYTES:] = payload
    seal_record(key, record)
    return record


@given(st.binary(max_size=300), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
@settings(max_examples=50, deadline=None)
def test_record_when_undamaged_then_gives_its_payload(payload: bytes, key: bytes) -> None:
    opened = open_record(key, sealed(key, payload))
    assert opened is not None
    assert bytes(opened) == payload


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_record_when_any_bit_is_flipped_then_is_refused(data: st.DataObject) -> None:
    record = sealed(KEY, data.draw(st.binary(max_size=80)))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert open_record(KEY, record) is None


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, HEADER_BYTES + 19])
def test_record_when_cut_off_then_is_refused(length: int) -> None:
    assert open_record(KEY, sealed(KEY, bytes(20))[:length]) is None


def test_record_when_longer_than_it_was_then_is_refused() -> None:
    assert open_record(KEY, bytes(sealed(KEY, bytes(20))) + b"\0") is None


def test_record_when_of_another_key_then_is_refused() -> None:
    assert open_record(bytes(KEY_BYTES), sealed(KEY, b"payload")) is None


def test_record_when_sealed_with_a_key_of_another_length_then_says_so() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        seal_record(b"short", bytearray(100))


def test_keys_when_anything_differs_then_are_distinct() -> None:
    chain = HashChain(16).extend(list(range(32)), 2)
    salted = HashChain(16, salt="tenant").extend(list(range(32)), 2)
    same = TierKeys("model", LAYOUT, numerics="cpu/torch")
    domains = [
        same,
        TierKeys("mode", replace(LAYOUT, tag="ldefault"), numerics="cpu/torch"),
        TierKeys("other model", LAYOUT, numerics="cpu/torch"),
        TierKeys("model", LAYOUT, numerics="cuda/triton"),
        TierKeys("model", LAYOUT, tp_rank=0, tp_size=2, numerics="cpu/torch"),
        TierKeys("model", LAYOUT, tp_rank=1, tp_size=2, numerics="cpu/torch"),
        TierKeys("model", replace(LAYOUT, tag="draft"), numerics="cpu/torch"),
        TierKeys("model", replace(LAYOUT, num_layers=4), numerics="cpu/torch"),
        TierKeys("model", replace(LAYOUT, total_kv_heads=4), numerics="cpu/torch"),
        TierKeys("model", replace(LAYOUT, num_kv_heads=4, head_dim=2, total_kv_heads=4), numerics="cpu/torch"),
        TierKeys("model", replace(LAYOUT, num_kv_heads=4, block_size=8, total_kv_heads=4), numerics="cpu/torch"),
        TierKeys(
            "model",
            GroupLayout.of("default", num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16"),
            numerics="cpu/torch",
        ),
    ]
    keys = [key for domain in domains for key in domain.keys([*chain, *salted])]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert TierKeys("model", LAYOUT, numerics="cpu/torch").keys(chain) == same.keys(chain)
