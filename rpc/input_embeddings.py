"""Embeddings that a request brings in place of its tokens' own: what they look like, and what refuses them.

A request has up to MOST_SEGMENTS of them. Each is a run of rows that begins at a place of the prompt. Router and fronts
check what they can; the engine checks the numbers too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rpc.errors import BatonError, ErrorCode

MOST_SEGMENTS = 64
MOST_BYTES = 15 << 20  # of all segments: with the prompt and tokens to come they must fit in a message to each server
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FIELD = "input_embeddings"


@dataclass(frozen=True, slots=True)
class InputEmbedding:
    location: int  # index of the prompt's token whose place the first row takes
    values: bytes  # rows of the model's hidden size, one after the other, little-endian
    dtype: str = "float32"  # or bfloat16


def check_input_embeddings(
    segments: Sequence[InputEmbedding], prompt_tokens: int, hidden_size: int | None = None
) -> None:
    """Raises INVALID_PARAMS for segments that cannot take tokens' places in a prompt of that length.

    hidden_size: None where it is not known; 0: the model takes no embeddings.
    """
    if not segments:
        return
    if hidden_size == 0:
        raise _refusal("the model takes no input embeddings; leave them out")
    if len(segments) > MOST_SEGMENTS:
        raise _refusal(f"has {len(segments)} segments; at most {MOST_SEGMENTS} are allowed")
    size_bytes = sum(len(segment.values) for segment in segments)
    if size_bytes > MOST_BYTES:
        raise _refusal(f"has {size_bytes} bytes; at most {MOST_BYTES} are allowed; bfloat16 takes half of float32")
    taken: list[tuple[int, int]] = []
    for number, segment in enumerate(segments):
        name = f"segment {number}"
        item = ITEM_BYTES.get(segment.dtype)
        if item is None:
            raise _refusal(f"{name} has dtype {segment.dtype[:32]!r}; it must be one of {', '.join(ITEM_BYTES)}")
        row = item * (hidden_size or 1)
        if not segment.values or len(segment.values) % row:
            size = f"{row} bytes" if hidden_size else f"{item} bytes a number"
            raise _refusal(f"{name} has {len(segment.values)} bytes; it must have whole rows of {size}, at least one")
        rows = len(segment.values) // row if hidden_size else 1
        if segment.location < 0 or segment.location + rows > prompt_tokens:
            raise _refusal(
                f"{name} takes the places {segment.location} to {segment.location + rows - 1}; "
                f"the prompt has the places 0 to {prompt_tokens - 1}"
            )
        taken.append((segment.location, segment.location + rows))
    taken.sort()
    for (_, end), (begin, _) in pairwise(taken):
        if begin < end:
            raise _refusal(f"two segments take place {begin}; each place can be taken once")


def _refusal(message: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, f"{FIELD}: {message}", param=FIELD)


def digest_of(segments: Sequence[InputEmbedding]) -> bytes:
    """What the prefix cache tells prompts with embeddings apart by, 32 bytes: their blocks are shared with nobody who
    brings other ones, or none. Empty without segments."""
    if not segments:
        return b""
    digest = hashlib.sha256()
    for segment in sorted(segments, key=lambda item: item.location):
        digest.update(f"{segment.location}:{segment.dtype}:{len(segment.values)};".encode())
        digest.update(segment.values)
    return digest.digest()
