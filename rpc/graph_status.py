"""CUDA graphs as all processes speak of them: what a graph is captured for, and how a request's prompt was computed.

The prefill status is a value of one enumeration from the engine that decides it to the client that reads it: in the
engine's messages, in `PrefillResult.prefill_cuda_graph_status`, in the JSON object `baton` and in the header
`x-baton-prefill-cuda-graph` it is the same word.
"""

from __future__ import annotations

import threading
from enum import StrEnum


class GraphRole(StrEnum):
    """What a captured graph computes; stated by whoever builds its runner. Label `kind` of the graph metrics."""

    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_PREFILL = "draft_prefill"
    DSPARK_PROPOSE = "dspark_propose"
    DSPARK_COMMIT = "dspark_commit"
    GENERATIVE_PREFILL = "generative_prefill"


class PrefillGraphStatus(StrEnum):
    """How a request's prompt was computed, or why no graph did it. `CAPTURED` occurs at start-up only."""

    NOT_REQUESTED = "not_requested"  # the feature is off on the server that computed the prompt
    REPLAYED = "replayed"  # one replay computed the whole prompt
    CAPTURED = "captured"
    CAPTURE_UNAVAILABLE = "capture_unavailable"  # enabled, but there is no captured graph
    INPUT_METADATA_INVALID = "input_metadata_invalid"
    INPUT_TOKENS_EXCEED_CAPTURE_LIMIT = "input_tokens_exceed_capture_limit"
    PADDING_RATIO_EXCEEDED = "padding_ratio_exceeded"
    REQUEST_CAPACITY_EXCEEDED = "request_capacity_exceeded"
    PREFIX_NOT_SUPPORTED = "prefix_not_supported"
    MULTIMODAL_NOT_SUPPORTED = "multimodal_not_supported"
    UNSUPPORTED_BACKEND = "unsupported_backend"
    UNSUPPORTED_MODEL = "unsupported_model"
    UNSUPPORTED_MOE_CONFIG = "unsupported_moe_config"
    UNSUPPORTED_TOPOLOGY = "unsupported_topology"
    FEATURE_DISABLED = "feature_disabled"
    ERROR = "error"  # preparing the replay failed; the batch ran eagerly


REQUEST_STATUSES = tuple(status for status in PrefillGraphStatus if status is not PrefillGraphStatus.CAPTURED)
"""The statuses that a request can have."""

INIT_STATUSES = (
    PrefillGraphStatus.NOT_REQUESTED,
    PrefillGraphStatus.CAPTURED,
    PrefillGraphStatus.CAPTURE_UNAVAILABLE,
    PrefillGraphStatus.UNSUPPORTED_BACKEND,
    PrefillGraphStatus.UNSUPPORTED_MODEL,
    PrefillGraphStatus.UNSUPPORTED_MOE_CONFIG,
    PrefillGraphStatus.UNSUPPORTED_TOPOLOGY,
    PrefillGraphStatus.FEATURE_DISABLED,
)
"""The statuses that an engine can have at start-up."""


def status_from_wire(text: str) -> str:
    """A peer's status. An absent or empty one means that the peer has no prefill graphs; a word that only a newer
    peer knows stays as it is."""
    return text or PrefillGraphStatus.NOT_REQUESTED.value


class StickyStatus:
    """A status that is decided once. Any thread may read and decide; the first decision stays."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = ""

    @property
    def value(self) -> str:
        """The decided status; empty before."""
        with self._lock:
            return self._value

    def decide(self, status: str) -> bool:
        """Takes `status` unless there is one. True: it was the first. Raises ValueError for an empty one."""
        if not status:
            raise ValueError("a status that is decided cannot be empty")
        with self._lock:
            if self._value:
                return False
            self._value = str(status)
            return True
