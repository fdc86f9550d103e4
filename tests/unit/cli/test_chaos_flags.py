"""Wrong flags of `baton chaos` are found out before anything is started, and not after minutes of work."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import chaos


@pytest.mark.parametrize(
    "flags",
    [
        ("--requests", "0"),
        ("--seconds", "nan"),
        ("--faults", "kil"),
        ("--points", "engine.step:delay=0,nth=0"),
        ("--model", "{folder}/absent"),
        ("--json", "{folder}/absent/report.json"),
        ("--json", "{folder}"),
        ("--keep", "{folder}/absent"),
        ("--keep", "{folder}/file"),
        ("--server-flags", "'"),
    ],
)
def test_flag_when_it_is_wrong_then_status_2_and_one_line_that_names_it(
    flags: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "file").write_text("")
    name, value = flags[0], flags[1].format(folder=tmp_path)
    assert chaos.main([name, value]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("baton chaos: ") and (name in line or name == "--points")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
