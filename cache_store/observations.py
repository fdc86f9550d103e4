"""Metric news of an agent, collected on its thread and taken by the engine with its step messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from cache_store.events import Observation

MAX_SAMPLES = 20_000

Observe: TypeAlias = "Callable[..., None]"  # observe(name, value=1, **labels)

_COUNTER_SUFFIX = "_total"


def ignore(name: str, value: float = 1, **labels: str) -> None:
    """An Observe that keeps nothing."""


class ObservationBuffer:
    """Counters are summed per series until they are taken; histogram samples are kept, at most MAX_SAMPLES of them.

    Samples beyond that are dropped and counted in `dropped`: an engine that stopped asking must not cost memory. Safe
    to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._samples: list[Observation] = []
        self.dropped = 0

    def observe(self, name: str, value: float = 1, **labels: str) -> None:
        """`name` without its prefix; a name in `_total` is a counter, any other a histogram."""
        with self._lock:
            if name.endswith(_COUNTER_SUFFIX):
                key = (name, tuple(sorted(labels.items())))
                self._counters[key] = self._counters.get(key, 0.0) + value
            elif len(self._samples) < MAX_SAMPLES:
                self._samples.append(Observation(f"baton_{name}", labels, value))
            else:
                self.dropped += 1

    def take(self) -> list[Observation]:
        with self._lock:
            counters, self._counters = self._counters, {}
            samples, self._samples = self._samples, []
        return [
            *(Observation(f"baton_{name}", dict(labels), value) for (name, labels), value in counters.items()),
            *samples,
        ]
