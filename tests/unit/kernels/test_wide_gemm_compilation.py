"""Configurations of the table of kernels/wide_gemm_table.py compile for a Hopper GPU: they fit it, use the matrix
units of warp groups and the copy engine, and keep their sums in registers.

Run as a program it prints what it compiled: other tests use the interpreter, which is chosen for a whole process.
"""

import json

import pytest
import torch

from kernels import offline, wide_gemm
from kernels.wide_gemm import Config
from kernels.wide_gemm_table import TABLE

SHARED_BYTES = 227 << 10  # that a program can have


def _launches() -> list[tuple[bool, int, int, Config]]:
    """The table's, without repetition: gated, N, K and configuration. Kernels differ little by N and K."""
    kinds: dict[tuple[bool, Config], tuple[bool, int, int, Config]] = {}
    for (gated, n, k), entry in TABLE.items():
        for _, config in entry:
            if config is not None:
                kinds.setdefault((gated, config), (gated, n, k, config))
    return list(kinds.values())


def _launch_all() -> list[dict[str, object]]:
    found = []
    bf16 = torch.bfloat16
    for gated, n, k, config in _launches():
        with offline.compiled_for(90, pdl=True) as compiled:
            x, weight = torch.empty(config.width, k, dtype=bf16), torch.empty(n, k, dtype=bf16)
            product = wide_gemm.gated if gated else wide_gemm.linear
            product(x, weight, config=config)
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
def test_configurations_of_the_table_when_compiled_for_hopper_then_fit_it_and_use_its_units(
    compiled: list[dict[str, object]],
) -> None:
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
        (torch.empty(300, 64, dtype=torch.bfloat16), weight),
    ):
        with pytest.raises(ValueError, match=r"fit|bfloat16"):
            wide_gemm.linear(wrong, of, config=Config())
    with pytest.raises(ValueError, match="shares"):
        wide_gemm.gated(x, weight, config=Config(shares=2))
    with pytest.raises(ValueError, match="shares"):
        wide_gemm.linear(x, torch.empty(1 << 14, 64, dtype=torch.bfloat16), config=Config(shares=8))
    for out in (torch.empty(4, 128), torch.empty(4, 132, dtype=torch.bfloat16)[:, :128], torch.empty(4, 120)):
        with pytest.raises(ValueError, match=r"fit|bfloat16"):
            wide_gemm.linear(x, weight, config=Config(), out=out)


if __name__ == "__main__":
    print(json.dumps(_launch_all(), indent=1))
