"""Status of the prefill CUDA graph: one value per engine at start-up, and one per request, which stays."""

from __future__ import annotations

from enum import StrEnum


class PrefillGraphStatus(StrEnum):
    """How a request's prompt was computed, or why no graph did it. `CAPTURED` occurs at start-up only."""

    NOT_REQUESTED = "not_requested"  # the feature is off on the server that computed the prompt
    REPLAYED = "replayed"  # one replay computed the whole prompt
    CAPTURED = "captured"
    CAPTURE_UNAVAILABLE = "capture_unavailable"
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
    ERROR = "error"


def init_status(*, requested: bool, prefills: bool, cuda_graphs: bool, backend_captures: bool) -> PrefillGraphStatus:
    """The engine's status at start-up; the first test that fails decides.

    `requested`: the feature is switched on. `prefills`: this engine computes prompts. `cuda_graphs`: CUDA graphs are
    on, which they are not on a CPU. `backend_captures`: the attention backend can run inside a captured prefill.
    """
    if not requested or not prefills:
        return PrefillGraphStatus.NOT_REQUESTED
    if not cuda_graphs:
        return PrefillGraphStatus.FEATURE_DISABLED
    if not backend_captures:
        return PrefillGraphStatus.UNSUPPORTED_BACKEND
    return PrefillGraphStatus.CAPTURE_UNAVAILABLE


def request_status(engine: PrefillGraphStatus) -> PrefillGraphStatus:
    """The status of a request at its first prefill step on an engine with that start-up status."""
    if engine is PrefillGraphStatus.CAPTURED:
        raise ValueError("an engine with captured graphs decides by its batches")
    return engine
