"""Stop strings: where the text ends, however it was cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence


def _fallbacks(word: str) -> list[int]:
    """For each prefix length of `word`, the length of its longest proper prefix that is also its suffix
    (the failure function of Knuth, Morris and Pratt). Index 0 is unused."""
    table = [0] * (len(word) + 1)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = table[length]
        if word[i] == word[length]:
            length += 1
        table[i + 1] = length
    return table


class StopStrings:
    """Finds the first of several stop strings in a text that comes in parts, and holds back what may begin
    one.

    The text ends before the match that starts earliest; of several at one place the one that is complete
    first, then the one named first. What is found depends on the text only, not on its parts: a match is
    not decided while one that began earlier may still come. Work is linear in the text, times the number of
    stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string matches everywhere")
        self._stops = list(stops)
        self._tables = [_fallbacks(stop) for stop in stops]
        self._states = [0] * len(self._stops)  # length of the prefix of each stop string that the text ends with
        self._held = ""
        self._best: tuple[int, int] | None = None  # start in `_held`, index of the stop string
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that is certain and was not returned yet. After a match: "" for
        ever."""
        if self.matched is not None:
            return ""
        base = len(self._held)
        self._held += text
        for offset, char in enumerate(text):
            end = base + offset + 1
            if self._step(char, end) and self._decided(end):
                return self._cut()
        return self._release()

    def pass_through(self, text: str) -> str:
        """Text in which nothing is looked for; it separates what comes before and after it."""
        if self.matched is not None:
            return ""
        out = self.finish() + text
        return "" if self.matched is not None else out

    def finish(self) -> str:
        """What was held back, now that no more text comes; ends before a match that was not decided yet."""
        if self.matched is not None:
            return ""
        if self._best is not None:
            return self._cut()
        out, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return out

    def _step(self, char: str, end: int) -> bool:
        """Moves each automaton by one character; whether there is a match now or from before."""
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            table = self._tables[index]
            while state and stop[state] != char:
                state = table[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                start = end - len(stop)
                if self._best is None or start < self._best[0]:
                    self._best = (start, index)
                state = table[state]
            self._states[index] = state
        return self._best is not None

    def _decided(self, end: int) -> bool:
        """No stop string that began before the best match is still open."""
        assert self._best is not None
        return all(not state or end - state >= self._best[0] for state in self._states)

    def _cut(self) -> str:
        assert self._best is not None
        start, index = self._best
        self.matched = self._stops[index]
        out, self._held = self._held[:start], ""
        return out

    def _release(self) -> str:
        """Gives out what no stop string and no open match begins in."""
        end = len(self._held)
        keep = min((end - state for state in self._states if state), default=end)
        if self._best is not None:
            keep = min(keep, self._best[0])
            self._best = (self._best[0] - keep, self._best[1])
        out, self._held = self._held[:keep], self._held[keep:]
        return out
