"""How far a long start-up step is: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

_LOG_EVERY_S = 5.0

_log = logging.getLogger(__name__)


class Progress:
    """A context manager; `update(done)` may be called as often as one likes."""

    def __init__(self, title: str, total: float, unit: str = "") -> None:
        """title: what is done, e.g. "weights". total, and `done` later, are counted in `unit`."""
        self.title = title
        self.total = total
        self.unit = unit
        self._bar: Any = None
        self._task: Any = None
        self._began = self._logged = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.title, total=self.total or None)
            self._bar.start()
        return self

    def update(self, done: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self.total)
        elif time.monotonic() - self._logged >= _LOG_EVERY_S:
            self._logged = time.monotonic()
            _log.info("%s: %.3g of %.3g %s", self.title, done, self.total, self.unit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            _log.info("%s: done", self.title, extra={"seconds": round(time.monotonic() - self._began, 3)})
