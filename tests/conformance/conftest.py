"""Fixtures of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import live_cluster
from tests.conformance.live_cluster import Live
from tests.extent import extent
from tests.integration.cluster import Cluster
from tests.sharing import shared


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    """The cluster that all modules of a run share."""
    yield from live_cluster.shared(request)


@pytest.fixture(scope="session")
def holding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files by which the servers of `pairs` are held."""
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest, holding: Path) -> Iterator[Cluster]:
    """The servers that some tests of right tokens share, each with a router of its own."""
    from tests.conformance import token_servers  # PyTorch comes along

    yield from shared(request, lambda: token_servers.start(holding))


@pytest.fixture(scope="module")
def smol(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """SmolLM2, a real model, whose answers may keep to grammars."""

    def start() -> Cluster:
        from cli.model_prepare import prepare_model

        grammars = ("--grammar-backend", "xgrammar")
        servers = (*grammars, "--num-kv-blocks", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "32")
        router = (*grammars, "--served-model-name", "smol")
        return Cluster(
            1, extent(1, 2), model=prepare_model(None, None, False), prefill_flags=servers, decode_flags=servers,
            router_flags=router, start_limit_s=120,
        )  # fmt: skip

    yield from shared(request, start)
