"""Every configuration of the few-row products' table compiles for a Hopper GPU: no spills, 16-byte loads, and with
dependent launches the weights are asked for before the wait.

Run as a program it prints what it compiled: other tests use the interpreter, which is chosen for a whole process.
"""

import json
import re

import pytest
import torch

from kernels import offline, small_gemm
from kernels.small_gemm_table import TABLE

_LOAD_16 = re.compile(r"\bLDG\.E\.\S*128|\bLDGSTS\.E\.\S*128")
_WAIT = re.compile(r"\bACQBULK\b")
_SHAPES = {(False, 6144, 4096), (True, 28672, 4096), (False, 4096, 14336)}  # one of each kind; others are alike


def _launch_all() -> list[dict[str, object]]:
    found = []
    for (gated, n, k), entries in TABLE.items():
        if (gated, n, k) not in _SHAPES:
            continue
        weight = torch.empty(n, k, dtype=torch.bfloat16)
        for rows, config in entries:
            if config is None:
                continue
            with offline.compiled_for(90) as compiled:
                launch = small_gemm.gated if gated else small_gemm.linear
                launch(torch.empty(rows, k, dtype=torch.bfloat16), weight, config=config)
            (kernel,) = compiled
            lines = kernel.sass().splitlines()
            wait = next((i for i, line in enumerate(lines) if _WAIT.search(line)), -1)
            found.append(
                {
                    "config": str(config),
                    "rows": rows,
                    "pdl": config.pdl,
                    "one_row": config.vector or config.whole,
                    "spilled_bytes": kernel.spilled_bytes,
                    "registers": kernel.registers,
                    "shared_bytes": kernel.shared_bytes,
                    "warps": kernel.warps,
                    "waits": wait >= 0,
                    "loads_before_wait": sum(bool(_LOAD_16.search(line)) for line in lines[: max(wait, 0)]),
                    "wide": sum(bool(_LOAD_16.search(line)) for line in lines),
                    "matrix": "mma" in kernel.ptx,
                }
            )
    return found


@pytest.mark.slow
@pytest.mark.extended
def test_configurations_of_the_table_when_compiled_for_hopper_then_fit_it(compiled: list[dict[str, object]]) -> None:
    assert len(compiled) > 10
    for kernel in compiled:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= 255, kernel
        assert kernel["shared_bytes"] <= 227 * 1024, kernel
        assert kernel["wide"] > 0, kernel
        assert kernel["matrix"] != kernel["one_row"], kernel


@pytest.mark.slow
@pytest.mark.extended
def test_configurations_with_dependent_launch_when_compiled_then_wait_and_one_row_reads_ahead(
    compiled: list[dict[str, object]],
) -> None:
    for kernel in compiled:
        assert kernel["waits"] == kernel["pdl"], kernel
        if kernel["one_row"] and kernel["pdl"]:
            assert kernel["loads_before_wait"] >= 2, kernel


if __name__ == "__main__":
    print(json.dumps(_launch_all(), indent=1))
