"""Servers that modules share, which start once where their tests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cases import FLAGS, MODEL, ROUTER_FLAGS, cases, slow_decode
from tests.integration.cluster import Cluster
from tests.sharing import shared
from tests.unit.engine.tiny_models import tiny_model


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there (`lingering`), answers are in their middle for long."""
    return tmp_path_factory.mktemp("chaos") / "slow"


@pytest.fixture(scope="module")
def crowd(request: pytest.FixtureRequest, slow: Path) -> Iterator[Cluster]:
    """One prefill and two decode servers with a router. Whoever uses them leaves them running, and at rest."""

    def start() -> Cluster:
        cases()
        return Cluster(
            1, 2, model=tiny_model(MODEL), prefill_flags=FLAGS, decode_flags=FLAGS, router_flags=ROUTER_FLAGS,
            prefill_env={"BATON_FAULTS": "engine.layer:delay=0.01"}, decode_env=slow_decode(slow),
        )  # fmt: skip

    yield from shared(request, start)
