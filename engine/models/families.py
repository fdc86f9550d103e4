"""Model classes by family, and the loading of one."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.layers.maker import HostMaker, LayerMaker
from engine.loader.checkpoint import DummyCheckpoint, SafetensorsCheckpoint
from engine.loader.digest_cache import DigestCache
from engine.loader.digests import WeightDigests
from engine.loader.errors import ModelLoadError
from engine.loader.fused import WeightLoader
from engine.loader.weights_file import states_name
from engine.models.config import ModelConfig
from engine.models.llama import LlamaModel
from engine.models.qwen3 import Qwen3Model
from engine.parallel.communicator import Communicator, single
from engine.parallel.shards import shard_of
from engine.progress import Progress
from kernels.cpu.memory import release_freed

MODELS: dict[str, type[LlamaModel]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": Qwen3Model,
}
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    load_format: str,
    maker: LayerMaker | None = None,
    communicator: Communicator | None = None,
) -> LlamaModel:
    """Build the family's model with weights from the folder, or random ones for `dummy`.

    maker: the layers it is built of; the host's by default. communicator: between the ranks that share the model, of
    which this one reads its own part; rank 0 digests the whole meanwhile. Raises ModelLoadError naming the file and
    tensor at fault.
    """
    communicator = communicator or single()
    shard = shard_of(config, communicator.rank, communicator.size)
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(f"--load-format {load_format!r} is not supported; supported: {', '.join(LOAD_FORMATS)}")
    family = MODELS[config.family]
    maker = maker or HostMaker(dtype)
    if load_format == "dummy":
        model = family(config, WeightLoader(DummyCheckpoint(), dtype, shard, maker, communicator))
        model.weights_digest = f"dummy {maker.device.type}"
    else:
        progress = Progress("reading weights", 0, "GB")
        with (
            SafetensorsCheckpoint(folder, maker.device, lambda read: progress.update(read / 1e9)) as checkpoint,
            _digests(checkpoint, communicator) as digests,
        ):
            with progress:
                progress.total = checkpoint.total_bytes / shard.size / 1e9
                model = family(config, WeightLoader(checkpoint, dtype, shard, maker, communicator))
            model.read_bytes = checkpoint.read_bytes
            if communicator.rank == 0:
                model.weights_digest = digests.combined(checkpoint.names)
            checkpoint.require_unchanged()
            model.weights_files = states_name(checkpoint.files)
    if maker.device.type == "cpu":
        release_freed()
    return model


def _digests(checkpoint: SafetensorsCheckpoint, communicator: Communicator) -> WeightDigests:
    """Rank 0 digests the weights for all, whole: it uses every tensor, and the files have to be read anyway."""
    if communicator.rank > 0:
        return WeightDigests([])
    return WeightDigests(checkpoint.files, DigestCache.of_user())
