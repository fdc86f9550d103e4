"""A failure is one line in the log, where it ends, however often the request was tried."""

from __future__ import annotations

import logging

import pytest

from rpc.errors import BatonError, ErrorCode
from tests.unit.router.scripted_cluster import make_request, running_cluster
from tests.unit.router.scripted_server import fails


def lines(caplog, level, text=""):
    ours = [record for record in caplog.records if record.name.partition(".")[0] in ("router", "rpc")]
    return [record for record in ours if record.levelno >= level and text in record.message]


@pytest.mark.invariant("RPC-12")
async def test_log_when_every_attempt_fails_then_one_error_after_the_last(caplog):
    async with running_cluster(2, 2, retry_budget_ratio=10.0) as cluster:
        for server in cluster.servers:
            if server.role == "prefill":
                server.at["start"] = fails(ErrorCode.MALLOC_FAILED)
        with caplog.at_level(logging.INFO, "router"), pytest.raises(BatonError) as caught:
            await cluster.collect(make_request(request_id="the-request"))
        assert caught.value.code is ErrorCode.MALLOC_FAILED
        (error,) = lines(caplog, logging.ERROR)
        assert (error.request_id, error.code) == ("the-request", "MALLOC_FAILED")
        assert len(lines(caplog, logging.INFO, "trying again")) == 3


async def test_log_when_the_request_is_private_then_its_failure_is_id_and_code_alone(caplog):
    async with running_cluster(2, 2, retry_budget_ratio=10.0) as cluster:
        for server in cluster.servers:
            if server.role == "prefill":
                server.at["start"] = fails(ErrorCode.MALLOC_FAILED)
        with caplog.at_level(logging.INFO, "router"), pytest.raises(BatonError):
            with cluster.open_requests.open("the-request", api="completions", private=True) as owner:
                await cluster.collect(make_request(request_id="the-request", owner=owner))
        (error,) = lines(caplog, logging.ERROR)
        assert (error.message, error.request_id) == ("request failed: MALLOC_FAILED", "the-request")
        assert not hasattr(error, "cause")
        attempts = lines(caplog, logging.INFO, "trying again")
        assert {line.message for line in attempts} == {"attempt failed, trying again: MALLOC_FAILED"}


@pytest.mark.invariant("RPC-12")
async def test_log_when_an_attempt_fails_and_another_serves_then_there_is_no_error(caplog):
    async with running_cluster(2, 2) as cluster:
        for server in cluster.servers:
            if server.role == "prefill":
                server.at["start"] = fails(ErrorCode.MALLOC_FAILED, times=1)
        with caplog.at_level(logging.INFO, "router"):
            await cluster.collect(make_request(request_id="the-request"))
        assert lines(caplog, logging.WARNING) == []
        assert lines(caplog, logging.INFO, "trying again")
