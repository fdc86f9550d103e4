"""Which device an engine takes, what servers say about its graphs and memory, and how start-up shows its progress."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from decode_server.settings import DecodeSettings
from engine.config import EngineConfig
from engine.device import resolve_device
from engine.loader.errors import ModelLoadError
from engine.progress import Progress
from front.settings import engine_config
from rpc.settings import SettingsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def configured(folder: Path, *arguments: str) -> EngineConfig:
    settings = DecodeSettings.parse(["--model", str(folder), *arguments], {})
    return engine_config(settings, "decode", allow_local_prefill=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--enable-cuda-graph"], True),
        (["--no-enable-cuda-graph"], False),
        (["--enforce-eager"], False),
        (["--disable-cuda-graph"], False),
        (["--enforce-eager", "--no-enable-cuda-graph"], False),
    ],
)
def test_graphs_when_set_on_the_command_line_then_the_engine_is_told(
    folder: Path, arguments: list[str], expected: bool | None
) -> None:
    assert configured(folder, *arguments).enable_cuda_graph is expected


def test_graphs_when_two_flags_contradict_then_both_are_named(folder: Path) -> None:
    with pytest.raises(SettingsError, match="--enable-cuda-graph and --enforce-eager"):
        configured(folder, "--enable-cuda-graph", "--enforce-eager")


@pytest.mark.parametrize(
    ("text", "expected"), [("1,8,64", (1, 8, 64)), ("64", (64,)), ("40:16", (16, 32, 40)), ("8,1,8", (1, 8))]
)
def test_decode_sizes_when_written_in_any_form_then_are_sorted(
    folder: Path, text: str, expected: tuple[int, ...]
) -> None:
    for flag in ("--decode-capture-config", "--cuda-graph-sizes"):
        assert configured(folder, flag, text).decode_capture_sizes == expected


@pytest.mark.parametrize("text", ["0", "1,x", "65", "-3"])
def test_decode_sizes_when_one_cannot_be_then_the_flag_is_named(folder: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="--decode-capture-config"):
        configured(folder, "--decode-capture-config", text)


def test_settings_when_nothing_is_said_then_the_engine_chooses(folder: Path) -> None:
    config = configured(folder)
    assert (config.device, config.block_size, config.decode_capture_sizes) == ("auto", 0, ())
    assert config.gpu_memory_utilization == 0.9
    config.check()


def test_device_when_named_then_it_is_taken_or_refused() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ModelLoadError, match="--device 'tpu'"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match="finds no CUDA device"):
            resolve_device("cuda")


def test_progress_when_there_is_no_terminal_then_lines_come_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.progress.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "engine.progress"), Progress("reading weights", 16, "GB") as progress:
        for done in range(1, 17):
            now[0] += 1.5
            progress.update(done)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "reading weights: 4 of 16 GB"
    assert lines[-1] == "reading weights: done"
    assert 4 <= len(lines) <= 6
    assert caplog.records[-1].seconds == 24.0  # type: ignore[attr-defined]


def test_progress_when_the_step_fails_then_it_is_not_said_to_be_done(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "engine.progress"),
        pytest.raises(ValueError, match="broken"),
        Progress("reading weights", 1),
    ):
        raise ValueError("broken")
    assert not caplog.records
