"""The reader of expressions finds what would otherwise go unnoticed."""

from __future__ import annotations

import pytest

from tests.unit.deploy.promql import mistakes, read

LABELS = {"a_total": frozenset(("role", "code")), "b_bucket": frozenset(("le", "role"))}
VALUES = {("a_total", "code"): frozenset(("X", "Y"))}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('sum by (role) (rate(a_total{code="X"}[5m]))', []),
        ('sum by (role) (rate(a_total{code!~"X|Y", role=~"$role"}[$__rate_interval])) > 0', []),
        ("histogram_quantile(0.9, sum by (le) (rate(b_bucket[1m])))", []),
        ("rate(c_total[5m])", ["there is no series c_total"]),
        ('a_total{worker="x"}', ["a_total has no label worker"]),
        ('a_total{code=~"X|Z"}', ["code of a_total is never Z"]),
        ("sum by (worker) (a_total)", ["nothing here has the label worker"]),
        ("a_total unless on (instance) a_total offset 10m", ["nothing here has the label instance"]),
        ("1 > 0", ["asks for nothing"]),
    ],
)
def test_mistakes_when_an_expression_asks_in_vain_then_each_is_named(expression: str, expected: list[str]) -> None:
    assert mistakes(expression, LABELS, VALUES) == expected


def test_read_when_an_expression_has_functions_and_words_then_they_are_no_series() -> None:
    asked = read(
        'label_replace(sum by (x) (a) / 1e6, "y", "$1", "x", "(.*)") and on (x) last_over_time(b[1h]) offset 5m'
    )
    assert [selector.metric for selector in asked.selectors] == ["a", "b"]
    assert asked.grouping == {"x"}
