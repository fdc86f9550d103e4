from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import BatonError, ErrorCode
from rpc.ids import check_request_id, new_request_id, request_key, split_request_key, valid_request_id

IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)


@pytest.mark.parametrize("text", ["a", "A-1.b_c:d", "x" * 128, pytest.param(new_request_id(), id="new")])
def test_valid_request_id_when_in_the_alphabet(text: str) -> None:
    assert valid_request_id(text)
    assert check_request_id(text) == text


@pytest.mark.parametrize("text", ["", "x" * 129, "a#b", "a b", "a\n", "é", "a/b", "²"])
def test_request_id_when_not_in_the_alphabet_is_605(text: str) -> None:
    assert not valid_request_id(text)
    with pytest.raises(BatonError) as caught:
        check_request_id(text)
    assert caught.value.code is ErrorCode.INVALID_PARAMS
    assert caught.value.param == "request_id"


@given(IDS, st.integers(0, 999_999_999))
def test_request_key_splits_into_its_parts(request_id: str, attempt: int) -> None:
    key = request_key(request_id, attempt)
    parts = split_request_key(key)
    assert (parts.request_id, parts.attempt, len(parts.nonce)) == (request_id, attempt, 8)
    assert str(parts) == key


def test_request_key_when_made_twice_differs() -> None:
    assert request_key("a", 0) != request_key("a", 0)
    assert request_key("a", 1, "0123abcd") == "a#1.0123abcd"


@pytest.mark.parametrize(
    "key", ["", "a", "a#0", "a#0.", "a#0.123", "a#-1.0123abcd", "a#01.0123abcd", "a#0.0123ABCD", "a#0.0123abcd\n"]
)
def test_split_when_malformed_is_605(key: str) -> None:
    with pytest.raises(BatonError) as caught:
        split_request_key(key)
    assert caught.value.code is ErrorCode.INVALID_PARAMS


@pytest.mark.parametrize(("request_id", "attempt", "nonce"), [("a#b", 0, None), ("a", -1, None), ("a", 0, "xyz")])
def test_request_key_of_parts_that_cannot_be_split_raises(request_id: str, attempt: int, nonce: str | None) -> None:
    with pytest.raises(ValueError):
        request_key(request_id, attempt, nonce)
