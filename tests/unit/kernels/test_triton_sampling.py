"""Sampling kernels against their references, on small vocabularies in small blocks."""

from __future__ import annotations

import math
import platform

import numpy as np
import pytest
import torch

from kernels import draw, draw_weights, exponential, logit_changes, logprobs, sampling, token_mask
from kernels.jit import jit, tl
from kernels.sampling import ADJUSTED, DRAWN, LOGPROBS_SHIFT, NO_TOP_K, PENALIZED, ROW_WORDS, SELECTS

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
INF, NAN = math.inf, math.nan


@jit
def _exponential_kernel(x, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, exponential.exponential(tl.load(x + lane)))


@jit
def _uniform_kernel(row_params, out):
    row = tl.program_id(0)
    tl.store(out + row, draw._uniform(row_params, row))


def _random(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def _row_params(rows: int, vocab: int, device: torch.device, logprob_count: int = -1, **params) -> torch.Tensor:
    """Words of `rows` rows with the same parameters; row i has seed 1000 + i and token index i."""
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    top_k = filters["top_k"] if 0 < filters["top_k"] < vocab else NO_TOP_K
    selects = top_k < vocab or filters["top_p"] < 1.0
    doubles = np.array([np.float32(filters["temperature"]), filters["top_p"]], dtype=np.float64).view(np.int64)
    least = math.ceil(filters["min_p"] * draw_weights.one_for(vocab))
    what = DRAWN | (SELECTS if selects else 0) | (logprob_count + 1) << LOGPROBS_SHIFT
    words = [[what, int(doubles[0]), top_k, int(doubles[1]), least, 1000 + i, i, 0, 0, 0] for i in range(rows)]
    return torch.tensor(words, device=device)


def _uniforms(row_params: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(row_params), dtype=torch.float64, device=row_params.device)
    _uniform_kernel[(len(row_params),)](row_params, out)
    return out


def _largest(logits: torch.Tensor, **sizes) -> tuple[sampling.Scratch, torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    scratch = sampling.scratch_for(rows, vocab, logits.device, **sizes)
    tokens, flags = torch.full((2, rows), -7, dtype=torch.int64, device=logits.device)
    sampling.largest(logits, scratch, tokens, flags)
    return scratch, tokens, flags


# -- the exponential -------------------------------------------------------------------------------------------------


def test_exponential_has_the_bits_of_its_reference_and_is_near_the_true_one(device: torch.device) -> None:
    x = torch.cat((torch.tensor([0.0, -0.0, -INF, -86.0, -86.1, -1e-30]), -_random(4090, spread=25).abs()))
    out = torch.empty(4096, device=device)
    _exponential_kernel[(1,)](x.to(device), out, BLOCK=4096, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), exponential.reference(x))
    inside = x >= -86.0
    true = x[inside].double().exp()
    assert ((out.cpu()[inside].double() - true).abs() <= 2.0**-22 * true).all()
    assert (out.cpu()[~inside] == 0).all()


def test_exponential_has_the_bits_of_numpy() -> None:
    chosen = np.lib.introspect.opt_func_info("^exp$").get("exp", {}).get("ff", {}).get("current", "")
    if platform.machine() not in ("x86_64", "AMD64") or not chosen.startswith(("AVX", "FMA3", "X86_V3", "X86_V4")):
        pytest.skip(f"NumPy's float32 exp is another one here: {chosen or 'not vectorised'}")
    x = -(torch.rand(1 << 16, generator=torch.Generator().manual_seed(3)) * 40)
    assert torch.equal(exponential.reference(x), torch.from_numpy(np.exp(x.numpy())))


# -- the largest logit -----------------------------------------------------------------------------------------------


def _awkward_rows(vocab: int) -> torch.Tensor:
    logits = _random(10, vocab, seed=vocab)
    logits[1, vocab // 2] = logits[1, vocab - 1] = 99.0
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, vocab - 1] = NAN
    logits[4, 0] = INF
    logits[5] = -INF
    logits[6, : vocab - 1] = -INF
    logits[7, 0] = -NAN
    logits[8] = -1e38
    return logits


@pytest.mark.parametrize("vocab", [1, 3, 300, 2048, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_when_rows_are_awkward_equals_the_reference(device: torch.device, vocab: int, dtype) -> None:
    logits = _awkward_rows(vocab).to(device, dtype)
    scratch, tokens, flags = _largest(logits)
    wanted_tokens, wanted_flags, wanted_peaks = sampling.reference(logits)
    assert torch.equal(tokens, wanted_tokens)
    assert torch.equal(flags, wanted_flags)
    assert torch.equal(scratch.peaks, wanted_peaks)
    assert torch.equal(scratch.raw_peaks, wanted_peaks)
    assert (scratch.tickets == 0).all()


def test_largest_when_rows_lie_apart_reads_no_logit_between_them(device: torch.device) -> None:
    padded = torch.full((3, 2600), INF, device=device)
    logits = padded[:, :2500]
    logits.copy_(_random(3, 2500))
    _, tokens, flags = _largest(logits)
    assert torch.equal(tokens, logits.argmax(dim=1))
    assert (flags == 0).all()


# -- changes of single logits ----------------------------------------------------------------------------------------


def _bits(*values: float) -> list[int]:
    return np.array(values, dtype=np.float32).view(np.uint32).tolist()


def test_adjust_then_restore_gives_the_logits_back(device: torch.device) -> None:
    logits = _random(2, 50).to(device)
    logits[1, 7] = NAN
    before = logits.clone()
    wanted = before.clone()
    words = []
    for row, token, bias in ((0, 3, -INF), (0, 49, 2.5), (1, 7, -INF), (1, 0, -100.0)):
        words += [row << 32 | token, *_bits(bias)]
        wanted[row, token] = bias if bias == -INF else before[row, token] + np.float32(bias)
    entries, saved = torch.tensor(words, device=device), torch.empty(4, device=device)
    logit_changes.adjust(logits, entries, 4, saved)
    assert torch.equal(logits, wanted)
    logit_changes.restore(logits, entries, 4, saved)
    assert torch.equal(logits.nan_to_num(0.5), before.nan_to_num(0.5))


def test_penalize_then_unpenalize_gives_the_logits_back(device: torch.device) -> None:
    logits = _random(3, 400).to(device)
    before = logits.clone()
    table = logit_changes.PenaltyTable(3, 300, device)
    generator = torch.Generator().manual_seed(1)
    row_params = _row_params(3, 400, device)
    wanted = before.clone()
    updates = []
    for row, slot, length, penalties in ((0, 2, 300, (1.3, 0.25, -1.5)), (2, 0, 5, (0.7, 0.0, 0.0))):
        tokens = torch.randperm(400, generator=generator)[:length]
        counts = torch.randint(0, 4, (length,), generator=generator)
        updates += [
            [slot * 300 + i, int(t) << 32 | int(c)] for i, (t, c) in enumerate(zip(tokens, counts, strict=True))
        ]
        repetition, frequency, presence = _bits(*penalties)
        row_params[row, 0] |= ADJUSTED | PENALIZED
        row_params[row, 7], row_params[row, 8] = slot << 32 | length, repetition
        row_params[row, 9] = torch.tensor(np.array(frequency << 32 | presence, dtype=np.uint64).view(np.int64))
        wanted[row] = logit_changes.reference(before[row], tokens.to(device), counts.to(device), penalties)
    table.update(torch.tensor(updates, device=device).reshape(-1), len(updates))
    logit_changes.penalize(logits, row_params, table, 300)
    assert torch.equal(logits, wanted)
    assert not torch.equal(logits[0], before[0])
    logit_changes.unpenalize(logits, row_params, table, 300)
    assert torch.equal(logits, before)


def test_largest_when_rows_are_adjusted_looks_at_those_alone(device: torch.device) -> None:
    logits = _random(4, 90).to(device)
    logits[3, 5] = NAN
    scratch, tokens, flags = _largest(logits)
    before = tokens.clone()
    row_params = _row_params(4, 90, device)
    row_params[1:, 0] |= ADJUSTED
    peaks = scratch.raw_peaks.clone()
    logits[:] = -INF
    logits[1, 77] = 1.0
    sampling.largest(logits, scratch, tokens, flags, adjusted=row_params)
    assert tokens[:2].tolist() == [int(before[0]), 77]
    assert flags.tolist() == [0, 0, sampling.ALL_MASKED, sampling.NOT_FINITE]
    assert torch.equal(scratch.raw_peaks, peaks)
    assert scratch.peaks[:2].tolist() == [float(peaks[0]), 1.0]


# -- draws -----------------------------------------------------------------------------------------------------------


def _assert_draws_as_reference(logits: torch.Tensor, blocks: int, candidates: int, **params) -> sampling.Scratch:
    rows, vocab = logits.shape
    scratch, tokens, flags = _largest(logits, blocks=(blocks, blocks), candidates=candidates)
    words = _row_params(rows, vocab, logits.device, **params)
    draw.draw(logits, words, scratch, tokens, flags)
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    filters["temperature"] = float(np.float32(filters["temperature"]))
    wanted = draw.reference(logits, **filters, uniforms=_uniforms(words))
    assert torch.equal(tokens, wanted), (params, tokens, wanted)
    assert (scratch.tickets == 0).all()
    assert (scratch.candidate_counts == 0).all()
    return scratch


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3, "min_p": 0.1},
        {"top_k": 1},
        {"top_k": 20, "temperature": 1.7},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"top_p": 0.99999, "temperature": 2.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
        {"top_k": 10**6, "top_p": 0.5, "temperature": 1e-40},
    ],
    ids=str,
)
def test_draws_with_filters_equal_the_sorting_reference(device: torch.device, params: dict) -> None:
    logits = _random(2, 150, seed=5, spread=2.0).to(device)
    logits[1] = logits[1].round()
    _assert_draws_as_reference(logits, 64, 64, **params)


@pytest.mark.parametrize("vocab", [1, 2, 65])
def test_draws_when_the_vocabulary_is_tiny_equal_the_reference(device: torch.device, vocab: int) -> None:
    _assert_draws_as_reference(_random(2, vocab).to(device), 64, 8, top_k=3, top_p=0.7)


def test_draw_when_a_region_is_crowded_divides_it_once_more(device: torch.device) -> None:
    logits = _random(1, 120, seed=7, spread=0.02).to(device)  # all in the first of the 128 bins
    scratch = _assert_draws_as_reference(logits, 64, 16, top_p=0.6)
    assert 0 < scratch.regions[0, 3] <= 16
    assert scratch.regions[0, 1] - scratch.regions[0, 0] < 1 << 24


@pytest.mark.parametrize("params", [{"top_k": 40}, {"top_p": 0.4}, {"top_k": 60, "top_p": 0.5}], ids=str)
def test_draw_when_logits_are_equal_goes_through_the_whole_row(device: torch.device, params: dict) -> None:
    logits = torch.zeros(1, 120, device=device)
    logits[0, 100] = 1.0
    logits[0, 3] = -1.0
    scratch = _assert_draws_as_reference(logits, 64, 8, **params)
    assert scratch.regions[0, 3] > 8


def test_draw_when_rows_are_unusable_or_greedy_leaves_their_tokens(device: torch.device) -> None:
    logits = _random(3, 70).to(device)
    logits[1, 5] = NAN
    scratch, tokens, flags = _largest(logits, blocks=(64, 64), candidates=8)
    before = tokens.clone()
    words = _row_params(3, 70, logits.device, top_k=5)
    words[0, 0] = 0
    draw.draw(logits, words, scratch, tokens, flags)
    assert torch.equal(tokens[:2], before[:2])
    assert flags.tolist() == [0, sampling.NOT_FINITE, 0]


# -- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 150])
def test_logprobs_when_logits_have_equals_match_the_reference(device: torch.device, vocab: int) -> None:
    logits = _random(3, vocab, seed=2).to(device)
    logits[1] = logits[1].round()
    logits[2, 1:] = -INF
    scratch, _, flags = _largest(logits, blocks=(64, 64))
    tokens = torch.tensor([2, vocab - 1, 0], device=device)
    out = logprobs.LogprobScratch(scratch, 8)
    words = _row_params(3, vocab, logits.device, logprob_count=min(5, vocab))
    logprobs.logprobs(logits, words, scratch, tokens, flags, out)
    own, ranks, ids, values = logprobs.reference(logits, tokens, min(5, vocab))
    found = out.found.cpu()
    offsets = found[:, 0].contiguous().view(torch.float64).log() + _float(found[:, 2]).double()
    torch.testing.assert_close(_float(found[:, 1]).double() - offsets, own.cpu(), rtol=0, atol=1e-12)
    assert torch.equal(found[:, 1] >> 32, ranks.cpu())
    tops = found[:, logprobs.HEAD_WORDS : logprobs.HEAD_WORDS + min(5, vocab)]
    keys = (tops >> 32).int()
    shown = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32).double() - offsets[:, None]
    assert torch.equal(0x7FFFFFFF - (tops & 0xFFFFFFFF), ids.cpu())
    torch.testing.assert_close(shown, values.cpu(), rtol=0, atol=1e-12)
    assert (scratch.tickets == 0).all()


def _float(words: torch.Tensor) -> torch.Tensor:
    """The float32 numbers whose bits are the low halves of int64 words."""
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.float32))


def test_row_words_are_what_the_kernels_read(device: torch.device) -> None:
    assert _row_params(1, 10, device).shape == (1, ROW_WORDS)


# -- masks of the vocabulary -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "dtype"), [(31, torch.float32), (1025, torch.bfloat16)])
def test_masked_logits_are_the_logits_where_the_mask_has_a_bit(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = _random(4, vocab).to(device, dtype)
    logits[1, 3], logits[2, 5] = NAN, INF
    before = logits.clone()
    generator = torch.Generator().manual_seed(7)
    masks = torch.randint(-(2**31), 2**31, (3, token_mask.mask_words(vocab)), generator=generator, dtype=torch.int32)
    masks[1] = 0
    slots = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)
    out = torch.full((6, vocab), 7.0, device=device)
    found = token_mask.masked(logits, slots, masks.to(device), out)
    wanted = token_mask.reference(logits, slots, masks.to(device))
    assert found.shape == (4, vocab)
    assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))
    assert torch.isneginf(found[3]).all()
    assert (out[4:] == 7.0).all()
    assert torch.equal(logits.nan_to_num(0.5), before.nan_to_num(0.5))
