"""Folders of tiny models, which many processes ask for at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine import tiny_models
from tests.unit.engine.tiny_models import tiny_model


def test_tiny_model_when_many_ask_at_once_then_one_makes_it_and_one_that_has_lost_a_file_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    save = tiny_models._save_model

    def counted(config: Any, folder: Path) -> None:
        made.append(folder)
        save(config, folder)

    monkeypatch.setenv("BATON_TINY_MODELS", str(tmp_path))
    monkeypatch.setattr(tiny_models, "_save_model", counted)
    with ThreadPoolExecutor(6) as pool:
        folders = set(pool.map(tiny_model, ["llama"] * 6))
    [folder] = folders
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(made) == 1 and set(files) == set(tiny_models._FILES)

    (folder / "config.json").unlink()
    assert tiny_model("llama") == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert len(made) == 2 and {path for path in tmp_path.iterdir() if path.is_dir()} == {folder}
