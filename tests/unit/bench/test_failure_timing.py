"""The benchmark of failures strikes real requests, and says what it found."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import failure_timing
from bench.failure_timing import BLOWS, DECODE, PREFILL, Figures, Readings, rounds, rows
from tests.unit.engine.tiny_models import tiny_model


def test_rounds_when_kills_are_fewer_then_each_blow_comes_as_often_as_wanted_and_another_one_first() -> None:
    blows = list(rounds(3, 1))
    assert Counter(blows) == {blow: 1 if blow.victim else 3 for blow in BLOWS}
    assert blows[0] is BLOWS[0]
    assert blows[len(BLOWS)] is BLOWS[1]


def test_rows_when_figures_are_given_then_they_are_in_milliseconds_and_what_was_not_run_has_none() -> None:
    cancel = BLOWS[0]
    freed = {(cancel, PREFILL): [0.010, 0.020, 0.030], (cancel, DECODE): [0.001], (BLOWS[1], DECODE): []}
    table = rows(Figures(freed, Readings()))[2:]
    assert table == [
        "| cancel | prompt computed | prefill server | 3 | 20.0 | 29.8 | 30.0 |",
        "| cancel | prompt computed | decode server | 1 | 1.0 | 1.0 | 1.0 |",
    ]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_page_when_each_blow_is_struck_once_then_blocks_are_free_again_on_every_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_FAULTS", "engine.layer:delay=0.05")  # a prompt of this model takes no time otherwise
    file = tmp_path / "figures.json"
    flags = ["--model", str(tiny_model("llama")), "--dtype", "float32", "--prompt-tokens", "200", "--chunk", "32"]
    assert failure_timing.main([*flags, "--runs", "1", "--kills", "1", "--json", str(file)]) == 0
    page = capsys.readouterr().out
    assert sum(line.count("| 1 |") for line in page.splitlines()) == sum(len(blow.servers) for blow in BLOWS)
    found = json.loads(file.read_text())["freed"]
    assert [len(entry["milliseconds"]) for entry in found] == [1] * len(found)
    assert all(0 < entry["milliseconds"][0] < 30_000 for entry in found)
