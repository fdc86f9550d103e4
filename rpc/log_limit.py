"""How often something that happens again and again is logged."""

from __future__ import annotations

import threading


class LogLimit:
    """Lets through the first occurrence of each key, then the 2nd, 4th, 8th and so on of that key.

    Keys come from a closed set; beyond `most_keys` of them new ones share one count. Any thread may ask.
    """

    def __init__(self, most_keys: int = 256) -> None:
        self._most_keys = most_keys
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def occurred(self, key: str) -> int:
        """Counts an occurrence of `key`. Its number when it is to be logged, else 0."""
        with self._lock:
            if key not in self._counts and len(self._counts) >= self._most_keys:
                key = ""
            count = self._counts[key] = self._counts.get(key, 0) + 1
        return count if count & (count - 1) == 0 else 0
