"""What `make demo` asks and shows. That it starts and stops its servers itself is a longer test, in
`tests/integration/test_cli_up.py`."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from cli import demo
from tests.integration.cluster import Cluster

pytestmark = pytest.mark.timeout(300)  # a cluster starts within it, on busy machines too


@pytest.mark.parametrize(("statuses", "ending"), [([0, 0, 0], "everything stopped cleanly"), ([0, -9, 0], "")])
def test_demo_when_its_servers_run_then_paris_with_timeline_and_their_ends_count(
    smol: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int],
    ending: str,
) -> None:
    launched: list[dict[str, Any]] = []

    def launcher(**settings: Any) -> SimpleNamespace:
        launched.append(settings)
        router = SimpleNamespace(ready=smol.router.ready_line)
        return SimpleNamespace(router=router, start=lambda stop: None, stop=lambda hurry: statuses)

    monkeypatch.setattr(demo, "Launcher", launcher)
    monkeypatch.setattr(demo.StopSignals, "install", lambda self: None)  # they are pytest's
    assert demo.main() == (0 if ending else 1)
    assert launched == [{"model": smol.model, "port": 0, "grpc_port": 0}]
    shown, failure = capsys.readouterr()
    assert "Paris" in shown
    for label in ("queue", "prefill", "reserve", "transfer", "first decode token"):
        assert re.search(rf"^  {label} +\d+\.\d\d ms", shown, re.MULTILINE), shown
    assert re.search(r"^  cached tokens +\d+$", shown, re.MULTILINE)
    assert re.search(r"^  prefill CUDA graph +\w+$", shown, re.MULTILINE)
    assert (ending in shown) if ending else ("exit statuses [0, -9, 0]" in failure)
