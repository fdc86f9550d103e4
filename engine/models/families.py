"""Model classes by family, and the loading of one."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.loader.checkpoint import DummyCheckpoint, SafetensorsCheckpoint
from engine.loader.errors import ModelLoadError
from engine.loader.fused import WeightLoader
from engine.models.config import ModelConfig
from engine.models.llama import LlamaModel
from engine.models.qwen3 import Qwen3Model
from kernels.cpu.memory import release_freed

MODELS: dict[str, type[LlamaModel]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": Qwen3Model,
}
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_model(folder: Path, config: ModelConfig, dtype: torch.dtype, load_format: str) -> LlamaModel:
    """Build the family's model with weights from the folder, or random ones for `dummy`.

    Raises ModelLoadError naming the file and tensor at fault.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(f"--load-format {load_format!r} is not supported; supported: {', '.join(LOAD_FORMATS)}")
    family = MODELS[config.family]
    if load_format == "dummy":
        model = family(config, WeightLoader(DummyCheckpoint(), dtype))
    else:
        with SafetensorsCheckpoint(folder) as checkpoint:
            model = family(config, WeightLoader(checkpoint, dtype))
    release_freed()
    return model
