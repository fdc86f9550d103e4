"""The benchmark of metrics and access log measures two real routers and says what it found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import router_overhead
from bench.router_overhead import Turn, interval, throughput_rows
from tests.unit.router.tokenizer_folders import byte_level


def test_interval_when_ratios_scatter_then_it_holds_their_median_and_is_narrower_than_they_are() -> None:
    ratios = [0.9, 0.95, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.05, 1.1]
    low, high = interval(ratios)
    assert 0.9 < low <= 1.0 <= high < 1.1
    assert interval([0.98] * 5) == (0.98, 0.98)


def test_rows_when_rounds_are_given_then_ratios_are_of_the_turns_of_one_round() -> None:
    rounds = [(Turn(98.0, 0.00204), Turn(100.0, 0.002)), (Turn(49.0, 0.00408), Turn(50.0, 0.004))]
    rows = throughput_rows(rounds)
    assert "| **0.9800** |" in rows[2]
    assert "| **1.0200** |" in rows[3]


def test_page_when_run_for_a_moment_then_each_table_has_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    flags = ["--rounds", "2", "--requests", "8", "--connections", "4", "--tokens", "4", "--calls", "1000"]
    assert router_overhead.main(["--model", str(tmp_path), *flags, "--held", "50"]) == 0
    page = capsys.readouterr().out
    for row in ("requests per second", "processor time per request, ms", "stage clock and metrics", "50 requests open"):
        (line,) = re.findall(rf"^\| {row} \|.*$", page, re.MULTILINE)
        figures = [float(text.replace(",", "")) for text in re.findall(r"[\d,]+\.?\d*", line.split("|", 2)[2])]
        assert figures
        assert all(figure > 0 for figure in figures), line
