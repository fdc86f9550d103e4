"""What Baton holds whatever happens (docs/invariants.md), and the tests that prove it.

A test names what it proves: `@pytest.mark.invariant("RPC-12")`, or `pytestmark` for a whole file. Both the page and the
tests are read as text, so nothing is imported and nothing runs.

    python -m tests.conformance.invariants    # the page with the lists of tests brought up to date
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "invariants.md"
HEADING = re.compile(r"^### ([A-Z]+-\d+) · (.+)$")
LIST = re.compile(r"^\* `tests/")


@dataclass(frozen=True)
class Proof:
    """A test (or, with `name` empty, a whole file) that names an invariant. `always`: `make test` runs it; those that
    are `extended` or have a condition of their own may be left out there."""

    invariant: str
    path: str
    line: int
    name: str
    always: bool


def proofs(root: Path = ROOT / "tests") -> list[Proof]:
    """Every marker of the tests below `root`, in the order of files and lines."""
    found: list[Proof] = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.invariant" in text:
            found += of_source(text, path.relative_to(root.parent).as_posix())
    return found


def of_source(text: str, path: str) -> Iterator[Proof]:
    """The markers of one file. Raises ValueError for one that names nothing, or no text."""
    tree = ast.parse(text)
    whole = [mark for node in tree.body if _is_pytestmark(node) for mark in _listed(node.value)]  # type: ignore[attr-defined]
    for call in whole:
        for invariant in _ids(call, path):
            yield Proof(invariant, path, call.lineno, "", not _conditional(whole))
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in node.decorator_list:
            for invariant in _ids(call, path):
                if not node.name.startswith("test_"):
                    raise ValueError(f"{path}:{node.lineno}: {node.name} is no test but names {invariant}")
                always = not _conditional([*whole, *node.decorator_list])
                yield Proof(invariant, path, node.lineno, node.name, always)


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    )


def _listed(value: ast.expr) -> list[ast.expr]:
    return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]


def _mark_name(mark: ast.expr) -> str:
    function = mark.func if isinstance(mark, ast.Call) else mark
    return ast.unparse(function).rpartition("mark.")[2]


def _conditional(marks: list[ast.expr]) -> bool:
    return any(_mark_name(mark) in ("extended", "skipif", "skip", "gpu") for mark in marks)


def _ids(mark: ast.expr, path: str) -> list[str]:
    if _mark_name(mark) != "invariant":
        return []
    arguments = mark.args if isinstance(mark, ast.Call) else []
    found = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
    if not found or len(found) != len(arguments) or not all(isinstance(name, str) for name in found):
        raise ValueError(f'{path}:{mark.lineno}: an invariant is named by its id, as in invariant("RPC-1")')
    return [str(name) for name in found]


def documented(page: str) -> dict[str, str]:
    """Titles by id, in the page's order. Raises ValueError for an id that stands twice."""
    found: dict[str, str] = {}
    for line in page.splitlines():
        match = HEADING.match(line)
        if match and match[1] in found:
            raise ValueError(f"{match[1]} stands twice")
        if match:
            found[match[1]] = match[2]
    return found


def brought_up_to_date(page: str, marks: list[Proof]) -> str:
    """The page with the list of each invariant's tests made anew."""
    lines: list[str] = []
    current = ""

    def close() -> None:
        while lines and not lines[-1]:
            lines.pop()
        lines.append("")
        if current:
            lines.extend(_list_of([mark for mark in marks if mark.invariant == current]))
            lines.append("")

    for line in page.splitlines():
        if line.startswith("#"):
            close()
            match = HEADING.match(line)
            current = match[1] if match else ""
        if not (current and (LIST.match(line) or line.startswith("  `test_"))):
            lines.append(line)
    close()
    return "\n".join(lines).strip("\n") + "\n"


def _list_of(marks: list[Proof]) -> Iterator[str]:
    paths = dict.fromkeys(mark.path for mark in marks)
    for path in paths:
        names = [mark.name for mark in marks if mark.path == path and mark.name]
        yield f"* `{path}`{':' if names else ''}"
        yield from (f"  `{name}`{',' if name != names[-1] else ''}" for name in names)


if __name__ == "__main__":
    written = PAGE.read_text(encoding="utf-8")
    if not written.strip():  # by a shell that redirects this output to the page
        raise SystemExit(f"{PAGE} is empty: bring it back, and write to another file, as `make docs` does")
    print(brought_up_to_date(written, proofs()), end="")
