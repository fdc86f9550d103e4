"""The loop of the NIXL process, as far as it needs no NIXL."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest

from cache_store.nixl.process import _readable

HIGH = 1100  # more than `select.select` takes


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] <= HIGH:
        pytest.skip(f"no more than {before[1]} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], HIGH + 1), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_wait_when_the_engine_has_very_many_descriptors_then_frames_are_seen_all_the_same(many_descriptors) -> None:
    theirs, low = socket.socketpair()
    with theirs, low, socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, HIGH)) as own:
        assert own.fileno() >= HIGH
        assert not any(_readable(own, pause) for pause in (0.0, 0.0003, 0.002))
        theirs.send(b"x")
        assert all(_readable(own, pause) for pause in (None, 0.0003, 0.002))
