"""Runs whose workers die or stop: every other test is run, and the run says what has happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extent import extended

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
PLUGIN = """
import os
import signal
import pytest
from tests import scheduling

def pytest_configure(config):
    scheduling.configure(config, worker="PYTEST_XDIST_WORKER" in os.environ)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("told to stop"))

def pytest_xdist_make_scheduler(config, log):
    return scheduling.make_scheduler(config, log)
"""
PASSES = "def test_a(): pass\ndef test_b(): pass\n"


def run(folder: Path, files: dict[str, str], workers: int, stall_s: float = LIMIT_S) -> tuple[int, str]:
    """The status and the output of the run of those files."""
    for name, text in {"conftest.py": PLUGIN, "pytest.ini": "[pytest]\n", **files}.items():
        (folder / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"BATON_TESTS_STALL_S": str(stall_s), "TMPDIR": str(folder)}  # apart from the run that this is in
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    options = [*plugins, "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=environment,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("workers", "end"),
    [
        (1, "os.kill(os.getpid(), 9)"),
        extended(2, "os.kill(os.getpid(), 9)"),
        extended(1, "os._exit(3)"),
        (2, "os._exit(3)"),
    ],
)
def test_run_when_a_worker_dies_then_all_others_are_run_and_the_run_says_how_it_ended(
    workers: int, end: str, tmp_path: Path
) -> None:
    dies = f"import os\ndef test_before(): pass\ndef test_dies(): {end}\ndef test_after(): pass\n"
    files = {f"test_{number}.py": PASSES for number in range(8)} | {
        "test_2_dies.py": dies,
        "test_7_one.py": "def test_single(): pass\n",
    }
    status, output = run(tmp_path, files, workers)
    assert status == 1, output
    assert "1 failed, 19 passed" in output, output
    assert "crashed while running 'test_2_dies.py::test_dies'" in output, output
    assert "its process ended with " + ("SIGKILL" if "kill" in end else "status 3") in output, output


@pytest.mark.parametrize("workers", [1, extended(2)])
def test_run_when_its_last_test_kills_the_worker_then_it_ends(workers: int, tmp_path: Path) -> None:
    files = {f"test_{number}.py": PASSES for number in range(3)} | {
        "test_z.py": "def test_z():\n    import os; os.abort()\n"
    }
    status, output = run(tmp_path, files, workers)
    assert status == 1, output
    assert "1 failed, 6 passed" in output, output
    assert "SIGABRT" in output, output
    assert 'test_z.py", line 2 in test_z' in output, output


def test_run_when_a_test_takes_too_long_then_the_report_has_its_stack_and_its_output(tmp_path: Path) -> None:
    hangs = "import threading\ndef test_hangs():\n    print('so far')\n    threading.Event().wait()\n"
    files = {
        "test_a.py": PASSES,
        "test_b.py": hangs,
        "test_c.py": PASSES,
        "pytest.ini": "[pytest]\ntimeout = 3\ntimeout_method = thread\n",
    }
    status, output = run(tmp_path, files, 2)
    assert status == 1, output
    assert "1 failed, 4 passed" in output, output
    assert "status 1" in output and 'test_b.py", line 4, in test_hangs' in output and "so far" in output, output


def test_run_when_no_test_ends_then_it_stops_and_names_the_test_its_stack_and_what_has_failed(tmp_path: Path) -> None:
    hangs = "import threading\ndef test_hangs():\n    threading.Event().wait()\n"
    files = {"test_a.py": "def test_a(): assert 1 == 2\n", "test_b.py": hangs, "test_c.py": PASSES}
    status, output = run(tmp_path, files, 2, stall_s=5.0)
    assert status == 2, output
    assert "no test has begun or ended for 5 s; running: test_b.py::test_hangs" in output, output
    assert 'test_b.py", line 3 in test_hangs' in output, output
    assert "assert 1 == 2" in output, output
