"""Positions of tokens on several axes, for models that rotate parts of a head by different ones (mRoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.runner.batch import BatchRow


def position_ids_of(rows: Sequence[BatchRow], axes: int) -> npt.NDArray[np.int32] | None:
    """int32 [axes, tokens] of a step; None when no row brings its own, and all axes count alike.

    Raises ValueError for a row that brings another number of them than its tokens have.
    """
    if not axes or not any(row.position_ids for row in rows):
        return None
    parts = []
    for row in rows:
        tokens = len(row.token_ids)
        if not row.position_ids:
            parts.append(np.broadcast_to(np.arange(row.start, row.start + tokens, dtype=np.int32), (axes, tokens)))
            continue
        if len(row.position_ids) != axes * tokens:
            raise ValueError(
                f"row {row.request_key!r}: {len(row.position_ids)} position ids for {tokens} tokens on {axes} axes"
            )
        parts.append(np.asarray(row.position_ids, np.int32).reshape(axes, tokens))
    return np.concatenate(parts, axis=1)
