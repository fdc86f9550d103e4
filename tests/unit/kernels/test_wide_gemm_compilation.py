"""Configurations of the many-row products' table compile for a Hopper GPU: they fit it, use the matrix units of warp
groups and the copy engine, and keep their sums in registers.

Run as a program it prints what it compiled: other tests use the interpreter, which is chosen for a whole process.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kernels import jit, offline, wide_gemm
from kernels.wide_gemm import Config
from kernels.wide_gemm_table import TABLE

SHARED_BYTES = 227 << 10  # that a program can have
_LAUNCHES = 4  # of every kind one; others are alike


def _launches() -> list[tuple[bool, int, int, Config, bool]]:
    """Kinds of the table: gated, N, K, configuration, and whether the product is added to float32."""
    kinds: dict[tuple[object, ...], tuple[bool, int, int, Config, bool]] = {}
    for (gated, n, k), entry in TABLE.items():
        for _, config in entry:
            if config is not None:
                adds = not gated and not config.swap
                key = (gated, adds, config.swap, config.groups, config.shares > 1, config.ahead > 0)
                kinds.setdefault(key, (gated, n, k, config, adds))
    return list(kinds.values())[:_LAUNCHES]


def _launch_all() -> list[dict[str, object]]:
    found = []
    bf16 = torch.bfloat16
    for gated, n, k, config, adds in _launches():
        with offline.compiled_for(90, pdl=True) as compiled:
            x, weight = torch.empty(160, k, dtype=bf16), torch.empty(n, k, dtype=bf16)
            if adds:
                wide_gemm.add_to(torch.empty(160, n), x, weight, config=config)
            elif gated:
                wide_gemm.gated(x, weight, config=config)
            else:
                wide_gemm.linear(x, weight, config=config)
        (kernel,) = compiled
        found.append(
            {
                "config": str(config),
                "gated": gated,
                "spilled_bytes": kernel.spilled_bytes,
                "shared_bytes": kernel.shared_bytes,
                "warp_group_products": kernel.count(r"wgmma\.mma_async"),
                "copies": kernel.count(r"cp\.async\.bulk\.tensor"),
                "copies_of_pairs": kernel.count(r"cp\.async\.bulk\.tensor\.4d"),
                "register_moves": kernel.count(r"setmaxnreg"),
                "waits_for_the_kernel_before": kernel.count(r"griddepcontrol\.wait"),
                "pdl": config.pdl,
            }
        )
    return found


@pytest.mark.slow
def test_configurations_of_the_table_when_compiled_for_hopper_then_fit_it_and_use_its_units() -> None:
    if not jit.available("cpu") and not jit.available("cuda"):
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert len(compiled) == len(_launches()) > 2
    for kernel in compiled:
        assert kernel["spilled_bytes"] <= 16, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        assert kernel["warp_group_products"] and kernel["copies"] and kernel["register_moves"], kernel
        assert bool(kernel["copies_of_pairs"]) == kernel["gated"], kernel
        assert bool(kernel["waits_for_the_kernel_before"]) == kernel["pdl"], kernel


def test_products_when_shapes_do_not_fit_then_say_so_before_anything_is_launched() -> None:
    x, weight = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(128, 64, dtype=torch.bfloat16)
    for wrong, of in (
        (torch.empty(4, 72, dtype=torch.bfloat16), weight),
        (torch.empty(64, 4, dtype=torch.bfloat16).t(), weight),
        (x.float(), weight),
        (x[:, :60], weight[:, :60]),
        (x, weight[:100]),
    ):
        with pytest.raises(ValueError, match=r"fit|bfloat16"):
            wide_gemm.linear(wrong, of, config=Config())
    with pytest.raises(ValueError, match="shares"):
        wide_gemm.gated(x, weight, config=Config(True, shares=2))
    with pytest.raises(ValueError, match="shares"):
        wide_gemm.linear(x, torch.empty(1 << 14, 64, dtype=torch.bfloat16), config=replace(Config(True), shares=8))


if __name__ == "__main__":
    print(json.dumps(_launch_all(), indent=1))
