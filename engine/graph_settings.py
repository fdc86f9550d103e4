"""Settings of the CUDA graphs. Those of the prefill graphs, as they cross from a server's front to its engine.

One structure with named fields and a version: a missing field takes its default, an unknown one or a wrong type is an
error. Torch-free.
"""

from __future__ import annotations

import math

import msgspec

from engine.capture_config import geometric_sizes
from rpc.errors import BatonError, ErrorCode

VERSION = 1
MOST_BUCKETS = 64
MOST_REQUESTS = 1024
LARGEST_DEFAULT_BUCKET = 160
DEFAULT_MAX_REQUESTS = 8
DEFAULT_MAX_PADDING_RATIO = 0.25
DEFAULT_BUCKETS = tuple(geometric_sizes(LARGEST_DEFAULT_BUCKET, (4, 3)))
"""Token buckets. Neighbours are so near that padding stays within the default ratio."""

MOST_DECODE_SIZES = 1024
DECODE_SIZES_FLAG = "--decode-capture-config"
BUCKETS_FLAG = "--prefill-cuda-graph-capture-config"
REQUESTS_FLAG = "--prefill-cuda-graph-max-requests"
RATIO_FLAG = "--prefill-cuda-graph-max-padding-ratio"


class PrefillGraphSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator wants of the prefill graphs."""

    version: int = VERSION
    enabled: bool = False
    max_requests: int = DEFAULT_MAX_REQUESTS  # prompts in one replay
    buckets: tuple[int, ...] = DEFAULT_BUCKETS  # tokens of each graph
    max_padding_ratio: float = DEFAULT_MAX_PADDING_RATIO  # of a bucket; a batch that needs more runs eagerly
    strict: bool = False  # without captured graphs the engine does not start

    def check(self) -> None:
        """Raises INVALID_PARAMS for the first value that cannot be, naming its flag."""
        if self.version != VERSION:
            raise _invalid(f"prefill graph settings are of version {self.version}, this engine reads {VERSION}")
        if not 1 <= self.max_requests <= MOST_REQUESTS:
            raise _invalid(f"{REQUESTS_FLAG} is {self.max_requests}; it must be in 1 to {MOST_REQUESTS}")
        if math.isnan(self.max_padding_ratio) or not 0.0 <= self.max_padding_ratio <= 1.0:
            raise _invalid(f"{RATIO_FLAG} is {self.max_padding_ratio}; it must be in 0.0 to 1.0")
        if not self.buckets:
            raise _invalid(f"{BUCKETS_FLAG} is empty")
        if len(self.buckets) > MOST_BUCKETS:
            raise _invalid(f"{BUCKETS_FLAG} names {len(self.buckets)} sizes; at most {MOST_BUCKETS} are allowed")
        if self.buckets[0] < 1 or list(self.buckets) != sorted(set(self.buckets)):
            raise _invalid(f"{BUCKETS_FLAG} must be positive, ascending and without repetition: {list(self.buckets)}")

    def buckets_within(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, ...]:
        """The buckets of an engine whose steps hold at most so many tokens.

        The default ones are cut to that limit, so that a small model starts; a bucket that somebody chose and that
        can never be filled raises INVALID_PARAMS.
        """
        limit = min(max_model_len, max_num_batched_tokens)
        if self.buckets == DEFAULT_BUCKETS:
            return tuple(sorted({min(bucket, limit) for bucket in self.buckets}))
        largest = self.buckets[-1]
        if largest > limit:
            raise _invalid(
                f"{BUCKETS_FLAG} has a bucket of {largest} tokens, above the {limit} of the smaller one of "
                f"--max-model-len ({max_model_len}) and --max-num-batched-tokens ({max_num_batched_tokens})"
            )
        return self.buckets


def _invalid(message: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, message)
