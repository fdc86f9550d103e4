"""A name for a model's contents, by which servers recognise that they hold the same one."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import xxhash

from engine.loader.checkpoint import checkpoint_files
from engine.loader.errors import ModelLoadError
from engine.models.config import read_json

# What save_pretrained writes about itself says nothing about the model
_NOISE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
WHOLE_BYTES = 4 << 30  # of tensors, up to which every byte is looked at: under a second, and they are read anyway
_SAMPLES = 8  # places looked at per tensor of a larger model
_SAMPLE_BYTES = 64  # bytes read at each place


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and the offset at which its data begins."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= file.stat().st_size - 8:
            raise ModelLoadError(f"{file}: not a safetensors file (header of {length} bytes)")
        try:
            header = json.loads(stream.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelLoadError(f"{file}: safetensors header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _hash_samples(digest: xxhash.xxh3_128, stream: Any, begin: int, size: int) -> None:
    span = min(size, _SAMPLE_BYTES)
    for i in range(_SAMPLES if size > _SAMPLE_BYTES else 1):
        stream.seek(begin + (size - span) * i // max(1, _SAMPLES - 1))
        digest.update(stream.read(span))


def _entries(folder: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """By name of the tensor: its file, where the data of that file begins, and what the header says of it."""
    entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in checkpoint_files(folder):
        header, data_begin = _read_header(file)
        entries.update({name: (file, data_begin, entry) for name, entry in header.items()})
    return entries


def weights_digest(folder: Path, load_format: str = "auto") -> str:
    """32 hex digits (XXH3-128) over every byte of every tensor: unlike the fingerprint of a large model, it differs
    when a single value does. It reads all files, so it is for small models, and for those who keep what was computed,
    or share it among models. Empty for weights that are made up from the configuration."""
    if load_format == "dummy":
        return ""
    entries = _entries(folder)
    digest = xxhash.xxh3_128()
    maps: dict[Path, mmap.mmap] = {}
    try:
        for name in sorted(entries):
            file, data_begin, entry = entries[name]
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            if file not in maps:
                with file.open("rb") as stream:
                    maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            first, last = entry["data_offsets"]
            with memoryview(maps[file]) as view, view[data_begin + first : data_begin + last] as data:
                digest.update(data)
    finally:
        for each in maps.values():
            each.close()
    return digest.hexdigest()


def model_fingerprint(folder: Path, load_format: str = "auto", device: str = "cpu") -> str:
    """32 hex digits (XXH3-128) over configuration, tensor names, dtypes, shapes, and their bytes; of tensors of more
    than WHOLE_BYTES together, sampled bytes of each.

    The same tensors give the same value however they are spread over files. Two large checkpoints that differ in
    single values only may share a fingerprint; a retrained or requantized model does not. Random weights depend on the
    kind of device, and nothing else does.
    """
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _NOISE}
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    if load_format == "dummy":
        digest.update(b"dummy" if device == "cpu" else b"dummy" + device.encode())
        return digest.hexdigest()
    entries = _entries(folder)
    offsets = [entry["data_offsets"] for _, _, entry in entries.values()]
    if sum(last - first for first, last in offsets) <= WHOLE_BYTES:
        digest.update(weights_digest(folder).encode())
        return digest.hexdigest()
    for name in sorted(entries):
        file, data_begin, entry = entries[name]
        first, last = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with file.open("rb") as stream:
            _hash_samples(digest, stream, data_begin + first, last - first)
    return digest.hexdigest()
