"""The generated pages say what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpc import errors_doc, metrics_doc
from rpc.errors import ErrorCode
from rpc.metrics import FAMILIES

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("error_codes.md", errors_doc.render(), "rpc.errors_doc"),
        ("metrics.md", metrics_doc.render(), "rpc.metrics_doc"),
    ],
)
def test_page_is_what_its_generator_writes(name: str, text: str, command: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == text, f"run: python -m {command} > docs/{name}"


def test_error_page_has_a_row_for_every_code() -> None:
    text = errors_doc.render()
    for code in ErrorCode:
        assert f"| {int(code)} | {code.name} |" in text


def test_metrics_page_has_a_row_for_every_family() -> None:
    text = metrics_doc.render()
    for name in FAMILIES:
        assert f"| `{name}` |" in text
