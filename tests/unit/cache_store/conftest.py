"""Set-up of the cache-store tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="package")
def no_long_pauses() -> None:
    """Takes what is imported (torch, hypothesis) out of the garbage collector's sight.

    Its full collections stop both agents of a test, which share the process, for longer than some limits under test.
    """
    gc.collect()
    gc.freeze()
