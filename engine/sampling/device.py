"""The sampler of a device: the host sampler's tokens, log-probabilities and failures, without waiting for the device.

A step's sampling is four calls, of which only the last waits:

    plain = sampler.stage(rows)     what the rows want, packed into one pinned buffer and copied once
    sampler.greedy(logits)          when every row is plain; may as well be part of a replayed graph
    sampler.run(logits)             when one is not
    pending = sampler.send(count)   tokens, flags and log-probabilities on their way to the host
    sampler.collect(pending)        one SampledToken per row

A row is plain when it takes the likeliest token, reports no log-probabilities and changes no logit. A step of such rows
costs one kernel and one copy of some kilobytes, and nothing per row but a look at its parameters. A grammar changes
logits: its masks are made in `run`, while the device computes the logits, and are one more copy and launch.

Tokens are those of `engine.sampling.sample` on the same float32 logits: for greedy rows always, for drawn ones where
`numpy.exp` has the bits of `kernels.exponential` (x86 processors with AVX2 or AVX-512; see there for the odds
elsewhere). Log-probabilities differ by the rounding of one float64 sum.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import SamplingParams, TokenLogprob
from engine.sampling.biases import BiasEntries
from engine.sampling.failures import every_token_masked, logits_not_finite
from engine.sampling.masks import Masking, TokenMasks
from engine.sampling.penalties import PenaltySlots
from engine.sampling.row import SampledToken, SamplingRow
from kernels import draw as draw_kernels
from kernels import logit_changes
from kernels import logprobs as logprob_kernels
from kernels import sampling as sampling_kernels
from kernels.draw_weights import one_for
from kernels.logit_changes import ENTRY_WORDS
from kernels.sampling import ADJUSTED, DRAWN, LOGPROBS_SHIFT, NO_TOP_K, PENALIZED, ROW_WORDS, SELECTS

_GENERATIONS = 2  # steps whose results may be on their way at once
_FIRST_ROOM = 8192
_FIRST_TOPS = 32
_KNOWN_PARAMS = 4096
_WHAT_WORD, _INDEX_WORD, _SLOT_WORD = 0, 6, 7
_Words = NDArray[np.int64]
_NOTHING = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is the same for every token of a request. Holds the params, so that their id stays theirs."""

    params: SamplingParams
    words: tuple[int, ...]
    min_tokens: int
    plain: bool  # from min_tokens on
    biased: bool


@dataclass(slots=True)
class Pending:
    """Results of one step on their way to the host."""

    rows: list[SamplingRow]
    plain: bool
    outcome: _Words  # [2, max_rows]: tokens, flags
    found: _Words | None  # [max_rows, HEAD_WORDS + tops], log-probabilities
    event: torch.cuda.Event | None  # None where copies are done when they return
    number: int  # of the send


@dataclass(slots=True)
class _Staging:
    """A host buffer, and when the device has read it."""

    words: torch.Tensor
    copied: torch.cuda.Event | None


@dataclass(slots=True)
class _Outbox:
    """Host buffers of one generation of results."""

    outcome: torch.Tensor
    found: torch.Tensor | None
    event: torch.cuda.Event | None


class DeviceSampler:
    """Samples up to max_rows rows of `vocab` logits per step on one stream of one device. One thread stages and runs.

    `tokens` and `flags`, int64 [max_rows] on the device, hold the latest step's tokens and whether they count (0).
    Everything has a fixed address, so that `greedy` can be captured in CUDA graphs.
    """

    def __init__(
        self, max_rows: int, vocab: int, device: torch.device, *, scratch: sampling_kernels.Scratch | None = None
    ) -> None:
        """scratch: for tests that want other block sizes."""
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self._max_rows = max_rows
        self._vocab = vocab
        self._one = one_for(vocab)
        self._scratch = scratch or sampling_kernels.scratch_for(max_rows, vocab, self.device)
        self._outcome = torch.zeros(2, max_rows, dtype=torch.int64, device=self.device)
        self.tokens, self.flags = self._outcome[0], self._outcome[1]
        self._known: dict[int, _Known] = {}
        self._biases = BiasEntries(vocab, remembered=4 * max_rows)
        self._penalties = PenaltySlots(max_rows, vocab, self.device)
        self._masks = TokenMasks(max_rows, vocab, self.device)
        self._wide: torch.Tensor | None = None  # float32 logits, when those of the model are narrower
        self._logprobs: logprob_kernels.LogprobScratch | None = None
        self._outboxes = [self._outbox(None) for _ in range(_GENERATIONS)]
        self._sends = 0
        self._latest: Pending | None = None
        self._stages = 0
        self._owner = 0
        self._make_room(_FIRST_ROOM)

        self._rows: list[SamplingRow] = []
        self._plain = True
        self._any = 0  # union of the rows' words WHAT
        self._packed: list[SamplingRow] = []  # the rows whose unchanging words are in _table
        self._table = np.zeros((0, ROW_WORDS), dtype=np.int64)
        self._entry_count = self._update_count = 0
        self._longest = 0  # most penalised tokens of a row
        self._asks_logprobs = False
        self._grammars: list[tuple[int, Masking]] = []  # rows that have one

    # -- what the rows want ---------------------------------------------------------------------------------

    def stage(self, rows: Sequence[SamplingRow]) -> bool:
        """Takes note of what the rows of the next step want; returns whether they all are plain.

        If not, enqueues one copy to the device. Raises ValueError for more than max_rows rows.
        """
        self._check_owner()
        if len(rows) > self._max_rows:
            raise ValueError(f"{len(rows)} rows to sample, but there is memory for {self._max_rows} (max_rows)")
        self._rows = list(rows)
        known = self._known
        plain = True
        for row in rows:
            found = known.get(id(row.params)) or self._learn(row.params)
            if not found.plain or row.token_index < found.min_tokens or row.grammar is not None:
                plain = False
        self._plain = plain
        if not plain:
            self._pack(self._rows)
        return plain

    def _learn(self, params: SamplingParams) -> _Known:
        limited = 0 < params.top_k < self._vocab
        what = 0
        if params.temperature > 0.0:
            what |= DRAWN | (SELECTS if limited or params.top_p < 1.0 else 0)
        if params.logprobs >= 0:
            what |= (min(params.logprobs, self._vocab) + 1) << LOGPROBS_SHIFT
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            what |= ADJUSTED | PENALIZED
        temperature, top_p = (
            np.array([np.float32(params.temperature), params.top_p], dtype=np.float64).view(np.int64).tolist()
        )
        repetition, frequency, presence = np.array(penalties, dtype=np.float32).view(np.uint32).tolist()
        seed = params.seed & 0xFFFFFFFFFFFFFFFF
        words = (
            what,
            temperature,
            params.top_k if limited else NO_TOP_K,
            top_p,
            math.ceil(params.min_p * self._one),
            seed - (1 << 64) if seed >> 63 else seed,
            0,
            0,
            repetition,
            (frequency << 32 | presence) - (1 << 64) * (frequency >> 31),
        )
        if len(self._known) >= _KNOWN_PARAMS:
            self._known.clear()
        biased = bool(params.logit_bias)
        found = self._known[id(params)] = _Known(params, words, params.min_tokens, what == 0 and not biased, biased)
        return found

    def _pack(self, rows: list[SamplingRow]) -> None:
        known = [self._known.get(id(row.params)) or self._learn(row.params) for row in rows]
        if len(rows) != len(self._packed) or not all(map(operator.is_, rows, self._packed)):
            self._packed = rows
            self._table = np.array([of.words for of in known], dtype=np.int64)
        table = self._table.copy()
        table[:, _INDEX_WORD] = [row.token_index for row in rows]
        entries = updates = _NOTHING
        biased = [i for i, of in enumerate(known) if of.biased or rows[i].token_index < of.min_tokens]
        if biased:
            entries = self._biases.of([(i, rows[i]) for i in biased])
            table[biased, _WHAT_WORD] |= ADJUSTED
        self._grammars = [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None]
        if self._grammars:
            table[[i for i, _ in self._grammars], _WHAT_WORD] |= ADJUSTED
        self._longest = 0
        penalized = np.flatnonzero(table[:, _WHAT_WORD] & PENALIZED).tolist()
        if penalized:
            places, updates = self._penalties.follow([rows[i] for i in penalized])
            table[penalized, _SLOT_WORD] = [slot << 32 | count for slot, count in places]
            self._longest = max(count for _, count in places)
        self._any = int(np.bitwise_or.reduce(table[:, _WHAT_WORD]))
        most = int(table[:, _WHAT_WORD].max()) >> LOGPROBS_SHIFT
        self._asks_logprobs = most > 0
        if most > 0 and (self._logprobs is None or self._logprobs.tops < most - 1):
            tops = max(_FIRST_TOPS, 1 << (most - 2).bit_length())
            self._logprobs = logprob_kernels.LogprobScratch(self._scratch, tops)
        self._entry_count, self._update_count = len(entries), len(updates)
        self._send_staged(table.reshape(-1), entries.reshape(-1), updates.reshape(-1))

    def _send_staged(self, table: _Words, entries: _Words, updates: _Words) -> None:
        """Enqueues one copy of all that kernels read: rows at fixed addresses, then entries, then updates."""
        lists = len(entries) + len(updates)
        if lists > self._room:
            self._make_room(1 << (lists - 1).bit_length())
        staging = self._stagings[self._stages % _GENERATIONS]
        self._stages += 1
        if staging.copied is not None:
            staging.copied.synchronize()  # of two steps before: passed long ago
        host = staging.words.numpy()
        host[: len(table)] = table
        used = len(table)
        if lists:
            middle = self._lists_begin + len(entries)
            used = middle + len(updates)
            host[self._lists_begin : middle] = entries
            host[middle:used] = updates
        self._staged[:used].copy_(staging.words[:used], non_blocking=True)
        if staging.copied is not None:
            staging.copied.record()

    def _make_room(self, words: int) -> None:
        """Staging for that many words of entries and updates, behind the words of max_rows rows."""
        self._room = words
        self._lists_begin = self._max_rows * ROW_WORDS
        size = self._lists_begin + words
        self._staged = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._row_params = self._staged[: self._lists_begin].view(self._max_rows, ROW_WORDS)
        self._saved = torch.zeros(words // ENTRY_WORDS, dtype=torch.float32, device=self.device)
        self._stagings = [_Staging(self._host(size), self._event()) for _ in range(_GENERATIONS)]

    # -- kernels --------------------------------------------------------------------------------------------

    def greedy(self, logits: torch.Tensor) -> None:
        """Likeliest tokens of logits [rows, vocab] into `tokens` and `flags`. One kernel; can be captured."""
        sampling_kernels.largest(logits, self._scratch, self.tokens, self.flags)

    def run(self, logits: torch.Tensor, after_greedy: bool = False) -> None:
        """Tokens of the staged rows, which need not be plain: [rows, vocab] logits of any float dtype.

        after_greedy: `greedy` ran on the same logits before, perhaps within a graph. The number of launches does not
        depend on the number of rows. Logits that rows change are changed back before anything else can read them.
        """
        self._check_owner()
        if logits.shape != (len(self._rows), self._vocab):
            raise ValueError(f"logits are {list(logits.shape)}, but {len(self._rows)} rows were staged")
        if not after_greedy:
            self.greedy(logits)
        if self._plain:
            return
        tokens, flags, row_params = self.tokens, self.flags, self._row_params
        changed = logits
        if self._any & ADJUSTED:
            changed = self._masks.apply(logits, self._grammars) if self._grammars else self._widened(logits)
            self._change(changed)
            sampling_kernels.largest(changed, self._scratch, tokens, flags, adjusted=row_params)
        if self._any & DRAWN:
            draw_kernels.draw(changed, row_params, self._scratch, tokens, flags, bool(self._any & SELECTS))
        if self._any & ADJUSTED:
            self._change_back(changed)
        if self._asks_logprobs:
            assert self._logprobs is not None
            logprob_kernels.logprobs(logits, row_params, self._scratch, tokens, flags, self._logprobs)

    def _change(self, logits: torch.Tensor) -> None:
        logit_changes.adjust(logits, self._staged[self._lists_begin :], self._entry_count, self._saved)
        if self._any & PENALIZED:
            table = self._penalties.table
            table.update(self._staged[self._lists_begin + self._entry_count * ENTRY_WORDS :], self._update_count)
            logit_changes.penalize(logits, self._row_params, table, self._longest)

    def _change_back(self, logits: torch.Tensor) -> None:
        if self._any & PENALIZED:
            logit_changes.unpenalize(logits, self._row_params, self._penalties.table, self._longest)
        logit_changes.restore(logits, self._staged[self._lists_begin :], self._entry_count, self._saved)

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32:
            return logits
        if self._wide is None:
            self._wide = torch.empty(self._max_rows, self._vocab, dtype=torch.float32, device=self.device)
        return self._wide[: len(logits)].copy_(logits)

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Compiles what a step may launch, which else would happen at its first use. Waits for the device."""
        params = SamplingParams(max_tokens=1, top_k=1, logprobs=0)
        changing = msgspec.structs.replace(params, logit_bias={0: 1.0}, repetition_penalty=2.0)
        for rows in {1, min(self._max_rows, sampling_kernels.FEW_ROWS + 1)}:
            logits = torch.zeros(rows, self._vocab, dtype=dtype, device=self.device)
            for row in (SamplingRow(params, 0, (), (), ()), SamplingRow(changing, 0, (0,), (), ())):
                self.stage([row] * rows)
                self.run(logits)
                self.collect(self.send(rows))
        self._masks.warm_up(dtype)

    # -- results --------------------------------------------------------------------------------------------

    def send(self, count: int) -> Pending:
        """Enqueues the copies of the staged rows' results to the host. Two sends later they are overwritten.

        Raises ValueError when `count` is not the number of staged rows.
        """
        self._check_owner()
        if count != len(self._rows):
            raise ValueError(f"{count} rows to send, but {len(self._rows)} were staged")
        outbox = self._outboxes[self._sends % _GENERATIONS]
        asks = not self._plain and self._asks_logprobs
        if asks:
            assert self._logprobs is not None
            source = self._logprobs.found
            if outbox.found is None or outbox.found.shape != source.shape:
                outbox = self._outboxes[self._sends % _GENERATIONS] = self._outbox(source)
            assert outbox.found is not None
            outbox.found[:count].copy_(source[:count], non_blocking=True)
        outbox.outcome.copy_(self._outcome, non_blocking=True)
        if outbox.event is not None:
            outbox.event.record()
        self._sends += 1
        self._latest = sent = Pending(
            rows=self._rows,
            plain=self._plain,
            outcome=outbox.outcome.numpy(),
            found=outbox.found.numpy() if asks and outbox.found is not None else None,
            event=outbox.event,
            number=self._sends,
        )
        return sent

    def collect(self, pending: Pending | None = None) -> list[SampledToken]:
        """Waits for a send, by default the latest, and answers one SampledToken per row. May run on any thread.

        A failure says why a row has no token, as `engine.sampling.sample` would. Raises RuntimeError when nothing was
        sent, or the results were overwritten.
        """
        pending = pending or self._latest
        if pending is None:
            raise RuntimeError("collect before any send")
        if self._sends - pending.number >= _GENERATIONS:
            raise RuntimeError(f"results of send {pending.number} were overwritten: {self._sends} were made since")
        if pending.event is not None:
            pending.event.synchronize()
        count = len(pending.rows)
        tokens, flags = pending.outcome[:, :count].tolist()
        if any(flags):
            results = [_result(*each) for each in zip(tokens, flags, pending.rows, strict=True)]
        else:
            results = [SampledToken(token) for token in tokens]
        if pending.found is not None:
            _add_logprobs(pending.found, pending.rows, results, self._vocab)
        return results

    # -- memory ---------------------------------------------------------------------------------------------

    def _host(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self._cuda)

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._cuda else None

    def _outbox(self, found: torch.Tensor | None) -> _Outbox:
        return _Outbox(
            outcome=self._host(2, self._max_rows),
            found=None if found is None else self._host(*found.shape),
            event=self._event(),
        )

    def _check_owner(self) -> None:
        """Buffers are reused from step to step: two threads would stage over each other."""
        here = threading.get_ident()
        if self._owner != here:
            if self._owner:
                raise RuntimeError("a DeviceSampler belongs to the thread that used it first")
            self._owner = here


def _result(token: int, flag: int, row: SamplingRow) -> SampledToken:
    if flag == sampling_kernels.USABLE:
        return SampledToken(token)
    masked = flag == sampling_kernels.ALL_MASKED
    return SampledToken(None, failure=every_token_masked(row) if masked else logits_not_finite())


def _add_logprobs(found: _Words, rows: Sequence[SamplingRow], results: Sequence[SampledToken], vocab: int) -> None:
    asking = [i for i, row in enumerate(rows) if row.params.logprobs >= 0 and results[i].token_id is not None]
    if not asking:
        return
    words = found[asking]
    sums = words[:, 0].copy().view(np.float64)
    own = words[:, 1].astype(np.uint32).view(np.float32).astype(np.float64)
    ranks = (words[:, 1] >> 32).tolist()
    peaks = words[:, 2].astype(np.uint32).view(np.float32).astype(np.float64)
    offsets = peaks + np.log(sums)  # log of the sum of exp(logits)
    tops = words[:, logprob_kernels.HEAD_WORDS :]
    keys = (tops >> 32).astype(np.int32)
    values = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(np.float32).astype(np.float64)
    top_logprobs = (values - offsets[:, None]).tolist()
    top_ids = (0x7FFFFFFF - (tops & 0xFFFFFFFF)).tolist()
    for place, (i, logprob) in enumerate(zip(asking, (own - offsets).tolist(), strict=True)):
        result = results[i]
        assert result.token_id is not None
        result.logprob = TokenLogprob(result.token_id, logprob, ranks[place])
        count = min(rows[i].params.logprobs, vocab)
        ids, values_of_row = top_ids[place][:count], top_logprobs[place][:count]
        result.top_logprobs = tuple(map(TokenLogprob, ids, values_of_row, range(1, count + 1)))
