"""What no run on this machine may come to: imports of benches and of tests for GPUs, within functions, and in programs
that tests hand to other processes. Every name that they take from the project is where they look for it."""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "engine", "kernels", "tests/gpu")
PROJECT = frozenset(path.parent.name for path in ROOT.glob("*/__init__.py")) | {"tests"}
GENERATED = "protos"
FORMATTED = "_"  # stands for what a program gets from its test


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for found in (path / "__init__.py", path.with_suffix(".py")):
        if found.exists():
            return found
    return path if path.is_dir() else None


@cache
def names_of(module: str) -> frozenset[str]:
    """What the module's top level binds, its branches included."""
    path = file_of(module)
    if path is None or path.is_dir():
        return frozenset()
    return frozenset(bound(ast.parse(path.read_text(encoding="utf-8")).body))


def bound(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield node.name


def has(module: str, name: str) -> bool:
    return name == "*" or name in names_of(module) or file_of(f"{module}.{name}") is not None


def concerns(module: str | None) -> bool:
    if module is None or FORMATTED in module.split("."):
        return False
    return module.partition(".")[0] in PROJECT and not module.startswith(GENERATED)


def missing(tree: ast.AST) -> Iterator[str]:
    """Modules and names of the project that are not there, of a file or of a program in one of its strings."""
    modules: dict[str, str] = {}  # what stands for a module of the project
    rebound: set[str] = set()
    attributes: list[tuple[str, str]] = []
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not concerns(alias.name):
                    continue
                if file_of(alias.name) is None:
                    yield alias.name
                elif alias.asname:
                    modules[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and concerns(node.module):
            assert node.module is not None
            for alias in node.names:
                if not has(node.module, alias.name):
                    yield f"{node.module}.{alias.name}"
                elif alias.name not in names_of(node.module):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.append((node.value.id, node.attr))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            rebound.add(node.id)
        elif isinstance(node, ast.arg):
            rebound.add(node.arg)
        elif (
            isinstance(node, ast.Constant | ast.JoinedStr)
            and node not in parts
            and (program := program_of(node)) is not None
        ):
            yield from missing(program)
    for name, attribute in attributes:
        module = modules.get(name)
        if module is None or name in rebound or attribute.startswith("__") or module.startswith(GENERATED):
            continue
        if not has(module, attribute):
            yield f"{module}.{attribute}"


def program_of(node: ast.Constant | ast.JoinedStr) -> ast.AST | None:
    """Of a string that is one."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else FORMATTED for part in parts)
    if "import " not in text or not any(f"{name}." in text or f" {name} " in text for name in PROJECT):
        return None
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None  # prose


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_when_taken_from_the_project_then_are_where_they_are_looked_for(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {
        str(path.relative_to(ROOT)): lost
        for path in paths
        if (lost := sorted(set(missing(ast.parse(path.read_text(encoding="utf-8"))))))
    }
    assert not found


def test_benches_when_imported_then_none_fails_for_want_of_anything_but_a_package() -> None:
    for path in sorted((ROOT / "bench").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        try:
            importlib.import_module(".".join(part for part in parts if part != "__init__"))
        except ModuleNotFoundError as error:
            if error.name is None or concerns(error.name):
                raise


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("from engine.core import nothing_of_the_kind", "engine.core.nothing_of_the_kind"),
        ("def test():\n    from kernels.gone import draw", "kernels.gone.draw"),
        ("import kernels.gone", "kernels.gone"),
        ("from kernels import draw\ndraw.moved = 1", "kernels.draw.moved"),
        ("PROGRAM = '''\n    from engine.core import gone\n    gone()\n'''", "engine.core.gone"),
        ("program = f'from kernels.{name} import x; from engine.core import gone'", "engine.core.gone"),
        ("from kernels import draw\nfrom rpc.errors import BatonError\ndraw.draw(BatonError)", None),
        ("from kernels import draw\ndef f(draw):\n    return draw.of_another", None),
        ("TEXT = 'To import the engine.core, ask.'", None),
    ],
)
def test_missing_when_a_name_has_moved_then_it_is_named(source: str, lost: str | None) -> None:
    assert list(missing(ast.parse(source))) == ([] if lost is None else [lost])
