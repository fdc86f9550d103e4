"""The device that an engine computes on."""

from __future__ import annotations

import torch

from engine.loader.errors import ModelLoadError

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str, rank: int = 0) -> torch.device:
    """The device of `--device`; "auto" takes CUDA where there is a device of it. Raises ModelLoadError.

    rank: of several that share a model; it gets a CUDA device of its own, which becomes the process's current one.
    Where there are fewer devices than ranks, ranks share one.
    """
    if name not in DEVICES:
        raise ModelLoadError(f"--device {name!r} is not supported; supported: {', '.join(DEVICES)}")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if rank:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise ModelLoadError("--device 'cuda': PyTorch finds no CUDA device here; use 'cpu' or 'auto'")
    return torch.device("cpu")


def device_title(device: torch.device) -> str:
    """How a device is named to people: with its model, and with its number among those that the process sees."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
