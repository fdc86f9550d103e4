"""Trace context: passed on when well-formed, dropped otherwise."""

from __future__ import annotations

import pytest

from rpc.trace_context import trace_context

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("parent", [PARENT, PARENT.replace("00-", "cc-", 1) + "-what-comes-later"])
@pytest.mark.parametrize("state", ["", "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7", "a=" + "b" * 510])
def test_context_when_well_formed_then_it_is_passed_on(parent: str, state: str) -> None:
    assert trace_context(parent, state) == (parent, state)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "0",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        PARENT + "\n",
        PARENT + "-" + "x" * 201,
        "\xff" + PARENT[1:],
    ],
)
def test_context_when_the_parent_is_not_well_formed_then_nothing_is_passed_on(parent: str) -> None:
    assert trace_context(parent, "a=b") == ("", "")


@pytest.mark.parametrize("state", ["a=\xfc", "a=b\n", "a=" + "b" * 511])
def test_context_when_the_state_is_not_well_formed_then_the_parent_alone_is_passed_on(state: str) -> None:
    assert trace_context(PARENT, state) == (PARENT, "")
