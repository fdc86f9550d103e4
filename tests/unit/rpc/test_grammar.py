"""When structured output is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpc.errors import ErrorCode
from rpc.grammar import GrammarBackend, grammar_enabled, not_offered


@pytest.mark.parametrize(
    ("backend", "tokenizer", "on"),
    [
        ("xgrammar", True, True),
        ("xgrammar", False, True),
        ("auto", True, True),
        ("auto", False, False),
        ("none", True, False),
    ],
)
def test_backend_when_asked_then_is_on_as_far_as_the_model_and_the_package_allow(
    tmp_path: Path, backend: GrammarBackend, tokenizer: bool, on: bool
) -> None:
    """The package is installed wherever tests run."""
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    assert grammar_enabled(backend, tmp_path) is on


def test_refusal_when_it_is_off_then_names_the_flag_and_the_field() -> None:
    error = not_offered("regex")
    assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, "regex")
    assert "--grammar-backend" in error.message
