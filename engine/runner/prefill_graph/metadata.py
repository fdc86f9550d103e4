"""What a replay's attention reads about its rows. Pure host code on numpy arrays.

A replay has max_requests + 1 rows, called slots. The prompts take slots 0 to n - 1, slots up to max_requests - 1 are
empty, and the last one is the sentinel: the padding that fills the bucket, as if it were one more prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ReplayMetadata:
    """Arrays of one bucket. They may be longer than they have to be; what lies behind is left alone.

    Token i of the packed batch, in slot s, stands at i + padding_offset[i] = s * bucket + its position when slots are
    laid out one after the other with `bucket` tokens each.
    """

    input_lengths: Int32  # [max_requests + 1]
    cu_seqlens: Int32  # [max_requests + 2]
    cu_kv_seqlens: Int32  # [max_requests + 2]; there is no prefix, so it is cu_seqlens again
    padding_offset: Int32  # [bucket]


@dataclass(frozen=True, slots=True)
class MetadataFailure:
    """Why a batch cannot be laid out; its arrays are untouched."""

    reason: str


def prepare_prefill_replay_metadata(
    lengths: Sequence[int], bucket: int, max_requests: int, out: ReplayMetadata
) -> MetadataFailure | None:
    """Fills `out` for prompts of `lengths` tokens in a bucket of `bucket` tokens. None: it is filled.

    A failure, and nothing changed, for an array that is too small, for no prompts or too many, for a length of zero or
    below, and for more tokens than the bucket has.
    """
    count = len(lengths)
    wanted = (
        ("input_lengths", out.input_lengths, max_requests + 1),
        ("cu_seqlens", out.cu_seqlens, max_requests + 2),
        ("cu_kv_seqlens", out.cu_kv_seqlens, max_requests + 2),
        ("padding_offset", out.padding_offset, bucket),
    )
    for name, array, least in wanted:
        if array.size < least:
            return MetadataFailure(f"{name} holds {array.size} numbers, needed are {least}")
    if not 1 <= count <= max_requests:
        return MetadataFailure(f"{count} prompts; a replay takes 1 to {max_requests}")
    if min(lengths) < 1:
        return MetadataFailure(f"a prompt of {min(lengths)} tokens")
    tokens = sum(lengths)
    if tokens > bucket:
        return MetadataFailure(f"{tokens} tokens; the bucket holds {bucket}")
    slots = max_requests + 1
    slot_lengths = [*lengths, *[0] * (max_requests - count), bucket - tokens]
    ends = [0, *accumulate(slot_lengths)]
    packed_offset = ends[-1]
    if packed_offset != bucket:
        return MetadataFailure(f"the slots hold {packed_offset} tokens, the bucket {bucket}")
    out.input_lengths[:slots] = slot_lengths
    out.cu_seqlens[: slots + 1] = ends
    out.cu_kv_seqlens[: slots + 1] = ends
    # In slot s every token is moved by the same distance: from the slot's packed start to s * bucket.
    for slot in (*range(count), max_requests):
        begin = ends[slot]
        out.padding_offset[begin : ends[slot + 1]] = slot * bucket - begin
    return None


def metadata_problem(name: str, tensor: Any, *, least: int, device_type: str) -> str:
    """Why a replay cannot read device metadata from `tensor`, a torch tensor or None; empty when it can.

    It must be there, on the device, int32, contiguous, and hold at least `least` numbers.
    """
    import torch

    if tensor is None:
        return f"{name} is not there"
    if tensor.device.type != device_type:
        return f"{name} is on {tensor.device.type}, not on {device_type}"
    if tensor.dtype is not torch.int32:
        return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not int32"
    if not tensor.is_contiguous():
        return f"{name} is not contiguous"
    if tensor.numel() < least:
        return f"{name} holds {tensor.numel()} numbers, needed are {least}"
    return ""
