"""Choice of the attention backend by name."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.torch_backend import TorchBackend
from engine.loader.errors import ModelLoadError
from engine.models.config import ModelConfig

BACKENDS = {"torch": TorchBackend}


def select_backend(name: str, config: ModelConfig, block_size: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend of `--attention-backend`; "auto" takes the best one for the device, today `torch`.

    Raises ModelLoadError for an unknown name or one that cannot run the model.
    """
    kind = BACKENDS.get("torch" if name == "auto" else name)
    if kind is None:
        raise ModelLoadError(
            f"--attention-backend {name!r} is not available; available: auto, {', '.join(sorted(BACKENDS))}"
        )
    if any(window is not None for window in config.windows) and not kind.capabilities.sliding_window:
        raise ModelLoadError(f"--attention-backend {name!r} cannot run models with a sliding window")
    return kind(config.num_heads, config.num_kv_heads, config.head_dim, block_size, config.windows, dtype)
