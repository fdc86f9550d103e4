"""Where a model's tensors come from: the safetensors files of a folder, or random numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.loader.errors import ModelLoadError
from engine.loader.upload import Upload
from engine.loader.weights_file import WeightsFile
from engine.models.config import read_json
from engine.parallel.shards import Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Gives the tensors of a checkpoint by name."""

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None, dim: int = 0) -> None:
        """Copy tensor `name` into `out`, converting its dtype; ModelLoadError if missing or misshapen.

        part: what `out` is of the tensor along dimension `dim` (0 or 1); None: all of it.
        """


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

    def __init__(
        self, folder: Path, device: torch.device | None = None, on_read: Callable[[int], None] = lambda read_bytes: None
    ) -> None:
        """device: where tensors are read to, if not the host. on_read(bytes read so far) is called after each
        tensor."""
        self.folder = folder
        self.total_bytes = 0
        self.read_bytes = 0
        self._on_read = on_read
        self._upload = Upload(device) if device is not None and device.type == "cuda" else None
        self._stack = ExitStack()
        self._place: dict[str, tuple[Path, safe_open]] = {}  # tensor name to its file
        self.files: list[WeightsFile] = []  # sorted; of two with a tensor of one name, the later one has it
        self.names: set[str] = set()  # of the tensors that were read
        try:
            for file in checkpoint_files(folder):
                self.files.append(WeightsFile(file))  # before it is opened: what changes from now on is noticed
                self.total_bytes += self.files[-1].state.size
                handle = self._open(file)
                for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    self._place[name] = (file, handle)
        except BaseException:
            self._stack.close()
            raise

    def require_unchanged(self) -> None:
        """Raises ModelLoadError unless all files are those that were opened, and as they were."""
        for file in self.files:
            file.require_unchanged()

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

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None, dim: int = 0) -> None:
        """Reads no more of the file than it copies, but for the pages around it."""
        expected = full_shape(out, part, dim)
        place = self._place.get(name)
        if place is None:
            raise ModelLoadError(f"{self.folder}: tensor {name!r} of shape {expected} is in none of its files")
        file, handle = place
        view = handle.get_slice(name)
        if list(view.get_shape()) != expected:
            raise ModelLoadError(f"{file}: tensor {name!r} has shape {list(view.get_shape())}, expected {expected}")
        if part is None:
            tensor = handle.get_tensor(name)
        else:
            tensor = view[part.start : part.stop] if dim == 0 else view[:, part.start : part.stop]
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{file}: tensor {name!r} has dtype {tensor.dtype}, expected a floating-point one")
        if self._upload is None:
            out.copy_(tensor)
        else:
            self._upload.copy(tensor, out)
        self.names.add(name)
        self.read_bytes += tensor.nbytes
        self._on_read(self.read_bytes)


class DummyCheckpoint:
    """Random weights that depend on tensor name, shape and kind of device alone: every server makes the same ones.

    They are made where they are wanted. A CPU and a GPU make different numbers.
    """

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None, dim: int = 0) -> None:
        """A part is cut out of the whole tensor, which is made for the time of the call: it holds the numbers that all
        other ranks see in their place."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        shape = full_shape(out, part, dim)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator(out.device).manual_seed(seed)
        if out.device.type != "cpu" and part is None:
            out.normal_(std=_dummy_std(shape), generator=generator)
            return
        dtype = torch.float32 if out.device.type == "cpu" else out.dtype
        values = torch.empty(shape, dtype=dtype, device=out.device)
        values.normal_(std=_dummy_std(shape), generator=generator)
        out.copy_(values if part is None else values.narrow(dim, part.start, part.count))


def full_shape(out: torch.Tensor, part: Part | None, dim: int) -> list[int]:
    """Shape of the tensor of which `out` is `part` along `dim`."""
    shape = list(out.shape)
    if part is not None:
        if shape[dim] != part.count:
            raise ValueError(f"{shape} is not the part [{part.start}, {part.stop}) along dimension {dim}")
        shape[dim] = part.total
    return shape


def _dummy_std(shape: Sequence[int]) -> float:
    """Keeps activations near unit size through a layer of this many inputs."""
    return 1.0 / math.sqrt(shape[-1])
