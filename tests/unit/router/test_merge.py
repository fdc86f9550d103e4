from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2
from router.merge import MAX_WAITING, TokenMerge
from rpc.errors import BatonError, ErrorCode


def out(index: int, token_id: int | None = None) -> common_pb2.TokenOutput:
    return common_pb2.TokenOutput(index=index, token_id=index * 10 if token_id is None else token_id)


def test_add_when_the_first_token_is_repeated_then_it_comes_once():
    merge = TokenMerge()
    assert [t.index for t in merge.add([out(0)])] == [0]
    assert merge.add([out(0)]) == []
    assert [t.index for t in merge.add([out(0), out(1), out(2)])] == [1, 2]
    assert merge.token_ids == [0, 10, 20]


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=20))
def test_add_when_tokens_come_in_any_order_and_again_then_each_index_comes_once_in_order(order, again):
    merge, came = TokenMerge(), []
    for index in [*order, *again]:
        came += merge.add([out(index)])
    assert [t.index for t in came] == list(range(12))
    assert [t.token_id for t in came] == [i * 10 for i in range(12)]
    assert merge.complete


@pytest.mark.parametrize("waiting", [0, 5])
def test_add_when_two_servers_disagree_then_it_is_a_failure_of_the_later_one(waiting):
    merge = TokenMerge()
    merge.add([out(waiting, 1)])
    with pytest.raises(BatonError) as caught:
        merge.add([out(waiting, 2)])
    assert caught.value.code is ErrorCode.REMOTE_GENERATE_FAILED
    assert caught.value.breach == "missing_result"
    assert caught.value.spec.retryable


@pytest.mark.parametrize("field", ["index", "token_id"])
def test_add_when_a_field_is_absent_then_it_is_not_read_as_zero(field):
    message = out(0, 0)
    message.ClearField(field)
    with pytest.raises(BatonError) as caught:
        TokenMerge().add([message])
    assert caught.value.breach == "absent_field"


def test_add_when_a_token_never_comes_then_what_waits_is_bounded():
    merge = TokenMerge()
    with pytest.raises(BatonError):
        merge.add(out(index) for index in range(1, MAX_WAITING + 3))
    assert not merge.complete
    merge.forget_waiting()
    assert merge.complete
    assert [t.index for t in merge.add([out(0), out(1)])] == [0, 1]
