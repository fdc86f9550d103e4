"""Kernels in Triton's interpreter, where it is used, take less time (tests/unit/quick_interpreter.py)."""

import sys


def pytest_collection_finish() -> None:
    """Once the tests have been imported: Triton is not imported for those that do without it."""
    jit = sys.modules.get("kernels.jit")
    if jit is not None and jit.interpreted:
        from tests.unit.quick_interpreter import quicken

        quicken()
