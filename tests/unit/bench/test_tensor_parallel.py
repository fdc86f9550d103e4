"""The measurement of one model over several ranks: what it compares, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.report import shared_rows, sum_lines
from bench.gpu.tensor_parallel import CASES, compared

ROOT = Path(__file__).resolve().parents[3]
ONE = {
    "decode": [{"rows": 1, "context": 1025, "device_ms": 4.0, "device_ms_range": [3.9, 4.1], "execute_ms": 4.5}],
    "answers": [[5, 6, 7], [8, 9, 1]],
}
TWO = {
    "decode": [{"rows": 1, "context": 1025, "device_ms": 2.5, "device_ms_range": [2.4, 2.6], "execute_ms": 3.0,
                "floor_ms": 2.0, "of_it_sums_ms": 0.3}],
    "answers": [[5, 6, 7], [8, 3, 1]],
    "sums": [{"bytes": 16384, "nccl_us": 12.04, "one_shot_us": 5.0, "taken": "one_shot"}],
}  # fmt: skip


def test_comparison_when_two_ranks_stand_beside_one_then_times_and_common_tokens_are_said() -> None:
    assert compared({"2": TWO, "1": ONE}) == [
        "decode 1 x 1025, device_ms: 4.00 ms alone, 2.50 ms with 2 ranks, 1.60 times as fast",
        "decode 1 x 1025, execute_ms: 4.50 ms alone, 3.00 ms with 2 ranks, 1.50 times as fast",
        "2 ranks: of 24 greedy tokens the first [3, 1] are those of one rank",
    ]


def test_page_when_an_engine_failed_then_the_figures_of_the_others_are_there() -> None:
    report = {"engines": {"llama": {"2": TWO, "1": {"failed": "status 1"}}}}
    assert list(shared_rows(report)) == [
        "| llama, decode, 1 x 1025 | 2 | 2.00 (0.30 sums) | 2.50 (2.40–2.60); wall clock 3.00 | 1.25 |"
    ]
    assert list(sum_lines(report)) == ["* 16,384 bytes: nccl 12.0, one_shot 5.0; taken: one_shot"]


@pytest.mark.extended
def test_measurement_when_it_runs_on_the_cpu_then_one_and_two_ranks_give_the_same_tokens(tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.gpu.tensor_parallel", "--device", "cpu", "--shapes", "qwen3-8b"]
    ended = subprocess.run(
        [*command, "--save", str(saved)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    engines = json.loads(saved.read_text())["engines"]["qwen3-8b"]
    assert set(engines) == {"1", "2"}
    cases = CASES["cpu"]
    for ranks, report in engines.items():
        assert [one["context"] for one in report["decode"]] == [context for _, context in cases.decode]
        assert [one["tokens"] for one in report["prompts"]] == list(cases.prompts)
        assert [one["requests"] for one in report["steps"]] == [requests for requests, _ in cases.steps]
        assert bool(report["sums"]) == (ranks == "2")
    assert engines["1"]["answers"] == engines["2"]["answers"] != []
