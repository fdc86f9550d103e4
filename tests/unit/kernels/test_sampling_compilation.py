"""Sampling kernels compile for a Hopper GPU; most without spills and all with wide loads of the logits.

Run as a program it prints what it compiled: other tests use the interpreter, which is chosen for a whole process.
"""

import collections
import dataclasses
import json

import torch

from kernels import draw, logit_changes, logprobs, offline, sampling, token_mask

VOCAB = 128_256


def _launch_all() -> None:
    scratch, table = sampling.scratch_for(256, VOCAB, "cpu"), logit_changes.PenaltyTable(256, 1024, "cpu")
    tokens, flags = torch.zeros(2, 256, dtype=torch.int64)
    words = torch.zeros(256, sampling.ROW_WORDS, dtype=torch.int64)
    found = logprobs.LogprobScratch(scratch, 32)
    for rows in (1, 17):
        logits = torch.empty(rows, VOCAB)
        sampling.largest(logits, scratch, tokens, flags)
        sampling.largest(logits, scratch, tokens, flags, words)
        draw.draw(logits, words, scratch, tokens, flags)
        logprobs.logprobs(logits, words, scratch, tokens, flags, found)
        logit_changes.adjust(logits, words.view(-1), 5 * rows, scratch.part_values)
        logit_changes.restore(logits, words.view(-1), 5 * rows, scratch.part_values)
        table.update(words.view(-1), 7 * rows)
        logit_changes.penalize(logits, words, table, 600 * rows)
        logit_changes.unpenalize(logits, words, table, 600 * rows)
        masks = torch.zeros(256, token_mask.mask_words(VOCAB), dtype=torch.int32)
        token_mask.masked(logits, masks[0], masks, torch.empty(256, VOCAB))
    sampling.largest(torch.empty(3, VOCAB, dtype=torch.bfloat16), scratch, tokens, flags)


def test_each_kernel_compiles_once_per_width_of_blocks(compiled: list[dict[str, object]]) -> None:
    """Not once per number of rows or entries: a compilation in the middle of serving takes a second."""
    assert collections.Counter(str(kernel["name"]) for kernel in compiled) == {
        "_adjust_kernel": 2,  # and its undoing
        "_bins_kernel": 4,  # first and second
        "_draw_kernel": 2,
        "_largest_kernel": 3,  # also for adjusted rows, and for bfloat16
        "_logprobs_kernel": 2,
        "_mask_kernel": 1,
        "_masses_kernel": 2,
        "_penalize_kernel": 2,
        "_update_kernel": 1,
    }


def test_kernels_that_read_all_logits_load_16_bytes_and_spill_nothing(compiled: list[dict[str, object]]) -> None:
    names = ("_largest_kernel", "_bins_kernel", "_masses_kernel", "_logprobs_kernel")
    reading = [kernel for kernel in compiled if kernel["name"] in names]
    assert [kernel for kernel in reading if kernel["spilled_bytes"] or not kernel["wide"]] == []
    assert max(int(k["registers"]) for k in compiled if k["name"] == "_largest_kernel") <= 64  # 8 programs of 4 warps
    assert max(int(kernel["registers"]) for kernel in reading) <= 128


def test_kernels_launched_early_wait_for_the_one_before(compiled: list[dict[str, object]]) -> None:
    early = {kernel["name"] for kernel in compiled if kernel["begins"]}
    assert early == {"_largest_kernel", "_bins_kernel", "_masses_kernel", "_draw_kernel", "_logprobs_kernel"}
    assert [kernel for kernel in compiled if bool(kernel["begins"]) != bool(kernel["waits"])] == []


if __name__ == "__main__":
    with offline.compiled_for(90, pdl=True) as found:
        _launch_all()
    rows = []
    for kernel in found:
        row = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel) if field.repr}
        row["wide"] = kernel.count(r"ld\.global\S*\.v4\.b32")
        row |= {"begins": kernel.count("griddepcontrol.launch"), "waits": kernel.count("griddepcontrol.wait")}
        rows.append(row)
    print(json.dumps(rows, indent=1))
