"""Which GPUs the servers of one machine take, and how much of their memory each, where they start together."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UTILIZATION = 0.9  # of a GPU's memory, by all servers on it; the default of --gpu-memory-utilization
ASK_S = 10.0


@dataclass(frozen=True)
class Place:
    """Of one server. Where a server comes alone, both are None: it takes what it finds."""

    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    utilization: float | None = None  # --gpu-memory-utilization; None: its default

    def flags(self) -> list[str]:
        return [] if self.utilization is None else ["--gpu-memory-utilization", f"{self.utilization:g}"]

    def environ(self) -> dict[str, str]:
        return {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}


def places(gpus: Sequence[str], ranks: Sequence[int]) -> list[Place]:
    """ranks: of each server. GPUs of their own in order, as long as there are enough for all; else the servers go
    around the GPUs, and those that meet on one share its memory evenly."""
    if not gpus or len(ranks) < 2:
        return [Place()] * len(ranks)
    taken, first = [], 0
    for count in ranks:
        taken.append([(first + rank) % len(gpus) for rank in range(min(count, len(gpus)))])
        first += count
    # A rank more than there are GPUs meets another one of its own server
    loads = [0] * len(gpus)
    for own, count in zip(taken, ranks, strict=True):
        for rank in range(count):
            loads[own[rank % len(own)]] += 1
    found = []
    for own in taken:
        most = max(loads[gpu] for gpu in own)
        share = None if most == 1 else math.floor(100 * UTILIZATION / most) / 100
        found.append(Place(None if len(gpus) == 1 else ",".join(gpus[gpu] for gpu in own), share))
    return found


def ranks_of(flags: Sequence[str]) -> int:
    """What a server's flags say of --tensor-parallel-size; 1 where they say nothing that can be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-tp", "--tensor-parallel-size", "--tp-size", dest="size", type=int, default=1)
    try:
        return max(1, int(parser.parse_known_args(list(flags))[0].size))
    except argparse.ArgumentError:
        return 1  # the server says what is wrong with it


def gpus_of(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the GPUs that a process here sees, as CUDA_VISIBLE_DEVICES takes them; none without a driver."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        ends = [index for index, name in enumerate(names) if name in ("", "-1")]  # which hide those behind them
        return names[: ends[0]] if ends else names
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip().startswith("GPU-")]
