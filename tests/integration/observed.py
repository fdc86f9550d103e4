"""A cluster whose requests leave traces and lines of access logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.cluster import Cluster
from tests.unit.engine.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.integration.trace_collector import Collector


@dataclass
class Observed:
    """`logs`: the folder of the access logs, router.log, prefill.log and decode.log."""

    cluster: Cluster
    collector: Collector
    logs: Path


@contextmanager
def start(logs: Path) -> Iterator[Observed]:
    """The router itself traces nothing that its caller does not."""
    from tests.integration.trace_collector import running_collector

    with running_collector() as collector:

        def flags(role: str) -> tuple[str, ...]:
            files = ("--access-log-path", str(logs / f"{role}.log"), "--access-log-arrival")
            return ("--otlp-traces-endpoint", collector.address, *files)

        with Cluster(
            1, 1, model=tiny_model("llama"), prefill_flags=flags("prefill"), decode_flags=flags("decode"),
            router_flags=(*flags("router"), "--tracing-sample-ratio", "0"),
        ) as cluster:  # fmt: skip
            yield Observed(cluster, collector, logs)
