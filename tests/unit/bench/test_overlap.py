"""The benchmark of overlapping transfers measures real servers, and says what it found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import overlap
from bench.overlap import FIGURES, Size, cell, kept, page
from tests.unit.engine.tiny_models import tiny_model


def test_kept_when_there_are_three_or_more_then_the_least_and_the_most_are_left_out() -> None:
    assert kept([5.0, 1.0, 4.0, 2.0, 3.0]) == [2.0, 3.0, 4.0]
    assert kept([3.0, 1.0]) == [1.0, 3.0]
    assert cell([9.0, 1.0, 4.0, 2.0, 3.0], "{:.0f}") == "3 (2–4)"


def test_page_when_figures_are_given_then_each_length_has_a_row_in_both_tables() -> None:
    size = Size(512, megabytes=11.8)
    for value in (0.5, 0.75, 1.0):
        size.book(dict.fromkeys(FIGURES, value))
    found = {"date": "d", "version": "v", "revision": "r", "cpu": "c", "cores": 2, "load_average_before": 0.0}
    arguments = argparse.Namespace(model="m", dtype="float32", threads=1, repetitions=3)
    rows = [line for line in page([size], found, arguments).splitlines() if line.startswith("| 512")]
    assert rows == [
        "| 512 | 11.8 MB | 0.8 (0.8–0.8) | 0.8 (0.8–0.8) | 75.0% (75.0%–75.0%) |",
        "| 512 | 0.8 (0.8–0.8) | 0.8 (0.8–0.8) | 0.8 (0.8–0.8) | 0.8 (0.8–0.8) |",
    ]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_main_when_run_once_then_loads_and_first_tokens_have_their_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ["--model", str(tiny_model("llama")), "--dtype", "float32", "--tokens", "64", "100000"]
    assert overlap.main([*flags, "--repetitions", "1", "--json", str(file)]) == 0
    small, whole = json.loads(file.read_text())["sizes"]
    assert small["tokens"] == 64
    assert whole["tokens"] < 100_000  # what the model takes
    for size in (small, whole):
        for name in FIGURES:
            assert len(size[name]) == 1
        assert size["exposed_ms"][0] > 0
        assert 0 < size["alone_ms"][0] < 60_000
        assert size["hidden"][0] == 1 - size["exposed_ms"][0] / size["alone_ms"][0]
        assert size["ttft_pd_ms"][0] > 0
        assert size["ttft_colocated_ms"][0] > 0
        assert size["gap_pd_ms"][0] >= 0
