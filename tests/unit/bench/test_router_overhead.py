"""The benchmark of metrics and access log measures two real routers and says what it found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import router_overhead
from bench.router_overhead import Turn, interval, median_ratio, quiet_ratio, throughput_rows
from tests.unit.router.tokenizer_folders import byte_level


def test_interval_when_ratios_scatter_then_it_holds_their_median_and_is_narrower_than_they_are() -> None:
    rounds = [(ratio, 1.0) for ratio in (0.9, 0.95, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.05, 1.1)]
    low, high = interval(rounds, median_ratio)
    assert 0.9 < low <= 1.0 <= high < 1.1
    assert interval([(0.98, 1.0)] * 5, median_ratio) == (0.98, 0.98)


def test_quiet_ratio_when_some_turns_were_disturbed_then_they_do_not_count() -> None:
    rounds = [(1.02, 1.0), (1.02, 9.0), (5.0, 1.0), (1.02, 1.0), (7.0, 8.0), (1.02, 1.0), (1.02, 1.0), (1.02, 3.0)]
    assert quiet_ratio(rounds) == 1.02


def test_rows_when_rounds_are_given_then_ratios_are_of_the_turns_of_one_round() -> None:
    rounds = [(Turn(98.0, 0.00204), Turn(100.0, 0.002)), (Turn(49.0, 0.00408), Turn(50.0, 0.004))]
    rates, times, quiet = throughput_rows(rounds)[2:]
    assert "| **0.9800** |" in rates
    assert "| **1.0200** |" in times
    assert "| 2.040 | 2.000 | **1.0200** |" in quiet


@pytest.mark.extended
def test_page_when_run_for_a_moment_then_each_table_has_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    flags = ["--rounds", "2", "--requests", "8", "--connections", "4", "--tokens", "4", "--calls", "1000"]
    assert router_overhead.main(["--model", str(tmp_path), *flags, "--held", "50"]) == 0
    page = capsys.readouterr().out
    for row in (
        "requests per second, median",
        "processor time per request, lower quartile, ms",
        "stage clock and metrics",
        "50 requests open",
    ):
        (line,) = re.findall(rf"^\| {row} \|.*$", page, re.MULTILINE)
        figures = [float(text.replace(",", "")) for text in re.findall(r"[\d,]+\.?\d*", line.split("|", 2)[2])]
        assert figures
        assert all(figure > 0 for figure in figures), line
