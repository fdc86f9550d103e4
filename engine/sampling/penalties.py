"""Which tokens requests have seen, kept on the device from step to step and brought up to date by a few numbers.

A step of a running request adds one token, so the host's work per request and step does not grow with its length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.row import SamplingRow
from kernels.logit_changes import UPDATE_WORDS, PenaltyTable

_Words = NDArray[np.int64]
_FIRST_CAPACITY = 1024


@dataclass(slots=True)
class _Seen:
    """What a slot of the table holds. Keeps the row, so that its id stays its own."""

    row: SamplingRow
    slot: int
    tokens: list[int]  # by place in the slot, distinct
    counts: list[int]  # by place: how often the token was generated
    place_of: dict[int, int]  # token: its place
    folded: int  # leading output tokens that are counted


class PenaltySlots:
    """Slots of a PenaltyTable for the requests of a batch, the least recently used given to new ones.

    A row is followed by its identity: its prompt must not change, and its output only grow (a shorter output, as after
    tokens were taken back, is counted anew). Memory on the device is taken with the first penalised row.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        """slots: penalised rows of a batch at the most."""
        self._slots = slots
        self._vocab = vocab
        self._device = device
        self._requests: OrderedDict[int, _Seen] = OrderedDict()  # by id of the row, least recently used first
        self._free = list(range(slots))
        self._table: PenaltyTable | None = None

    @property
    def table(self) -> PenaltyTable:
        if self._table is None:
            self._table = PenaltyTable(self._slots, _FIRST_CAPACITY, self._device)
        return self._table

    def follow(self, rows: Sequence[SamplingRow]) -> tuple[list[tuple[int, int]], _Words]:
        """Where the rows' tokens are, (slot, how many) per row, and the updates [n, UPDATE_WORDS] that put them there.

        The table may be another one afterwards, with more capacity.
        """
        distinct = {id(row): row for row in rows}  # a row that comes twice has one slot
        for key in distinct:
            if key in self._requests:
                self._requests.move_to_end(key)  # first of all, so that no new row takes its slot
        changed: list[tuple[_Seen, list[int]]] = []
        followed = {
            key: self._fold(self._requests[key], changed) if key in self._requests else self._begin(row, changed)
            for key, row in distinct.items()
        }
        requests = list(followed.values())
        most = max((len(known.counts) for known in requests), default=0)
        if most > self.table.capacity:
            # All of them move, those that are not in this batch when they come back
            self._table = PenaltyTable(self._slots, 1 << (most - 1).bit_length(), self._device)
            for key in [key for key in self._requests if key not in followed]:
                self._free.append(self._requests.pop(key).slot)
            changed = [(known, list(range(len(known.counts)))) for known in requests]
        places = [(known.slot, len(known.counts)) for known in (followed[id(row)] for row in rows)]
        return places, self._updates(changed)

    def _begin(self, row: SamplingRow, changed: list[tuple[_Seen, list[int]]]) -> _Seen:
        if not self._free:
            _, idle = self._requests.popitem(last=False)
            self._free.append(idle.slot)
        known = _Seen(row, self._free.pop(), [], [], {}, 0)
        self._requests[id(row)] = known
        self._restart(known)
        return self._fold(known, changed, everything=True)

    def _restart(self, known: _Seen) -> None:
        """As if nothing had been generated."""
        repeats = known.row.params.repetition_penalty != 1.0  # the one penalty that looks at the prompt
        prompt = dict.fromkeys(known.row.prompt_token_ids) if repeats else {}
        known.tokens = [token for token in prompt if 0 <= token < self._vocab]
        known.counts = [0] * len(known.tokens)
        known.place_of = {token: place for place, token in enumerate(known.tokens)}
        known.folded = 0

    def _fold(self, known: _Seen, changed: list[tuple[_Seen, list[int]]], everything: bool = False) -> _Seen:
        outputs = known.row.output_token_ids
        if len(outputs) < known.folded:
            self._restart(known)
            everything = True
        touched = set()
        for token in outputs[known.folded :]:
            if 0 <= token < self._vocab:
                place = known.place_of.setdefault(token, len(known.tokens))
                if place == len(known.tokens):
                    known.tokens.append(token)
                    known.counts.append(0)
                known.counts[place] += 1
                touched.add(place)
        known.folded = len(outputs)
        places = list(range(len(known.counts))) if everything else list(touched)
        if places:
            changed.append((known, places))
        return known

    def _updates(self, changed: Sequence[tuple[_Seen, list[int]]]) -> _Words:
        capacity = self.table.capacity
        updates: list[int] = []
        for known, places in changed:
            begin = known.slot * capacity
            for place in places:
                updates += (begin + place, known.tokens[place] << 32 | known.counts[place])
        return np.array(updates, dtype=np.int64).reshape(-1, UPDATE_WORDS)
