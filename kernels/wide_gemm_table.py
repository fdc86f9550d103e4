"""Which products of many rows the kernel of kernels/wide_gemm.py computes, and how: measured on an H200."""

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
_ANY = 1 << 31

# Read once: BATON_KERNEL_WIDE=off leaves all products of many rows to cuBLAS
_allowed = os.environ.get("BATON_KERNEL_WIDE", "on").lower() not in ("off", "0")

# (gated, N of the weight, K) to configurations by the most rows they serve, ascending; None is cuBLAS, which also gets
# shapes that are not listed. Up to 256 rows measured in whole layers of Llama-3.1-8B. The output product's way to the
# float32 stream is shorter in cuBLAS, and for 256 rows its tiles, which clusters share, are.
Entry = tuple[tuple[int, Config | None], ...]
_O: Entry = (
    (128, None),
    (160, Config(True, columns=128, extra=32, stages=6, stash=1024, shares=4)),
)
_GATE_UP: Entry = (
    (80, None),
    (128, Config(True, columns=128, stages=6)),
    (160, Config(True, columns=128, extra=32, stages=5)),
    (192, None),
    (256, Config(True, columns=256)),
    (1024, None),
    (4096, Config(columns=256)),
    (_ANY, Config(rows=128, columns=128, extra=64, stages=3, group=8)),
)
_DOWN: Entry = (
    (96, None),
    (128, Config(True, columns=128, stages=6, stash=1024, shares=4)),
    (160, Config(True, columns=128, extra=32, stages=6, stash=1024, shares=4)),
    (4096, None),
    (_ANY, Config(columns=256, group=8)),
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
