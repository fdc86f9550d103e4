"""What computes, as far as it has a say in the last bits of KV: blocks that outlive a server are kept apart by it."""

from __future__ import annotations

import torch

from kernels.cpu import library
from rpc.version import version


def numerics_of(device: torch.device, backend: str) -> str:
    """backend: name of the attention backend."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        machine = f"sm_{major}{minor}"
    else:
        machine = f"{torch.backends.cpu.get_cpu_capability()}/{library.name()}"
    return f"{device.type}/{backend}/{version()}/{torch.__version__}/{machine}"
