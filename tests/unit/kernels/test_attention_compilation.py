"""Attention kernels compile for a Hopper GPU, use its matrix units and copy engines, and keep their sums in registers.

Run as a program it prints what it compiled: other tests use the interpreter, which is chosen for a whole process.
"""

import json
from dataclasses import replace

import pytest
import torch

from kernels import decode_attention as decode
from kernels import offline, paged_kv, prefill_hopper
from kernels import prefill_attention as prefill

pytestmark = pytest.mark.slow  # it compiles for 15 seconds
MULTIPROCESSORS = 132
SHARED_BYTES = 228 << 10  # of a multiprocessor, of which each program takes 1 KiB more than it asks for


def _launch_all() -> None:
    bf16, int32 = torch.bfloat16, torch.int32
    for dim, group, page in ((128, 4, 64), (64, 1, 16)):
        pool = torch.empty(4, 2, 2, page, dim, dtype=bf16)
        tables, bounds = torch.empty(20, 8, dtype=int32), torch.empty(21, dtype=int32)
        q, lens = torch.empty(20, 2 * group, dim, dtype=bf16), torch.empty(20, dtype=int32)
        for rows in (1, 20):
            decode.decode_attention(q[:rows], pool, tables[:rows], lens[:rows])
        config = replace(decode.config_for(20, dim, 2), descriptors=False)
        decode.decode_attention(q, pool, tables, lens, config=config)
        for tokens in (20, 9999):
            shape = replace(prefill.config_for(tokens, dim, 2, group), hopper=False)
            prefill.prefill_attention(q, pool, tables, bounds, lens, config=shape)
        if page % 64 == 0:
            prefill_hopper.prefill_hopper(q, pool, tables, bounds, lens, 0, 1.0, torch.empty_like(q))


def test_attention_kernels_compile_for_hopper_and_hardly_spill(compiled: list[dict[str, object]]) -> None:
    assert {kernel["name"] for kernel in compiled} == {"_decode_kernel", "_prefill_kernel", "_prefill_hopper_kernel"}
    assert [kernel for kernel in compiled if kernel["spilled_bytes"] > 96] == []


def test_decode_programs_fit_as_many_to_a_multiprocessor_as_are_launched(compiled: list[dict[str, object]]) -> None:
    per_sm = decode.config_for(20, 128, 2).per_sm
    rows = [kernel for kernel in compiled if kernel["name"] == "_decode_kernel"]
    assert rows
    for kernel in rows:
        assert per_sm * (kernel["shared_bytes"] + 1024) <= SHARED_BYTES
        assert per_sm * kernel["registers"] * 32 * kernel["warps"] <= 1 << 16


def test_long_prompts_are_multiplied_by_warp_groups_that_are_fed_by_the_copy_engine(
    compiled: list[dict[str, object]],
) -> None:
    for kernel in compiled:
        if kernel["name"] == "_prefill_hopper_kernel":
            assert kernel["warp_group_products"] and kernel["copies"] and kernel["register_moves"]


if __name__ == "__main__":
    decode.multiprocessors = paged_kv.multiprocessors = lambda device: MULTIPROCESSORS
    with offline.compiled_for(90, pdl=True) as kernels:
        _launch_all()
    print(
        json.dumps(
            [
                {
                    "name": kernel.name,
                    "registers": kernel.registers,
                    "spilled_bytes": kernel.spilled_bytes,
                    "shared_bytes": kernel.shared_bytes,
                    "warps": kernel.warps,
                    "warp_group_products": kernel.count(r"wgmma\.mma_async"),
                    "copies": kernel.count(r"cp\.async\.bulk\.tensor"),
                    "register_moves": kernel.count(r"setmaxnreg"),
                }
                for kernel in kernels
            ]
        )
    )
