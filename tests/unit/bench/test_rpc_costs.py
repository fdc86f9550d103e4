"""The benchmark of what seeing costs measures a real router, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import rpc_costs
from bench.rpc_costs import ROUNDS, per_rpc
from tests.unit.router.tokenizer_folders import byte_level


def test_per_rpc_when_measured_then_each_role_has_a_value_per_round_and_metrics_cost_more_than_the_clock_alone() -> (
    None
):
    found = per_rpc(2000)
    for role in ("router", "prefill", "decode"):
        whole, clock = found[f"stage clock and metrics, {role}"], found[f"stage clock alone, {role}"]
        assert len(whole) == len(clock) == ROUNDS
        assert 0 < min(clock) < min(whole)


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_page_when_run_for_a_moment_then_no_line_is_lost_at_sigterm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_costs, "UNDER_LOAD_S", 0.3)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "figures.json"
    flags = ["--calls", "1000", "--held", "30", "--lines", "6400", "--json", str(file)]
    assert rpc_costs.main(["--model", str(tmp_path), *flags]) == 0
    page = capsys.readouterr().out
    assert "| 30 requests open |" in page
    router = json.loads(file.read_text())["router"]
    assert all(value > 0 for value in router["scrape_held_ms"])
    counts = router["sigterm"]
    assert counts["answered"] > 10
    assert counts["lost"] == 0
    assert counts["lines"] >= counts["answered"]
