"""Servers that modules share, which start once where their tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.cases import FLAGS, MODEL, ROUTER_FLAGS, SLOW_DECODE, cases
from tests.integration.cluster import Cluster
from tests.sharing import shared
from tests.unit.engine.tiny_models import tiny_model


@pytest.fixture(scope="module")
def crowd(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One prefill and two decode servers with a router. Whoever uses them leaves them running, and at rest."""

    def start() -> Cluster:
        cases()
        return Cluster(
            1, 2, model=tiny_model(MODEL), prefill_flags=FLAGS, decode_flags=FLAGS, router_flags=ROUTER_FLAGS,
            prefill_env={"BATON_FAULTS": "engine.layer:delay=0.01"}, decode_env=SLOW_DECODE,
        )  # fmt: skip

    yield from shared(request, start)
