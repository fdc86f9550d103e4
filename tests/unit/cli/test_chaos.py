"""Flags of `baton chaos` that are looked at before anything starts, and the model that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.chaos.tiny_model import make_tiny_model
from cli.chaos import main
from cli.model_prepare import check_folder


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--requests", "0"], "--requests 0"),
        (["--decode-servers", "0"], "--decode-servers 0"),
        (["--seconds", "0"], "--seconds 0"),
        (["--intensity", "-1"], "--intensity -1"),
        (["--faults", "kill,quake"], "'quake'"),
        (["--server-flags", "'"], "--server-flags"),
        (["--points", "cache_store.no_such:drop"], "'cache_store.no_such'"),
        (["--points", "cache_store.release:corrupt"], "cache_store.release has no action corrupt"),
    ],
)
def test_flags_when_one_cannot_be_then_it_is_named_and_nothing_starts(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("baton chaos: ") and error.count("\n") == 1
    assert named in error


def test_tiny_model_then_it_is_a_complete_folder_and_the_same_each_time(tmp_path: Path) -> None:
    folder, again = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b")
    check_folder(folder)
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == tokens
