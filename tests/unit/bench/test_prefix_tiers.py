"""The benchmark of tiers measures real servers, checks where the blocks came from, and says what it found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import prefix_tiers
from bench.prefix_tiers import page
from tests.unit.engine.tiny_models import tiny_model


def test_page_when_places_were_measured_then_each_has_a_row_with_its_share_of_the_computed_one() -> None:
    found = {"date": "d", "version": "v", "revision": "r", "cpu": "c", "cores": 2, "load_average_before": 0.0}
    arguments = argparse.Namespace(model="m", dtype="bfloat16", threads=2, tokens=2000, repetitions=3)
    seconds = {"computed": [1.0, 1.2, 1.4], "pool": [0.06], "disk": [0.12, 0.1, 0.15]}
    assert page(seconds, {"disk": [0.03, 0.05, 0.04]}, found, arguments).splitlines()[-3:] == [
        "| computed | 1200 (1000–1400) | 100.0% |  |",
        "| pool | 60 (60–60) | 5.0% |  |",
        "| disk | 120 (100–150) | 10.0% | 40 |",
    ]


@pytest.mark.parametrize("flags", [["--tokens", "100"], ["--repetitions", "0"], ["--threads", "0"]])
def test_main_when_a_flag_makes_no_sense_then_says_so(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefix_tiers.main(flags)
    assert "--tokens 480 or more" in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_main_when_run_once_then_every_place_has_its_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ["--model", str(tiny_model("llama")), "--dtype", "float32", "--threads", "1", "--tokens", "480"]
    assert prefix_tiers.main([*flags, "--repetitions", "1", "--kill", "--json", str(file)]) == 0
    seconds = json.loads(file.read_text())["ttft_seconds"]
    assert {place: len(values) for place, values in seconds.items()} == {
        "computed": 2, "pool": 1, "host": 1, "disk": 1
    }  # fmt: skip
    assert all(value > 0 for values in seconds.values() for value in values)
    fetched = json.loads(file.read_text())["fetch_seconds"]
    assert {place: 0 < values[0] < seconds[place][0] for place, values in fetched.items()} == {
        "host": True,
        "disk": True,
    }
