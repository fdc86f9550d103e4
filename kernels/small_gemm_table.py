"""Which products of few rows the kernels of kernels/small_gemm.py compute, and how: measured on an H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from kernels.jit import interpreted, pdl
from kernels.small_gemm import Config

_MEASURED_ON = (9, 0)  # compute capability of the table's device

# (gated, N of the weight, K) to configurations by the most rows they serve, ascending; None is cuBLAS, which also gets
# rows above the last one and shapes that are not listed.
Entry = tuple[tuple[int, Config | None], ...]
# Measured for Llama-3.1-8B on an H200, in whole layers; Qwen3-8B, whose products are of nearly the same size, shares
# them.
_QKV: Entry = (
    (1, Config(1, warps=4, whole=True, pdl=True)),
    (8, Config(16, 256, warps=1, stages=4, pdl=True)),
    (16, None),
    (32, Config(64, 128, splits=2, warps=4, stages=4, pdl=True)),
    (64, None),
    (80, Config(64, 128, splits=2, warps=4, stages=3, pdl=True)),
)
_O: Entry = (
    (1, Config(1, warps=4, whole=True, pdl=True)),
    (8, Config(32, 128, splits=2, warps=2, stages=5)),
    (16, Config(64, 128, splits=2, warps=4, stages=4, pdl=True)),
    (32, Config(64, 128, splits=2, warps=4, stages=6, pdl=True, early=False)),
)
_GATE_UP: Entry = (
    (1, Config(1, 2048, warps=4, vector=True, pdl=True, early=False, prefetch=2048)),
    (8, Config(16, 256, warps=1, stages=3, pdl=True)),
    (16, Config(64, 128, warps=4, stages=3, pdl=True)),
    (32, Config(128, 128, warps=8, stages=3)),
    (64, Config(64, 64, warps=4, stages=5, pdl=True)),
    (80, Config(64, 64, warps=4, stages=4)),
)
_DOWN: Entry = (
    (1, Config(16, 512, warps=8, vector=True, pdl=True, prefetch=2048)),
    (8, Config(16, 512, warps=2, stages=4)),
    (32, Config(64, 128, splits=2, warps=4, stages=6, pdl=True, early=False)),
    (64, Config(64, 128, splits=2, warps=4, stages=6, pdl=True, prefetch=1024)),
)
_HEAD: Entry = (
    (1, Config(2, warps=8, whole=True, pdl=True)),
    (8, Config(64, 256, warps=4, stages=3, pdl=True)),
    (32, Config(128, 128, warps=8, stages=4, pdl=True)),
    (64, Config(128, 128, warps=8, stages=4, pdl=True)),
    (80, Config(128, 64, warps=4, stages=4, pdl=True)),
)
TABLE: Mapping[tuple[bool, int, int], Entry] = MappingProxyType(
    {
        (False, 6144, 4096): _QKV,
        (False, 4096, 4096): _O,
        (True, 28672, 4096): _GATE_UP,
        (True, 24576, 4096): _GATE_UP,
        (False, 4096, 14336): _DOWN,
        (False, 4096, 12288): _DOWN,
        (False, 128256, 4096): _HEAD,
        (False, 151936, 4096): _HEAD,
    }
)


def configs_for(weight: torch.Tensor, *, gated: bool = False) -> dict[int, Config]:
    """The measured choice for a weight [N, K]: rows of x to configuration; no entry means cuBLAS.

    Devices that were not measured get none. Without programmatic dependent launch (see `kernels.jit`) entries are the
    same but for that.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cuda" or interpreted:
        return {}
    if torch.cuda.get_device_capability(weight.device) != _MEASURED_ON:
        return {}
    dependent = pdl(weight)
    chosen: dict[int, Config] = {}
    begin = 1
    for last, config in TABLE.get((gated, weight.shape[0], weight.shape[1]), ()):
        if config is not None:
            if not dependent:
                config = replace(config, pdl=False, prefetch=0)
            chosen.update(dict.fromkeys(range(begin, last + 1), config))
        begin = last + 1
    return chosen
