"""The way to the optional library: present, absent, damaged, and with a native part that must be loaded first.

Each case is a process of its own, with a package folder in front of the installed one where that matters; what is
loaded is real.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rpc.xgrammar_library import NATIVE_LIBRARY, load_xgrammar, preload_shared_library, xgrammar_installed

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import json, os, subprocess, sys
sys.path[:0] = {paths!r}
before, loaded = dict(os.environ), set(sys.modules)
from rpc.xgrammar_library import XgrammarUnavailable, load_xgrammar
import_effects = sorted(name for name in set(sys.modules) - loaded if name.split(".")[0] in ("torch", "xgrammar"))
outcomes = []
for _ in range(2):
    try:
        outcomes.append(load_xgrammar().__name__)
    except XgrammarUnavailable as error:
        outcomes.append("unavailable: " + str(error))
    except Exception as error:
        outcomes.append("raised " + type(error).__name__)
child = subprocess.run([sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"],
                       capture_output=True, text=True, check=True)
print(json.dumps({{
    "outcomes": outcomes,
    "import_effects": import_effects,
    "environment_kept": dict(os.environ) == before,
    "child_kept": {{k: v for k, v in json.loads(child.stdout).items() if k not in ("LC_CTYPE", "_")}}
        == {{k: v for k, v in before.items() if k not in ("LC_CTYPE", "_")}},
    "imports": getattr(sys.modules.get("xgrammar"), "IMPORTS", None),
}}))
"""


def run(*paths: Path, isolated: bool = False) -> dict[str, object]:
    """What a process of its own sees; `paths` come first. isolated: without any installed package."""
    script = SCRIPT.format(paths=[str(path) for path in (*paths, ROOT)])
    flags = ["-I", "-S"] if isolated else []
    done = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, timeout=110, cwd="/")
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    assert found["environment_kept"] and found["child_kept"]
    assert found["import_effects"] == []
    return found


def package(folder: Path, source: str, library: bytes | None = None) -> Path:
    (folder / "xgrammar").mkdir()
    (folder / "xgrammar" / "__init__.py").write_text(source)
    if library is not None:
        (folder / "xgrammar" / NATIVE_LIBRARY).write_bytes(library)
    return folder


# Needs a symbol of the native library, which the loader finds only if that was loaded for the whole process.
NEEDS_SYMBOL = """
import ctypes
try:
    ctypes.CDLL(None).baton_test_symbol
except AttributeError:
    raise ImportError("libxgrammar_bindings.so: cannot open shared object file") from None
"""


def native_library(folder: Path) -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "native.c").write_text("int baton_test_symbol(void) { return 7; }\n")
    made = folder / "native.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, folder / "native.c"], check=True)
    return made.read_bytes()


@pytest.mark.invariant("RPC-22")
def test_loader_when_the_library_is_installed_then_is_memoised_and_changes_no_environment() -> None:
    assert xgrammar_installed()
    found = run()
    assert found["outcomes"] == ["xgrammar", "xgrammar"]
    import xgrammar

    assert load_xgrammar() is load_xgrammar() is xgrammar


@pytest.mark.invariant("RPC-22")
def test_loader_when_there_is_no_library_then_says_so_twice() -> None:
    found = run(isolated=True)
    [first, second] = found["outcomes"]
    assert first == second == "unavailable: ModuleNotFoundError: No module named 'xgrammar'"


@pytest.mark.invariant("RPC-22")
def test_loader_when_the_native_library_is_not_found_then_preloads_it_and_imports_again(tmp_path: Path) -> None:
    found = run(package(tmp_path, NEEDS_SYMBOL, native_library(tmp_path)))
    assert found["outcomes"] == ["xgrammar", "xgrammar"]


@pytest.mark.invariant("RPC-22")
def test_loader_when_the_native_library_cannot_be_loaded_then_the_first_cause_stays(tmp_path: Path) -> None:
    found = run(package(tmp_path, NEEDS_SYMBOL, b"this is no library"))
    [first, second] = found["outcomes"]
    assert first == second and "cannot open shared object file" in first
    with pytest.raises(OSError, match=r"file too short|invalid ELF header"):
        preload_shared_library(tmp_path / "xgrammar" / NATIVE_LIBRARY)


@pytest.mark.invariant("RPC-21")
@pytest.mark.parametrize(
    ("raised", "outcome"),
    [("RuntimeError", "unavailable: RuntimeError: built for another"), ("NameError", "raised NameError")],
)
def test_loader_when_the_package_raises_then_only_what_a_damaged_one_raises_counts_as_unavailable(
    tmp_path: Path, raised: str, outcome: str
) -> None:
    found = run(package(tmp_path, f"raise {raised}('built for another')"))
    assert found["outcomes"] == [outcome, outcome]
