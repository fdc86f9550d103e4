"""Which products of 81 to 256 rows the kernel of kernels/wide_gemm.py computes, and how: measured on an H200."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from kernels.jit import available, interpreted, pdl
from kernels.wide_gemm import Config, prepare

_MEASURED_ON = (9, 0)  # compute capability of the table's device, which is the only one that has the instructions

# Read once: BATON_KERNEL_WIDE=off leaves all these products to cuBLAS
_allowed = os.environ.get("BATON_KERNEL_WIDE", "on").lower() not in ("off", "0")

# (gated, N of the weight, K) to configurations by the most rows they serve, ascending; None is cuBLAS, which also gets
# rows above the last one and shapes that are not listed. Measured at 128, 160 and 256 rows in whole layers of
# Llama-3.1-8B, which take 174.6, 193.4 and 246.4 us so, and 180.4, 199.1 and 250.7 with cuBLAS alone; 161 to 192 rows
# were not measured and are cuBLAS'. The QKV product is faster in cuBLAS throughout.
Entry = tuple[tuple[int, Config | None], ...]
_O: Entry = (
    (128, None),
    (160, Config(columns=128, extra=32, stages=6, stash=1024, shares=4)),
)
_GATE_UP: Entry = (
    (80, None),
    (128, Config(rows=128, columns=128, stash=4096)),
    (160, Config(rows=128, columns=128, extra=32, stash=4096)),
    (192, None),
    (256, Config(columns=256)),
)
_DOWN: Entry = (
    (96, None),
    (128, Config(columns=128, stages=6, stash=1024, shares=4)),
    (160, Config(columns=128, extra=32, stages=6, stash=1024, shares=4)),
)
TABLE: Mapping[tuple[bool, int, int], Entry] = MappingProxyType(
    {
        (False, 4096, 4096): _O,
        (True, 28672, 4096): _GATE_UP,
        (False, 4096, 14336): _DOWN,
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Configurations by rows of x."""

    lasts: tuple[int, ...] = ()
    configs: tuple[Config | None, ...] = ()

    def get(self, rows: int) -> Config | None:
        """None is cuBLAS."""
        at = bisect_left(self.lasts, rows)
        return self.configs[at] if at < len(self.configs) else None


def choice_of(entry: Entry, dependent: bool = True) -> Choice:
    """A line of the table; `dependent` says whether programmatic dependent launch is to be used."""
    configs = [config if config is None or dependent else replace(config, pdl=False) for _, config in entry]
    return Choice(tuple(last for last, _ in entry), tuple(configs))


def configs_for(weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False) -> Choice:
    """The measured choice for a weight [N, K]; the kernel adds no bias.

    Other devices than the measured one get none. Without programmatic dependent launch (see `kernels.jit`) entries are
    the same but for that. To be called before graphs are captured: it makes what the products share on a device.
    """
    if not _allowed or bias is not None or weight.dtype != torch.bfloat16 or weight.device.type != "cuda":
        return Choice()
    if interpreted or not available(weight.device) or torch.cuda.get_device_capability(weight.device) != _MEASURED_ON:
        return Choice()
    entry = TABLE.get((gated, weight.shape[0], weight.shape[1]))
    if entry is None or not weight.is_contiguous():
        return Choice()
    prepare(weight.device)
    return choice_of(entry, pdl(weight))
