"""A request's own embeddings inside the engine: read once, and handed on to every step that computes their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rpc.errors import BatonError, ErrorCode
from rpc.input_embeddings import FIELD, InputEmbedding, check_input_embeddings

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows that take the places from `place` on: of the prompt in a request, of a step's tokens in a row."""

    place: int
    values: Rows  # [rows, hidden]

    @property
    def end(self) -> int:
        return self.place + len(self.values)


def read_embeddings(
    segments: Sequence[InputEmbedding], prompt_tokens: int, hidden_size: int
) -> tuple[EmbeddingRows, ...]:
    """The segments as float32 rows, in order of their places. hidden_size 0: the model takes none.

    Raises INVALID_PARAMS for what cannot take tokens' places, and for numbers that are not finite.
    """
    if not segments:
        return ()
    check_input_embeddings(segments, prompt_tokens, hidden_size)
    found = []
    for segment in sorted(segments, key=lambda item: item.location):
        values = _float32(segment).reshape(-1, hidden_size)
        if not np.isfinite(values).all():
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"{FIELD}: the segment at {segment.location} has numbers that are not finite",
                param=FIELD,
            )
        found.append(EmbeddingRows(segment.location, values))
    return tuple(found)


def _float32(segment: InputEmbedding) -> Rows:
    if segment.dtype == "float32":
        return np.frombuffer(segment.values, "<f4").astype(np.float32)
    # A bfloat16 number is the upper half of a float32 one.
    return (np.frombuffer(segment.values, "<u2").astype(np.uint32) << 16).view(np.float32)


def embeddings_of_chunk(embeddings: Sequence[EmbeddingRows], start: int, end: int) -> tuple[EmbeddingRows, ...]:
    """What concerns the tokens [start, end) of a request, with places counted from `start`. The one way by which
    embeddings get into a step."""
    return tuple(
        EmbeddingRows(
            max(item.place, start) - start, item.values[max(0, start - item.place) : max(0, end - item.place)]
        )
        for item in embeddings
        if item.place < end and item.end > start
    )
