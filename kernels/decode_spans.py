"""Spans: how the rows of a batch are cut for the programs of `kernels.decode_attention`.

A row's tiles are cut into pieces, each with sums of its own; a span is successive pieces of one row and key head, which
one program goes through. Both are functions of the rows' lengths and of the configuration, computed on the device.
"""

from __future__ import annotations

from kernels.jit import jit, tl


@jit
def _pieces(length, most_pieces, least_tiles, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """First tile, end of tiles, tiles of a piece, and pieces (at least one) of rows of these lengths."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE
    last = (length + TILE - 1) // TILE
    size = tl.maximum((last - first + most_pieces - 1) // most_pieces, least_tiles)
    return first, last, size, tl.maximum((last - first + size - 1) // size, 1)


@jit
def _span(size, count, target):
    """Pieces of a span, for rows of `count` pieces of `size` tiles: evenly, and so that it has about `target` tiles."""
    pieces = tl.maximum((target + size - 1) // size, 1)
    spans = (count + pieces - 1) // pieces
    return (count + spans - 1) // spans


@jit
def plan_spans(
    kv_lens,
    rows,
    most_pieces,
    least_tiles,
    shares,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Ends of the rows' spans among all spans of a key head, tiles of a span, and spans of all key heads."""
    if ROWS_PAD == 1:
        lens = tl.load(kv_lens, cache_modifier=CACHE)
        firsts, lasts, sizes, counts = _pieces(lens, most_pieces, least_tiles, TILE, WINDOW)
        target = ((lasts - firsts) * KV_HEADS + shares - 1) // shares
        pieces = _span(sizes, counts, target)
        ends = (counts + pieces - 1) // pieces
        return ends, target, ends * KV_HEADS
    else:
        ids = tl.arange(0, ROWS_PAD)
        lens = tl.load(kv_lens + ids, mask=ids < rows, other=0, cache_modifier=CACHE)
        firsts, lasts, sizes, counts = _pieces(lens, most_pieces, least_tiles, TILE, WINDOW)
        target = (tl.sum(lasts - firsts, 0) * KV_HEADS + shares - 1) // shares
        pieces = _span(sizes, counts, target)
        ends = tl.cumsum(tl.where(ids < rows, (counts + pieces - 1) // pieces, 0), 0)
        return ends, target, tl.max(ends, 0) * KV_HEADS


@jit
def place_span(
    item,
    ends,
    target,
    kv_lens,
    rows,
    most_pieces,
    least_tiles,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    CACHE: tl.constexpr,
):
    """A span: its row and key head, the row's tokens, tiles of a piece and pieces, the span's first piece and how many
    pieces it has, and its tiles' begin and end."""
    unit = item // KV_HEADS
    if ROWS_PAD == 1:
        row = item * 0
        span = unit
    else:
        row = tl.minimum(tl.sum((ends <= unit).to(tl.int32), 0), rows - 1)
        span = unit - tl.max(tl.where(ends <= unit, ends, 0), 0)
    length = tl.load(kv_lens + row, cache_modifier=CACHE)
    first, last, size, count = _pieces(length, most_pieces, least_tiles, TILE, WINDOW)
    pieces = _span(size, count, target)
    piece = span * pieces
    pieces = tl.minimum(pieces, count - piece)
    begin = first + piece * size
    return row, item % KV_HEADS, length, size, count, piece, pieces, begin, tl.minimum(begin + pieces * size, last)
