"""Fixtures of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import live_cluster
from tests.conformance.live_cluster import Live
from tests.extent import extent
from tests.integration.cluster import Cluster


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    """The cluster that all modules of a run share."""
    yield from live_cluster.shared(request)


@pytest.fixture(scope="session")
def pairs() -> Iterator[Cluster]:
    """The servers that some tests of right tokens share, each with a router of its own."""
    from tests.conformance import token_servers  # PyTorch comes along

    with token_servers.start() as running:
        yield running


@pytest.fixture(scope="session")
def smol() -> Iterator[Cluster]:
    """SmolLM2, a real model, whose answers may keep to grammars."""
    from cli.model_prepare import prepare_model

    folder = prepare_model(None, None, False)
    grammars = ("--grammar-backend", "xgrammar")
    servers = (*grammars, "--num-kv-blocks", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "32")
    router = (*grammars, "--served-model-name", "smol")
    with Cluster(
        1, extent(1, 2), model=folder, prefill_flags=servers, decode_flags=servers, router_flags=router,
        start_limit_s=120,
    ) as running:  # fmt: skip
        yield running
