"""A step's metadata made on the device: one packed copy from the host, one launch that fills every buffer of the step.

The host writes one int32 buffer (pinned, then copied to the device in one piece, only the words in use) and
`prepare_decode` or `prepare_prefill` spreads it over the step's buffers. Sizes of the batch travel in the buffer's
first words, so both launches can also be captured in a CUDA graph: nothing but the buffer's content changes from replay
to replay. The padded extents are the sizes of the output tensors.

Staging of a decode step (`DecodeLayout`), B rows of one token each; int32 words in this order:

    header      4        B, R, W, 0
    token_ids   B        the token each row computes
    positions   B        its position: the number of tokens that are in the pool already
    blocks      B        the physical block in which that position lies
    changed     R        rows whose whole block table follows (R <= B)
    tables      R x W    their tables, row by row; 0 behind a row's own blocks

Block tables stay on the device from step to step. A row's table is sent when another request than in the last decode
step sits in the row; otherwise the entry for `blocks` is all that can be new, since a row gains at most one block a
step. Whatever else writes the tables (`prepare_prefill` on the same buffers; a padded step, which clears the rows from
B on) makes those rows changed. R = B with every table is always right.

Staging of a prefill or mixed step (`PrefillLayout`), B rows with T tokens together:

    header      4        B, T, W, S
    cu_seqlens  B + 1    row i computes tokens [cu_seqlens[i], cu_seqlens[i + 1]); empty rows are allowed
    starts      B        tokens of the row that are in the pool already; 0 for an empty row
    sampled     S        index of each token whose logits are wanted (S <= B)
    token_ids   T
    tables      B x W    block tables, row by row; 0 behind a row's own blocks

What is filled (`StepBuffers`), for rows r and tokens t, with b = block size:

    token_ids, positions   int64   as staged
    slots                  int64   block * b + position % b, where the token's key and value go; -1: nowhere
    kv_lens                int32   tokens of the row in the pool after the step
    cu_seqlens             int32   exclusive prefix sum of the rows' tokens in the step
    cu_kv_seqlens          int32   exclusive prefix sum of kv_lens
    block_tables           int32   rows' physical blocks; columns behind a row's own blocks are undefined or 0
    last_tokens            int64   (prefill) `sampled`

Padded tokens: token 0, position 0, slot -1. Padded rows: length 0, table all 0, both prefix sums stay at their last
value. A token whose block is 0, the reserved one, gets slot -1 too: padding can never write where a request reads.

Cost: some kilobytes each way, so a launch's latency (about 3 us on an H200) whatever the batch. The prefix sums are
parallel: every program adds up the rows before its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.jit import jit, tl, triton

HEADER_WORDS = 4
_COLUMNS = 256  # block-table columns copied at a time by one program
_TOKENS = 512  # tokens filled at a time by one program
_PROGRAMS = 2048  # about as many programs as the device runs at once


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """Where the parts of a decode step's staging lie. rows: B, changed: R, columns: W of the module's text."""

    rows: int
    changed: int
    columns: int

    @property
    def header(self) -> tuple[int, int, int, int]:
        return (self.rows, self.changed, self.columns, 0)

    @property
    def token_ids(self) -> slice:
        return slice(HEADER_WORDS, HEADER_WORDS + self.rows)

    @property
    def positions(self) -> slice:
        return slice(HEADER_WORDS + self.rows, HEADER_WORDS + 2 * self.rows)

    @property
    def blocks(self) -> slice:
        return slice(HEADER_WORDS + 2 * self.rows, HEADER_WORDS + 3 * self.rows)

    @property
    def changed_rows(self) -> slice:
        return slice(HEADER_WORDS + 3 * self.rows, HEADER_WORDS + 3 * self.rows + self.changed)

    @property
    def tables(self) -> slice:
        """To be seen as [changed, columns]."""
        return slice(HEADER_WORDS + 3 * self.rows + self.changed, self.words)

    @property
    def words(self) -> int:
        """int32 words in use, from the buffer's start."""
        return HEADER_WORDS + 3 * self.rows + self.changed * (1 + self.columns)


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Where the parts of a prefill or mixed step's staging lie. rows: B, tokens: T, columns: W, sampled: S."""

    rows: int
    tokens: int
    columns: int
    sampled: int

    @property
    def header(self) -> tuple[int, int, int, int]:
        return (self.rows, self.tokens, self.columns, self.sampled)

    @property
    def cu_seqlens(self) -> slice:
        return slice(HEADER_WORDS, HEADER_WORDS + self.rows + 1)

    @property
    def starts(self) -> slice:
        return slice(HEADER_WORDS + self.rows + 1, HEADER_WORDS + 2 * self.rows + 1)

    @property
    def sampled_tokens(self) -> slice:
        begin = HEADER_WORDS + 2 * self.rows + 1
        return slice(begin, begin + self.sampled)

    @property
    def token_ids(self) -> slice:
        begin = HEADER_WORDS + 2 * self.rows + 1 + self.sampled
        return slice(begin, begin + self.tokens)

    @property
    def tables(self) -> slice:
        """To be seen as [rows, columns]."""
        return slice(self.words - self.rows * self.columns, self.words)

    @property
    def words(self) -> int:
        """int32 words in use, from the buffer's start."""
        return HEADER_WORDS + 2 * self.rows + 1 + self.sampled + self.tokens + self.rows * self.columns


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The buffers of a step, at fixed addresses. A smaller step uses views of their beginnings (`cut`)."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64
    kv_lens: torch.Tensor  # [rows] int32
    cu_seqlens: torch.Tensor  # [rows + 1] int32
    cu_kv_seqlens: torch.Tensor  # [rows + 1] int32
    block_tables: torch.Tensor  # [rows, width] int32; rows may lie apart
    last_tokens: torch.Tensor  # [rows] int64

    @classmethod
    def allocate(cls, rows: int, tokens: int, width: int, device: torch.device | str) -> StepBuffers:
        """Buffers for at most that many rows, tokens, and block-table columns, filled as an empty step leaves them."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(torch.int64, tokens),
            positions=zeros(torch.int64, tokens),
            slots=zeros(torch.int64, tokens) - 1,
            kv_lens=zeros(torch.int32, rows),
            cu_seqlens=zeros(torch.int32, rows + 1),
            cu_kv_seqlens=zeros(torch.int32, rows + 1),
            block_tables=zeros(torch.int32, rows, width),
            last_tokens=zeros(torch.int64, rows),
        )

    def cut(self, rows: int, tokens: int) -> StepBuffers:
        """Views of the first rows and tokens. Raises ValueError when there are not that many."""
        if not 0 < rows <= self.kv_lens.shape[0] or not 0 < tokens <= self.token_ids.shape[0]:
            raise ValueError(
                f"{rows} rows with {tokens} tokens do not fit buffers for {self.kv_lens.shape[0]} rows with "
                f"{self.token_ids.shape[0]} tokens"
            )
        return StepBuffers(
            self.token_ids[:tokens],
            self.positions[:tokens],
            self.slots[:tokens],
            self.kv_lens[:rows],
            self.cu_seqlens[: rows + 1],
            self.cu_kv_seqlens[: rows + 1],
            self.block_tables[:rows],
            self.last_tokens[:rows],
        )


@jit(do_not_specialize=["table_stride", "width"])
def _prepare_decode_kernel(
    staging,
    token_ids,
    positions,
    slots,
    kv_lens,
    cu_seqlens,
    cu_kv_seqlens,
    tables,
    table_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per row of the padded batch."""
    row = tl.program_id(0)
    rows = tl.load(staging)
    changed = tl.load(staging + 1)
    columns = tl.load(staging + 2)
    words = staging + 4
    real = row < rows
    token = tl.load(words + row, mask=real, other=0)
    position = tl.load(words + rows + row, mask=real, other=0)
    block = tl.load(words + 2 * rows + row, mask=real, other=0)
    slot = tl.where(block > 0, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(positions + row, position.to(tl.int64))
    tl.store(slots + row, slot)
    tl.store(kv_lens + row, tl.where(real, position + 1, 0))
    own = tables + row.to(tl.int64) * table_stride
    tl.store(own + position // BLOCK_SIZE, block)

    index = tl.arange(0, ROWS)
    before = tl.load(words + rows + index, mask=(index <= row) & (index < rows), other=-1)
    tl.store(cu_kv_seqlens + row + 1, tl.sum(before + 1, axis=0))
    tl.store(cu_seqlens + row + 1, tl.minimum(row + 1, rows))
    if row == 0:
        tl.store(cu_seqlens, 0)
        tl.store(cu_kv_seqlens, 0)

    column = tl.arange(0, COLUMNS)
    if row < changed:
        target = tables + tl.load(words + 3 * rows + row).to(tl.int64) * table_stride
        source = words + 3 * rows + changed + row.to(tl.int64) * columns
        for first in range(0, columns, COLUMNS):
            inside = first + column < columns
            tl.store(target + first + column, tl.load(source + first + column, mask=inside), mask=inside)
    if row >= rows:
        for first in range(0, width, COLUMNS):
            tl.store(own + first + column, tl.zeros([COLUMNS], tl.int32), mask=first + column < width)


def prepare_decode(staging: torch.Tensor, out: StepBuffers, block_size: int) -> None:
    """Fill a decode step's buffers in one launch. `out.last_tokens` is not touched: every row samples.

    staging: int32 on the device, as `DecodeLayout` says. out: buffers cut to the padded number of rows, as many tokens
    as rows. The batch must fit them: B <= rows, W <= width of the block tables (the caller's `DecodeLayout` knows).
    """
    rows = out.kv_lens.shape[0]
    _prepare_decode_kernel[(rows,)](
        staging,
        out.token_ids,
        out.positions,
        out.slots,
        out.kv_lens,
        out.cu_seqlens,
        out.cu_kv_seqlens,
        out.block_tables,
        out.block_tables.stride(0),
        out.block_tables.shape[1],
        BLOCK_SIZE=block_size,
        ROWS=triton.next_power_of_2(rows),
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


def prepare_decode_reference(staging: torch.Tensor, out: StepBuffers, block_size: int) -> None:
    """The same, row by row."""
    words = staging.tolist()
    layout = DecodeLayout(*words[:3])
    total = 0
    for i, row in enumerate(words[layout.changed_rows]):
        begin = layout.tables.start + i * layout.columns
        out.block_tables[row, : layout.columns] = staging[begin : begin + layout.columns]
    out.cu_seqlens[0] = out.cu_kv_seqlens[0] = 0
    for row in range(out.kv_lens.shape[0]):
        real = row < layout.rows
        position = words[layout.positions][row] if real else 0
        block = words[layout.blocks][row] if real else 0
        total += position + 1 if real else 0
        out.token_ids[row] = words[layout.token_ids][row] if real else 0
        out.positions[row] = position
        out.slots[row] = block * block_size + position % block_size if block > 0 else -1
        out.kv_lens[row] = position + 1 if real else 0
        out.cu_seqlens[row + 1] = min(row + 1, layout.rows)
        out.cu_kv_seqlens[row + 1] = total
        if real:
            out.block_tables[row, position // block_size] = block
        else:
            out.block_tables[row] = 0


@jit(do_not_specialize=["table_stride", "width", "row_capacity", "token_capacity"])
def _prepare_prefill_kernel(
    staging,
    token_ids,
    positions,
    slots,
    kv_lens,
    cu_seqlens,
    cu_kv_seqlens,
    tables,
    last_tokens,
    table_stride,
    width,
    row_capacity,
    token_capacity,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs (row, share of the row's tokens); row number `row_capacity` stands for the padded tokens."""
    row = tl.program_id(0)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    rows = tl.load(staging)
    tokens = tl.load(staging + 1)
    columns = tl.load(staging + 2)
    sampled = tl.load(staging + 3)
    cu = staging + 4
    starts = cu + rows + 1
    sampled_tokens = starts + rows
    ids = sampled_tokens + sampled
    staged_tables = ids + tokens
    lane = tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    index = tl.arange(0, ROWS)

    if row < rows:
        begin = tl.load(cu + row)
        end = tl.load(cu + row + 1)
        start = tl.load(starts + row)
        source = staged_tables + row.to(tl.int64) * columns
        target = tables + row.to(tl.int64) * table_stride
        for first in range(begin + share * TOKENS, end, shares * TOKENS):
            token = first + lane
            inside = token < end
            position = start + token - begin
            block = tl.load(
                source + position // BLOCK_SIZE, mask=inside & (position // BLOCK_SIZE < columns), other=0
            ).to(tl.int64)
            slot = tl.where(block > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(token_ids + token, tl.load(ids + token, mask=inside).to(tl.int64), mask=inside)
            tl.store(positions + token, position.to(tl.int64), mask=inside)
            tl.store(slots + token, slot, mask=inside)
        for first in range(share * COLUMNS, columns, shares * COLUMNS):
            inside = first + column < columns
            tl.store(target + first + column, tl.load(source + first + column, mask=inside), mask=inside)
        if share == 0:
            before = tl.load(starts + index, mask=(index <= row) & (index < rows), other=0)
            tl.store(kv_lens + row, start + end - begin)
            tl.store(cu_seqlens + row + 1, end)
            tl.store(cu_kv_seqlens + row + 1, tl.sum(before, axis=0) + end)
    elif row < row_capacity:
        target = tables + row.to(tl.int64) * table_stride
        for first in range(share * COLUMNS, width, shares * COLUMNS):
            tl.store(target + first + column, tl.zeros([COLUMNS], tl.int32), mask=first + column < width)
        if share == 0:
            before = tl.load(starts + index, mask=index < rows, other=0)
            tl.store(kv_lens + row, 0)
            tl.store(cu_seqlens + row + 1, tokens)
            tl.store(cu_kv_seqlens + row + 1, tl.sum(before, axis=0) + tokens)
    else:
        for first in range(tokens + share * TOKENS, token_capacity, shares * TOKENS):
            token = first + lane
            inside = token < token_capacity
            tl.store(token_ids + token, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(positions + token, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(slots + token, tl.full([TOKENS], -1, tl.int64), mask=inside)
        if share == 0:
            tl.store(cu_seqlens, 0)
            tl.store(cu_kv_seqlens, 0)
            wanted = tl.load(sampled_tokens + index, mask=index < sampled, other=0)
            tl.store(last_tokens + index, wanted.to(tl.int64), mask=index < row_capacity)


def prepare_prefill(staging: torch.Tensor, out: StepBuffers, block_size: int, longest: int) -> None:
    """Fill a prefill or mixed step's buffers in one launch.

    staging: int32 on the device, as `PrefillLayout` says. out: buffers cut to the padded numbers of rows and tokens,
    which the batch must fit (the caller's layout knows). longest: the tokens of the longest row, or a bound of them; it
    sets the number of programs and nothing else.
    """
    rows, tokens = out.kv_lens.shape[0], out.token_ids.shape[0]
    _prepare_prefill_kernel[(rows + 1, _shares(rows + 1, longest))](
        staging,
        out.token_ids,
        out.positions,
        out.slots,
        out.kv_lens,
        out.cu_seqlens,
        out.cu_kv_seqlens,
        out.block_tables,
        out.last_tokens,
        out.block_tables.stride(0),
        out.block_tables.shape[1],
        rows,
        tokens,
        BLOCK_SIZE=block_size,
        ROWS=triton.next_power_of_2(rows),
        TOKENS=_TOKENS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


def prepare_prefill_reference(staging: torch.Tensor, out: StepBuffers, block_size: int) -> None:
    """The same, token by token."""
    words = staging.tolist()
    layout = PrefillLayout(*words[:HEADER_WORDS])
    cu = words[layout.cu_seqlens]
    total = 0
    out.token_ids.zero_()
    out.positions.zero_()
    out.slots.fill_(-1)
    out.cu_seqlens[0] = out.cu_kv_seqlens[0] = 0
    for row in range(out.kv_lens.shape[0]):
        real = row < layout.rows
        start = words[layout.starts][row] if real else 0
        begin, end = (cu[row], cu[row + 1]) if real else (layout.tokens, layout.tokens)
        table = words[layout.tables][row * layout.columns : (row + 1) * layout.columns] if real else []
        total += start + end - begin
        out.kv_lens[row] = start + end - begin
        out.cu_seqlens[row + 1] = end
        out.cu_kv_seqlens[row + 1] = total
        if real:
            out.block_tables[row, : layout.columns] = torch.tensor(table, dtype=torch.int32)
        else:
            out.block_tables[row] = 0
        for token in range(begin, end):
            position = start + token - begin
            column = position // block_size
            block = table[column] if column < layout.columns else 0
            out.token_ids[token] = words[layout.token_ids][token]
            out.positions[token] = position
            out.slots[token] = block * block_size + position % block_size if block > 0 else -1
    out.last_tokens.zero_()
    out.last_tokens[: layout.sampled] = torch.tensor(words[layout.sampled_tokens], dtype=torch.int64)


def _shares(rows: int, longest: int) -> int:
    """Programs that share the tokens of a row with at most that many."""
    return max(min(triton.cdiv(longest, _TOKENS), _PROGRAMS // rows), 1)
