"""Masks that are made while the processor computes the logits they will be applied to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.grammar.matching import GrammarMatching
from engine.runner.batch import BatchRow


class MaskFilling:
    """A thread that brings the masks of a step's rows up to date. Costs nothing for steps without grammars."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, rows: Sequence[BatchRow]) -> Future[None] | None:
        """Starts with the rows that are sampled. The masks may be used once the result is there. None: no masks."""
        matchings = [
            row.sampling.grammar for row in rows if row.sampling is not None and row.sampling.grammar is not None
        ]
        if not matchings:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        return self._thread.submit(_fill, matchings)


def _fill(matchings: Sequence[GrammarMatching]) -> None:
    for matching in matchings:
        matching.fill()
