"""How often a peer is tried, and how long one is told that its KV is not wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import Node, assert_clean, key_of, nodes, settings, until

KEY = key_of(1)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.mark.parametrize(
    "code", [ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED, ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED]
)
@pytest.mark.parametrize(("retries", "serves"), [(0, False), (1, False), (2, True)])
def test_connection_when_it_fails_twice_then_it_is_tried_as_often_as_the_setting_says(
    code: ErrorCode, retries: int, serves: bool
) -> None:
    faults.arm(f"cache_store.handshake:raise={code.name},side=decode,times=2")
    with nodes(Node("prefill", seed=1), Node("decode", settings(connect_retries=retries), seed=2)) as (prefill, decode):
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        if serves:
            decode.load_done()
            assert np.array_equal(decode.blocks([1]), prefill.blocks([5]))
        else:
            failed = decode.load_failed()
            assert failed.error.code is code
            assert faults.fired("cache_store.handshake") == 1 + retries
            prefill.agent.fail(KEY, failed.error)
            decode.agent.cancel_load(KEY, failed.error)
        prefill.lease_ended()
        assert_clean(prefill, decode)


def test_connection_when_it_fails_then_all_who_waited_for_it_fail_with_it(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    point = "cache_store.handshake"
    faults.arm(f"{point}:delay=30,side=decode,while={hold};{point}:raise=CACHE_STORE_LOAD_CONNECT_FAILED,side=decode")
    keys = [key_of(number) for number in range(4)]
    with nodes(Node("prefill", seed=1), Node("decode", seed=2)) as (prefill, decode):
        for number, key in enumerate(keys):
            decode.load(prefill.source, key, [number])
        peer = decode.agent._pulling.peers.get(prefill.address)
        until(lambda: len(peer.lock._waiters or ()) == len(keys) - 1, "the others wait")  # type: ignore[attr-defined]
        hold.unlink()
        for _ in keys:
            failed = decode.load_failed()
            assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED
            decode.agent.cancel_load(failed.request_key, failed.error)
        assert faults.fired(point) == 2, "one attempt, by both rules"
        decode.load(prefill.source, key_of(9), [9])  # whoever comes later tries again
        decode.agent.cancel_load(key_of(9), decode.load_failed().error)
        assert faults.fired(point) > 2
        assert_clean(prefill, decode)


@pytest.mark.parametrize("code", [ErrorCode.INCOMPATIBLE_PEER, ErrorCode.CACHE_STORE_CALL_PREFILL_TIMEOUT])
def test_connection_when_it_fails_otherwise_then_it_is_not_tried_again(code: ErrorCode) -> None:
    faults.arm(f"cache_store.handshake:raise={code.name},side=decode")
    with nodes(Node("prefill", seed=1), Node("decode", settings(connect_retries=5), seed=2)) as (prefill, decode):
        decode.load(prefill.source, KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is code
        assert faults.fired("cache_store.handshake") == 1
        decode.agent.cancel_load(KEY, failed.error)
        assert_clean(prefill, decode)


def test_cancel_when_the_peer_does_not_answer_then_it_is_told_for_no_longer_than_its_limit() -> None:
    """That of other calls is a minute here, and the peer takes half of one."""
    limits = settings(cancel_timeout_s=0.2, call_timeout_s=60.0)
    faults.arm("cache_store.release:delay=30,side=prefill;cache_store.send_piece:delay=30,layer=1")
    with nodes(Node("prefill", seed=1), Node("decode", limits, seed=2)) as (prefill, decode):
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        until(lambda: decode.count("kv_transfer_pieces_total", result="ok") == 1, "a block has come")
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        assert decode.load_failed().error.code is ErrorCode.CANCELLED
        until(lambda: faults.fired("cache_store.release") == 1, "the word has come to P")
        until(lambda: not decode.agent._tasks, "it is waited for no longer")
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()
        assert_clean(prefill, decode)
