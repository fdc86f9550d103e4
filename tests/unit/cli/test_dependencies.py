"""What pyproject declares is what the code imports: nothing missing, nothing superfluous."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OWN = set(PROJECT["tool"]["importlinter"]["root_packages"]) | {"tests", "deploy"}
# Loaded by name: uvicorn takes httptools as its parser.
NOT_IMPORTED = {"httptools"}
# Tools that are run, and stubs.
TOOLS = {"import-linter", "mypy", "mypy-protobuf", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "ruff"}
# Comparisons with the reference; the product runs without it.
REFERENCE = {"bench/transformers_baseline.py", "bench/engine_step.py"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]) for requirement in requirements}


REQUIRED = declared(PROJECT["project"]["dependencies"])
# What a GPU needs besides; the modules that import it run without it.
GPU = declared(PROJECT["project"]["optional-dependencies"]["gpu"])
# What tracing needs besides; the one module that imports it does so when it is asked for.
TRACING = declared(PROJECT["project"]["optional-dependencies"]["tracing"])
# What the tier on Mooncake Store needs besides; the process that holds its client imports it when it starts.
MOONCAKE = declared(PROJECT["project"]["optional-dependencies"]["mooncake"])
# One of the builds that the extra brings; its agent's process imports it when it starts.
NIXL = {"nixl-cu12"}
DISTRIBUTED_AS = {"flashinfer": "flashinfer-python"}  # packages that need not be installed here
DEV = declared(PROJECT["project"]["optional-dependencies"]["dev"])


@cache
def imported(file: Path) -> set[str]:
    """Dotted names that a file imports, absolute ones only; a test also by `pytest.importorskip`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            names |= {
                name.value for name in node.args if isinstance(name, ast.Constant) and isinstance(name.value, str)
            }
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


# Several distributions share these packages; what is imported from them tells which one it is.
SHARED = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.trace": "opentelemetry-api",
}


NAMESPACES = {name.partition(".")[0] for name in SHARED}


@cache
def distributions() -> dict[str, set[str]]:
    return {module: {normal(name) for name in names} for module, names in packages_distributions().items()}


def needed(files: list[Path]) -> dict[str, str]:
    """Distribution -> a file that needs it."""
    found: dict[str, str] = {}
    for file in files:
        for name in imported(file):
            top = name.partition(".")[0]
            if top in OWN or top in sys.stdlib_module_names:
                continue
            by_prefix = [d for prefix, d in SHARED.items() if name == prefix or name.startswith(prefix + ".")]
            absent = DISTRIBUTED_AS.get(top, normal(top))
            owners = set(by_prefix) or (set() if top in NAMESPACES else distributions().get(top, {absent}))
            for owner in owners:
                found.setdefault(owner, str(file.relative_to(ROOT)))
    return found


def product_files() -> list[Path]:
    files = [file for package in OWN - {"tests", "protos"} for file in (ROOT / package).rglob("*.py")]
    return [file for file in files if str(file.relative_to(ROOT)) not in REFERENCE]


def test_product_when_it_imports_a_package_then_pyproject_declares_it() -> None:
    declared_names = REQUIRED | GPU | TRACING | MOONCAKE
    missing = {name: file for name, file in needed(product_files()).items() if name not in declared_names}
    assert missing == {}


def test_tracing_extra_when_it_declares_a_package_then_one_module_imports_it_and_no_other_does() -> None:
    place = ROOT / "rpc" / "trace_export.py"
    assert set(needed([place])) == TRACING
    assert set(needed([file for file in product_files() if file != place])) & TRACING == set()


def test_mooncake_extra_when_it_declares_a_package_then_one_module_imports_it_and_no_other_does() -> None:
    place = ROOT / "cache_store" / "tiers" / "mooncake_client.py"
    assert set(needed([place])) >= MOONCAKE
    assert set(needed([file for file in product_files() if file != place])) & MOONCAKE == set()


def test_gpu_extra_when_it_declares_a_package_then_the_product_imports_it() -> None:
    assert set(needed(product_files())) >= GPU


def test_gpu_extra_when_its_packages_are_imported_then_only_where_a_device_is_meant() -> None:
    places = ("kernels/", "bench/gpu/", "engine/attention/")
    files = [file for file in product_files() if not str(file.relative_to(ROOT)).startswith(places)]
    assert set(needed(files)) & GPU == set()


def test_pyproject_when_it_declares_a_package_then_the_product_imports_it() -> None:
    stubs = needed(list((ROOT / "protos").glob("*.py")))
    assert REQUIRED - set(needed(product_files())) - set(stubs) - NOT_IMPORTED == set()


def test_tests_when_they_import_a_package_then_it_is_declared() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / name for name in REFERENCE)]
    missing = {name: file for name, file in needed(files).items() if name not in REQUIRED | GPU | DEV}
    assert missing == {}


def test_dev_extra_when_it_declares_a_package_then_a_test_or_a_tool_needs_it() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / name for name in REFERENCE)]
    # Kernels are tested in Triton's interpreter, the others with all that their extras bring.
    extras = GPU | TRACING | MOONCAKE | NIXL
    unused = DEV - set(needed(files)) - TOOLS - extras - {name for name in DEV if name.startswith("types-")}
    assert unused <= {"grpcio-tools"}, "grpcio-tools makes the stubs"


def test_constraints_when_a_package_is_declared_then_it_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if "==" in line}
    assert (REQUIRED | DEV) - pinned == set()
