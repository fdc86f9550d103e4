"""The wire contract says of every message who sets it, and what every service and enumeration is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).resolve().parents[3] / "protos").glob("*.proto"))


def declared() -> list[tuple[str, str, str]]:
    """Kind, name and leading comment of everything that the files declare."""
    found = []
    for path in PROTOS:
        comment: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("//"):
                comment.append(line.removeprefix("//").strip())
                continue
            if match := re.match(r"(message|enum|service) (\w+)", line):
                found.append((match[1], match[2], " ".join(comment)))
            comment = []
    return found


DECLARED = declared()


def test_declarations_when_read_then_there_are_those_of_all_services() -> None:
    services = {name for kind, name, _ in DECLARED if kind == "service"}
    assert services == {"CacheStore", "Decode", "Generation", "Prefill", "Worker"}
    assert sum(kind == "message" for kind, _, _ in DECLARED) > 50


@pytest.mark.parametrize(("kind", "name", "comment"), DECLARED, ids=[name for _, name, _ in DECLARED])
def test_declaration_when_it_crosses_the_wire_then_it_is_described(kind: str, name: str, comment: str) -> None:
    assert comment
    if kind == "message":
        assert re.search(r"\b[Ss]et by\b|\b[Mm]ade by\b", comment), f"{name}: who sets it?"
