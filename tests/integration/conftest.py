"""Servers that modules share, which start once where their tests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.observed import Observed
from tests.sharing import shared


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the layers of the prefill server of `direct` are slow."""
    from tests.integration.direct_servers import SLOW

    return tmp_path_factory.mktemp("direct") / SLOW


@pytest.fixture
def held(slow: Path) -> Iterator[Path]:
    """While this file is there, as it is at first, the prefill server of `direct` stands in a step of any `slow-*`."""
    from tests.integration.direct_servers import HELD

    file = slow.with_name(HELD)
    file.touch()
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def direct(request: pytest.FixtureRequest, slow: Path) -> Iterator[Cluster]:
    """A prefill and a decode server without a router. Whoever uses them leaves them running, and at rest; but for
    `test_servers_lifecycle.py`, the last one to use them, which ends them."""
    from tests.integration import direct_servers

    yield from shared(request, lambda: direct_servers.start(slow.parent))


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A pair and a router that tell a collector of traces, and files, of their requests.
    `test_written_access_logs.py`, the last one to use them, ends them."""
    from tests.integration.observed import start

    yield from shared(request, lambda: start(tmp_path_factory.mktemp("logs")))
