"""The page of invariants and the tests that name them belong together, both ways."""

from __future__ import annotations

import pytest

from tests.conformance.invariants import PAGE, ROOT, brought_up_to_date, documented, of_source, proofs


def test_invariants_when_the_page_lists_them_then_each_has_a_test_that_always_runs() -> None:
    always = {proof.invariant for proof in proofs() if proof.always}
    assert [name for name in documented(PAGE.read_text(encoding="utf-8")) if name not in always] == []


def test_tests_when_they_name_an_invariant_then_it_is_on_the_page() -> None:
    known = documented(PAGE.read_text(encoding="utf-8"))
    unknown = [f"{proof.path}:{proof.line} {proof.invariant}" for proof in proofs() if proof.invariant not in known]
    assert unknown == []


def test_page_when_its_lists_are_made_anew_then_it_stays_as_it_is() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == brought_up_to_date(page, proofs()), "make docs brings docs/invariants.md up to date"


def test_numbers_when_invariants_are_listed_then_none_is_left_out() -> None:
    by_kind: dict[str, list[int]] = {}
    for name in documented(PAGE.read_text(encoding="utf-8")):
        kind, _, number = name.partition("-")
        by_kind.setdefault(kind, []).append(int(number))
    assert by_kind["RPC"] == list(range(1, 33))
    for kind, numbers in by_kind.items():
        assert numbers == sorted(numbers), kind


def test_files_when_their_tests_name_invariants_then_pytest_collects_them() -> None:
    for path in {proof.path for proof in proofs()}:
        assert (ROOT / path).name.startswith("test_"), path


SOURCE = """
pytestmark = [pytest.mark.timeout(9), pytest.mark.invariant("RPC-1")]

@pytest.mark.invariant("RPC-2", "RPC-3")
@pytest.mark.parametrize("x", [1])
async def test_it() -> None: ...

@pytest.mark.extended
@pytest.mark.invariant("RPC-4")
def test_long() -> None: ...
"""


def test_markers_when_they_are_read_then_each_is_found_with_its_test() -> None:
    found = [(proof.invariant, proof.name, proof.always) for proof in of_source(SOURCE, "tests/test_x.py")]
    assert found == [
        ("RPC-1", "", True),
        ("RPC-2", "test_it", True),
        ("RPC-3", "test_it", True),
        ("RPC-4", "test_long", False),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.invariant\ndef test_x(): ...",
        "@pytest.mark.invariant()\ndef test_x(): ...",
        "@pytest.mark.invariant(1)\ndef test_x(): ...",
        "@pytest.mark.invariant(NAME)\ndef test_x(): ...",
        '@pytest.mark.invariant("RPC-1")\ndef fixture(): ...',
    ],
)
def test_marker_when_it_names_nothing_or_marks_no_test_then_it_is_refused(source: str) -> None:
    with pytest.raises(ValueError):
        list(of_source(source, "tests/test_x.py"))


def test_page_when_a_test_is_missing_or_unknown_then_it_is_found_out() -> None:
    page = "# P\n\n### RPC-1 · One\n\nHolds.\n\n* `tests/test_gone.py`:\n  `test_gone`\n\n### RPC-2 · Two\n\nToo.\n"
    assert documented(page) == {"RPC-1": "One", "RPC-2": "Two"}
    marks = list(of_source(SOURCE, "tests/test_x.py"))
    fresh = brought_up_to_date(page, marks)
    assert "test_gone" not in fresh
    assert fresh == brought_up_to_date(fresh, marks)
    assert fresh.endswith("Too.\n\n* `tests/test_x.py`:\n  `test_it`\n")
    with pytest.raises(ValueError, match="twice"):
        documented(page + "\n### RPC-1 · Again\n")
