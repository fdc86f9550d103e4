"""How much of a long test runs: `make test` takes the short form, `make test-all` (BATON_TESTS=all) the whole."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

WHOLE = os.environ.get("BATON_TESTS") == "all"

T = TypeVar("T")


def extent(short: T, whole: T) -> T:
    """An amount of work: rounds, requests, prompts."""
    return whole if WHOLE else short


def extended(*values: object, id: str | None = None) -> object:
    """A parameter that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.extended, id=id)
