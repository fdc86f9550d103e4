"""What `--kv-tier` takes, and how it refuses the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cache_store.tiers.mooncake import DEFAULT_SEGMENT_BYTES, LEAST_SEGMENT_BYTES, MooncakeAddress, open_tier
from rpc.errors import BatonError, ErrorCode


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("mooncake://10.0.0.1:50051", MooncakeAddress("10.0.0.1", 50051)),
        ("mooncake://store.internal:1/", MooncakeAddress("store.internal", 1)),
        ("mooncake://[fd00::1]:50051?host=fd00::2", MooncakeAddress("fd00::1", 50051, own_host="fd00::2")),
        ("mooncake://m:5?segment_bytes=0", MooncakeAddress("m", 5, 0)),
        (
            f"mooncake://m:5?host=10.0.0.7&segment_bytes={LEAST_SEGMENT_BYTES}",
            MooncakeAddress("m", 5, LEAST_SEGMENT_BYTES, "10.0.0.7"),
        ),
    ],
)
def test_address_when_complete_then_is_taken(address: str, expected: MooncakeAddress) -> None:
    assert MooncakeAddress.parse(address) == expected


def test_address_when_it_names_no_segment_then_the_default_is_given() -> None:
    assert MooncakeAddress.parse("mooncake://m:5").segment_bytes == DEFAULT_SEGMENT_BYTES


def test_address_when_ipv6_then_the_master_is_in_brackets() -> None:
    assert MooncakeAddress.parse("mooncake://[fd00::1]:50051").master == "[fd00::1]:50051"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("mooncake://m", "HOST:PORT"),
        ("mooncake://:5", "HOST:PORT"),
        ("mooncake://m:0", "HOST:PORT"),
        ("mooncake://m:99999", "range"),
        ("mooncake://m:x", "x"),
        ("redis://m:5", "mooncake://"),
        ("mooncake://m:5/path", "HOST:PORT"),
        ("mooncake://m:5#part", "HOST:PORT"),
        ("mooncake://m:5?segment_bytes=4096", str(LEAST_SEGMENT_BYTES)),
        ("mooncake://m:5?segment_bytes=-1", "segment_bytes"),
        ("mooncake://m:5?segment_bytes=1e9", "segment_bytes"),
        ("mooncake://m:5?segment_bytes=", "segment_bytes"),
        ("mooncake://m:5?host=a%20b", "host"),
        ("mooncake://m:5?segments=1", "'segments'"),
        ("mooncake://m:5?segment_bytes", "segment_bytes"),
    ],
)
def test_address_when_wrong_then_is_refused_by_name_of_the_flag(address: str, says: str) -> None:
    with pytest.raises(BatonError) as caught:
        MooncakeAddress.parse(address)
    assert caught.value.code == ErrorCode.INVALID_PARAMS
    assert "--kv-tier" in str(caught.value) and says in str(caught.value)


def test_address_when_it_has_a_password_then_is_refused_without_repeating_it() -> None:
    with pytest.raises(BatonError) as caught:
        MooncakeAddress.parse("mooncake://me:secret@m:5")
    assert "--kv-tier" in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "libibverbs.so.1"),
        ("import os; os._exit(3)", "status 3"),
    ],
    ids=["a library is missing", "it ends its process"],
)
def test_tier_when_the_client_cannot_be_loaded_then_the_start_is_refused_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, says: str
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(BatonError) as caught:
        open_tier("mooncake://127.0.0.1:1", 4096, 0.5)
    assert caught.value.code == ErrorCode.INVALID_PARAMS
    for text in ("--kv-tier", "extra `mooncake`", "libnuma1", says):
        assert text in str(caught.value)
