"""Fixtures of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import live_cluster
from tests.conformance.live_cluster import Live


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    """The cluster that all modules of a run share."""
    yield from live_cluster.shared(request)
