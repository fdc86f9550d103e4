"""GPUs of servers that start together."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cli.gpu_places import Place, gpus_of, places, ranks_of
from cli.launch import Launcher

GPUS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [
        (0, [1, 1], [Place(), Place()]),
        (4, [2], [Place()]),  # alone it takes what it finds
        (1, [1, 1], [Place(None, 0.45)] * 2),
        (1, [1, 1, 1, 1], [Place(None, 0.22)] * 4),
        (2, [1, 1], [Place("GPU-a"), Place("GPU-b")]),
        (4, [2, 2], [Place("GPU-a,GPU-b"), Place("GPU-c,GPU-d")]),
        (2, [1, 1, 1], [Place("GPU-a", 0.45), Place("GPU-b"), Place("GPU-a", 0.45)]),
        (2, [2, 2], [Place("GPU-a,GPU-b", 0.45)] * 2),
        (3, [2, 2], [Place("GPU-a,GPU-b", 0.45), Place("GPU-c,GPU-a", 0.45)]),
        (1, [2, 1], [Place(None, 0.3)] * 2),
    ],
)
def test_places_when_servers_start_together_then_each_gpu_is_given_out_once_or_shared_evenly(
    gpus: int, ranks: list[int], expected: list[Place]
) -> None:
    assert places(GPUS[:gpus], ranks) == expected


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [([], 1), (["-tp", "2"], 2), (["--tp-size=4", "--threads", "2"], 4), (["--tensor-parallel-size", "two"], 1)],
)
def test_ranks_when_flags_say_them_then_they_are_those(flags: list[str], ranks: int) -> None:
    assert ranks_of(flags) == ranks


def driver(folder: Path, text: str) -> dict[str, str]:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\n{text}\n")
    tool.chmod(0o755)
    return {"PATH": str(folder)}


def test_gpus_when_there_is_a_driver_then_those_it_names_of_those_that_are_visible(tmp_path: Path) -> None:
    environ = driver(tmp_path, "import sys\nassert '--query-gpu=uuid' in sys.argv\nprint('GPU-a\\nGPU-b\\n')")
    assert gpus_of(environ) == ["GPU-a", "GPU-b"]
    assert gpus_of({**environ, "CUDA_VISIBLE_DEVICES": "3, 1"}) == ["3", "1"]
    assert gpus_of({**environ, "CUDA_VISIBLE_DEVICES": "3,-1,1"}) == ["3"]
    assert gpus_of({**environ, "CUDA_VISIBLE_DEVICES": ""}) == []
    assert gpus_of(driver(tmp_path, "import sys\nprint('No devices were found')\nsys.exit(6)")) == []
    assert gpus_of({"PATH": os.devnull, "CUDA_VISIBLE_DEVICES": "0"}) == []


def test_launcher_when_servers_share_a_gpu_then_each_has_its_part_unless_its_flags_say_otherwise() -> None:
    launcher = Launcher("m", prefill_servers=1, decode_servers=2, gpus=["GPU-a", "GPU-b"], environ={"X": "1"})
    launcher.decode_flags = ["--gpu-memory-utilization", "0.3"]
    launcher._share_gpus()
    assert launcher._environ("decode-0")["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert launcher._environ("decode-1") == {**launcher._environ(), "CUDA_VISIBLE_DEVICES": "GPU-a"}
    prefill, decode = launcher._server("prefill", 0, []), launcher._server("decode", 1, launcher.decode_flags)
    assert prefill.arguments[-2:] == ["--gpu-memory-utilization", "0.45"]
    assert decode.arguments[-4:] == ["--gpu-memory-utilization", "0.45", "--gpu-memory-utilization", "0.3"]
