"""When to ask again what has failed: not at once, and less and less often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Circuit:
    """Open after a failure, for a pause that doubles with each failure in a row. Any thread may ask.

    When the pause is over the circuit stays open until a probe has gone well; the next real operation then decides
    whether the pauses start from the beginning.
    """

    def __init__(
        self,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_pause_s
        self._longest_s = longest_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._retry_at = 0.0
        self._open = False

    @property
    def closed(self) -> bool:
        """Whether operations may be tried."""
        return not self._open

    @property
    def retry_in_s(self) -> float:
        """Until a probe is due, at least 0; of an open circuit."""
        return max(0.0, self._retry_at - self._clock())

    def failed(self) -> bool:
        """An operation, or a probe, has failed. Whether that has opened the circuit."""
        with self._lock:
            was_open, self._open = self._open, True
            pause = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 16))
            if not was_open or self._clock() >= self._retry_at:  # not for what began before it opened
                self._failures += 1
                self._retry_at = self._clock() + pause
            return not was_open

    def probed(self) -> bool:
        """A probe has gone well. Whether that has closed the circuit."""
        with self._lock:
            was_open, self._open = self._open, False
            return was_open

    def succeeded(self) -> None:
        """A real operation has gone well."""
        if self._failures and not self._open:
            with self._lock:
                if not self._open:
                    self._failures = 0
