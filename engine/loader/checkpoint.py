"""Where a model's tensors come from: the safetensors files of a folder, or random numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.loader.errors import ModelLoadError
from engine.models.config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Gives the tensors of a checkpoint by name."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy tensor `name` into `out`, converting its dtype; ModelLoadError if missing or misshapen."""


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted by name; ModelLoadError when one is missing."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index}: 'weight_map' must map tensor names to files")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            listed = f" (listed in {INDEX_FILE})" if index.exists() else ""
            raise ModelLoadError(
                f"{file}: no such file{listed}; a model folder needs {SINGLE_FILE}, or {INDEX_FILE} with its shards"
            )
    return files


class SafetensorsCheckpoint:
    """All safetensors files of a folder, memory-mapped; a context manager that unmaps them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._place: dict[str, tuple[Path, safe_open]] = {}  # tensor name to its file
        try:
            for file in checkpoint_files(folder):
                handle = self._open(file)
                for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    self._place[name] = (file, handle)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, file: Path) -> safe_open:
        try:
            return self._stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file}: not a readable safetensors file: {error}") from error

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.clear()
        self._stack.close()

    def read_into(self, name: str, out: torch.Tensor) -> None:
        place = self._place.get(name)
        if place is None:
            raise ModelLoadError(f"{self.folder}: tensor {name!r} of shape {list(out.shape)} is in none of its files")
        file, handle = place
        found = handle.get_slice(name).get_shape()
        if list(found) != list(out.shape):
            raise ModelLoadError(f"{file}: tensor {name!r} has shape {list(found)}, expected {list(out.shape)}")
        tensor = handle.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{file}: tensor {name!r} has dtype {tensor.dtype}, expected a floating-point one")
        out.copy_(tensor)


class DummyCheckpoint:
    """Random weights that depend on tensor name and shape alone, so that every server makes the same ones."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        values = torch.empty(out.shape, dtype=torch.float32)
        values.normal_(std=_dummy_std(out.shape), generator=torch.Generator().manual_seed(seed))
        out.copy_(values)


def _dummy_std(shape: Sequence[int]) -> float:
    """Keeps activations near unit size through a layer of this many inputs."""
    return 1.0 / math.sqrt(shape[-1])
