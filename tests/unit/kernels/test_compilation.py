"""Element-wise and metadata kernels compile for a Hopper GPU, without spills and with wide memory accesses.

Run as a program it prints what it compiled: other tests use the interpreter, which is chosen for a whole process.
"""

import dataclasses
import json

import torch

from kernels import attention_metadata, block_copy, metadata, offline, qkv, rms_norm, swiglu

_WIDE = r"(?:ld|st)\.global\S*\.v[24]\.b(?:32|64)"  # 8 or 16 bytes
_NARROW = r"(?:ld|st)\.global\.(?:L\S*\.)?b(?:16|32)\b"


def _launch_all() -> None:
    bf16 = torch.bfloat16
    for features in (4096, 576):
        weight = torch.empty(features, dtype=bf16)
        for rows in (3, 512):
            x = torch.empty(rows, features)
            rms_norm.rms_norm(x, weight, 1e-5)
            rms_norm.rms_norm(x.to(bf16), weight, 1e-5)
            rms_norm.add_rms_norm(x, x.to(bf16), weight, 1e-5)
        swiglu.swiglu(torch.empty(3, 2 * features, dtype=bf16))
    for dim, q_heads, kv_heads in ((128, 32, 8), (64, 9, 3)):
        pool = torch.empty(4, 2, kv_heads, 64, dim, dtype=bf16)
        for tokens, norm in ((1, None), (1, torch.empty(dim, dtype=bf16)), (2048, torch.empty(dim, dtype=bf16))):
            heads = torch.empty(tokens, q_heads + 2 * kv_heads, dim, dtype=bf16)
            angles, index = torch.empty(max(tokens, 64), dim // 2), torch.empty(tokens, dtype=torch.int64)
            positions = index if norm is not None else None
            qkv.split_norm_rotate_write(heads, norm, norm, 1e-6, angles, angles, index, pool, positions=positions)
        blocks, rows = torch.empty(3, dtype=torch.int64), pool.view(4, -1).view(torch.int64)
        block_copy.gather_rows(rows, blocks, torch.empty(3, rows.shape[1], dtype=torch.int64))
        block_copy.scatter_rows(rows, blocks, torch.empty(3, rows.shape[1], dtype=torch.int64))
    buffers = metadata.StepBuffers.allocate(256, 256, 512, "cpu")
    staging = torch.empty(9999, dtype=torch.int32)
    metadata.prepare_decode(staging, buffers, 64)
    metadata.prepare_prefill(staging, buffers, 64, 8192)
    lengths, sums = buffers.kv_lens, buffers.cu_seqlens
    attention_metadata.attention_metadata(lengths, lengths, sums, sums, lengths, 100)
    plan = attention_metadata.PagePlan.allocate(256, 9999, 9999, "cpu")
    attention_metadata.page_plan(sums, lengths, buffers.block_tables, 64, plan)


def test_kernels_compile_for_hopper_without_spills(compiled: list[dict[str, object]]) -> None:
    assert len({kernel["name"] for kernel in compiled}) == 9
    assert [kernel for kernel in compiled if kernel["spilled_bytes"]] == []
    assert max(kernel["registers"] for kernel in compiled) <= 64


def test_kernels_that_move_rows_access_8_bytes_at_a_time_or_more(compiled: list[dict[str, object]]) -> None:
    moving = [
        kernel for kernel in compiled if kernel["name"].startswith(("_rms", "_add", "_swiglu", "_split", "_copy"))
    ]
    assert len(moving) > 30
    assert [kernel for kernel in moving if not kernel["wide"] or kernel["narrow"]] == []


def test_kernels_launched_early_wait_for_the_one_before(compiled: list[dict[str, object]]) -> None:
    early = [kernel for kernel in compiled if kernel["pdl"] and kernel["begins"]]
    assert {kernel["name"] for kernel in early} == {
        "_rms_norm_kernel",
        "_add_rms_norm_kernel",
        "_swiglu_kernel",
        "_split_norm_rotate_write_kernel",
    }
    assert [kernel for kernel in early if not kernel["waits"]] == []
    assert [kernel for kernel in compiled if not kernel["pdl"] and (kernel["begins"] or kernel["waits"])] == []


if __name__ == "__main__":
    rows = []
    for pdl in (False, True):
        with offline.compiled_for(90, pdl) as found:
            _launch_all()
        for kernel in found:
            row = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel) if field.repr}
            row |= {"pdl": pdl, "wide": kernel.count(_WIDE), "narrow": kernel.count(_NARROW)}
            row |= {"begins": kernel.count("griddepcontrol.launch"), "waits": kernel.count("griddepcontrol.wait")}
            rows.append(row)
    print(json.dumps(rows, indent=1))
