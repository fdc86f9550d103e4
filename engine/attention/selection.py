"""Choice of the attention backend by name."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend, BatchLimits
from engine.attention.native_backend import NativeBackend
from engine.attention.torch_backend import TorchBackend
from engine.loader.errors import ModelLoadError
from engine.models.config import ModelConfig

BACKENDS: dict[str, type[TorchBackend] | type[NativeBackend]] = {"torch": TorchBackend, "native": NativeBackend}


def select_backend(
    name: str,
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    limits: BatchLimits | None = None,
) -> AttentionBackend:
    """The backend of `--attention-backend`; "auto" takes `native` where it is available, else `torch`.

    Raises ModelLoadError for an unknown name or one that cannot run the model here.
    """
    native = NativeBackend.available(config.num_heads, config.num_kv_heads, config.head_dim, dtype)
    if name == "auto":
        name = "native" if native else "torch"
    kind = BACKENDS.get(name)
    if kind is None:
        raise ModelLoadError(
            f"--attention-backend {name!r} is not available; available: auto, {', '.join(sorted(BACKENDS))}"
        )
    if kind is NativeBackend and not native:
        raise ModelLoadError(
            "--attention-backend 'native' needs a processor with AVX-512 and AMX, a C compiler, and heads of a "
            f"multiple of 16 up to 256 (this model: {config.head_dim}); use 'torch'"
        )
    if any(window is not None for window in config.windows) and not kind.capabilities.sliding_window:
        raise ModelLoadError(f"--attention-backend {name!r} cannot run models with a sliding window")
    return kind(config.num_heads, config.num_kv_heads, config.head_dim, block_size, config.windows, dtype)
