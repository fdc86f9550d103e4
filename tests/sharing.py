"""What the tests of several modules share: it starts with the first of them in a run, and ends with the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_running: dict[str, tuple[Any, ExitStack]] = {}


def shared(request: pytest.FixtureRequest, start: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """The body of a module's fixture, by whose name it is known what is shared."""
    name = request.fixturename
    assert name is not None and request.scope == "module"
    if name not in _running:
        stack = ExitStack()
        _running[name] = stack.enter_context(start()), stack
        request.config.add_cleanup(lambda: _end(name))  # of a run that is broken off
    yield _running[name][0]
    users = [item for item in request.session.items if name in getattr(item, "fixturenames", ())]
    if not users or users[-1].nodeid.partition("::")[0] == request.node.nodeid:
        _end(name)


def _end(name: str) -> None:
    if name in _running:
        _, stack = _running.pop(name)
        stack.close()
