"""What dashboards and clients know by name: a metric or code that changes its meaning has a line in the release notes.

`released_meanings.json` is how things were at the last release. After a release (and only then):

    python -m tests.unit.rpc.test_released_meanings > tests/unit/rpc/released_meanings.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rpc.errors import TABLE
from rpc.metric_families import BUCKETS, FAMILIES

KNOWN = Path(__file__).with_name("released_meanings.json")
NOTES = Path(__file__).resolve().parents[3] / "docs" / "release_notes.md"


def meanings() -> dict[str, list[str]]:
    """By name, all that a query or a client depends on; words that only explain are left out."""
    found = {}
    for name, family in FAMILIES.items():
        values = [f"{label}={value}" for label, closed in family.values.items() for value in closed]
        labels = [f"{role}: {' '.join(found_)}" for role, found_ in sorted(family.role_labels.items())]
        buckets = [f"le={bound:g}" for bound in BUCKETS.get(family.buckets, ())]
        found[name] = [family.kind, *sorted(family.roles), *family.labels, *labels, *sorted(values), *buckets]
    for code, spec in TABLE.items():
        retry, breaker = str(spec.retry), str(spec.breaker_mark)
        found[spec.name] = [str(int(code)), spec.grpc.name, str(spec.http), spec.openai_code, retry, breaker]
    return found


def changed(now: dict[str, list[str]], then: dict[str, list[str]]) -> list[str]:
    """Names that are gone or mean something else. What a closed set of values gains changes nothing that is there."""
    found = []
    for name, meaning in then.items():
        gained = [part for part in now.get(name, ()) if part not in meaning]
        lost = [part for part in meaning if part not in now.get(name, ())]
        if lost or any("=" not in part for part in gained):
            found.append(name)
    return found


def told(notes: str) -> set[str]:
    """The names in code type of the release notes, without the labels of a query."""
    return {name.partition("{")[0] for name in re.findall(r"`([^`]+)`", notes)}


@pytest.mark.invariant("RPC-30")
def test_meaning_when_it_is_another_than_released_then_the_notes_name_it() -> None:
    then = json.loads(KNOWN.read_text(encoding="utf-8"))
    notes = told(NOTES.read_text(encoding="utf-8"))
    silent = [name for name in changed(meanings(), then) if name not in notes]
    assert silent == [], "docs/release_notes.md says nothing about these"


@pytest.mark.parametrize(
    ("now", "found"),
    [
        ({"a": ["counter", "code", "code=X"]}, []),
        ({"a": ["counter", "code", "code=X", "code=Y"], "b": ["gauge"]}, []),
        ({"a": ["counter", "code"]}, ["a"]),
        ({"a": ["gauge", "code", "code=X"]}, ["a"]),
        ({"a": ["counter", "code", "reason", "code=X"]}, ["a"]),
        ({"b": ["gauge"]}, ["a"]),
    ],
)
def test_meaning_when_it_changes_or_goes_then_it_is_noticed_and_what_is_added_is_not(
    now: dict[str, list[str]], found: list[str]
) -> None:
    assert changed(now, {"a": ["counter", "code", "code=X"]}) == found


def test_notes_when_they_name_something_then_labels_do_not_hide_it() -> None:
    assert told('* **`a_total{x="1"}`** and `B` (602)') == {"a_total", "B"}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(meaning)}" for name, meaning in sorted(meanings().items())]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
