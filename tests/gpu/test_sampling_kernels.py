"""Sampling on a GPU: real vocabularies, the host sampler's answers, launches, capture, no waiting."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling import SamplingRow, sample
from engine.sampling.device import DeviceSampler
from engine.sampling.philox import uniforms
from kernels import draw, exponential, logprobs, sampling
from kernels.jit import jit, tl
from tests.unit.engine.sampling_rows import FixedMask, assert_same, random_logits, random_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy, where rows hold NaN on purpose
]
LLAMA, QWEN = 128_256, 151_936
MAX_ROWS = 256


@pytest.fixture(scope="module", params=[LLAMA, QWEN], ids=["llama", "qwen"])
def sampler(request: pytest.FixtureRequest) -> Iterator[DeviceSampler]:
    made = DeviceSampler(MAX_ROWS, request.param, torch.device("cuda"))
    made.warm_up()
    yield made
    torch.cuda.empty_cache()


@pytest.fixture
def choice() -> random.Random:
    """Seeded anew for every run, so that no input is ever special; the seed is in the output of a failure."""
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    return random.Random(seed)


def row_of(index: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9999, **params), index, [1, 2, 3], [], [0])


def step(sampler: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]):
    """One step as the runner makes it."""
    if sampler.stage(rows):
        sampler.greedy(logits)
    else:
        sampler.run(logits)
    return sampler.collect(sampler.send(len(rows)))


def many_rows(choice: random.Random, vocab: int, rows: int) -> torch.Tensor:
    """random_logits for many rows: a few rows, repeated with some noise."""
    few = random_logits(choice, min(rows, 16), vocab).cuda()
    logits = few.repeat(-(-rows // len(few)), 1)[:rows].contiguous()
    generator = torch.Generator("cuda").manual_seed(choice.getrandbits(60))
    logits[16:] += torch.randn(logits[16:].shape, device="cuda", generator=generator)
    return logits


# -- equal to the host -------------------------------------------------------------------------------------------


@jit
def _exponential_kernel(x, out, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lane, exponential.exponential(tl.load(x + lane)))


def device_exponential(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _exponential_kernel[(x.numel() // 1024,)](x, out, BLOCK=1024, enable_fp_fusion=False)
    return out


def test_exponential_has_the_bits_of_its_reference() -> None:
    x = -(torch.rand(1 << 24, device="cuda") * 90)
    x[:4] = torch.tensor([0.0, -0.0, -math.inf, -1e-40])
    out, wanted = device_exponential(x), exponential.reference(x)
    assert (out != wanted).sum() <= 2  # the reference rounds twice where the kernel fuses: differs once in 2**29
    inside = x >= -86.0
    true = x[inside].double().exp()
    assert ((out[inside].double() - true).abs() <= 2.0**-22 * true).all()


@pytest.fixture(scope="module")
def same_exponential() -> bool:
    """Whether this host's NumPy has the kernels' exponential, so that drawn tokens must be equal."""
    x = -(torch.rand(1 << 22) * 40)
    return torch.equal(torch.from_numpy(np.exp(x.numpy())), device_exponential(x.cuda()).cpu())


def test_the_host_has_the_exponential_of_the_kernels(same_exponential: bool) -> None:
    if not same_exponential:
        pytest.skip("NumPy's exp is another one on this processor: drawn tokens may differ in the last bit of a weight")


@pytest.mark.parametrize("rows", [1, 7, 17, 64])
def test_random_rows_get_the_answers_of_the_host_sampler(
    sampler: DeviceSampler, choice: random.Random, same_exponential: bool, rows: int
) -> None:
    vocab = sampler._vocab
    for _ in range(3):
        wanted_rows = [random_row(choice, vocab) for _ in range(rows)]
        logits = random_logits(choice, rows, vocab).cuda()
        before = logits.clone()
        got = step(sampler, logits, wanted_rows)
        assert torch.equal(logits.nan_to_num(0.5), before.nan_to_num(0.5))
        wanted = sample(before.cpu(), wanted_rows)
        if not same_exponential:
            differing = [i for i in range(rows) if got[i].token_id != wanted[i].token_id]
            assert len(differing) <= 1
            kept = [i for i in range(rows) if i not in differing]
            got, wanted, wanted_rows = ([values[i] for i in kept] for values in (got, wanted, wanted_rows))
        assert_same(got, wanted, wanted_rows)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_equals_its_reference(sampler: DeviceSampler, choice: random.Random, rows: int, dtype) -> None:
    logits = many_rows(choice, sampler._vocab, rows).to(dtype)
    for _ in range(3):  # tickets are taken back
        sampler.greedy(logits)
    tokens, flags, peaks = sampling.reference(logits)
    assert torch.equal(sampler.tokens[:rows], tokens)
    assert torch.equal(sampler.flags[:rows], flags)
    assert torch.equal(sampler._scratch.peaks[:rows], peaks)


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "min_p": 0.05},
    {"top_k": 50},
    {"top_k": 3000, "temperature": 2.0},
    {"top_p": 0.95},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_k": 100, "top_p": 0.9, "temperature": 0.8},
    {"top_k": 60_000, "top_p": 0.7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("rows", [3, 256])
def test_draws_equal_the_sorting_reference(
    sampler: DeviceSampler, choice: random.Random, filters: dict, rows: int
) -> None:
    vocab = sampler._vocab
    logits = many_rows(choice, vocab, rows)
    logits = logits.nan_to_num(0.0, 1.0, -math.inf)
    logits[:, 0] = logits[:, 0].nan_to_num(0.0, 0.0, 0.0)
    seeds = [choice.getrandbits(64) for _ in range(rows)]
    rows_list = [row_of(i, seed=seeds[i], **filters) for i in range(rows)]
    got = [token.token_id for token in step(sampler, logits, rows_list)]
    numbers = torch.from_numpy(uniforms(seeds, list(range(rows)))).cuda()
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    full["temperature"] = float(np.float32(full["temperature"]))
    wanted: list[int] = []
    for begin in range(0, rows, 32):
        part = slice(begin, begin + 32)
        wanted += draw.reference(logits[part], **full, uniforms=numbers[part]).tolist()
    assert sum(a != b for a, b in zip(got, wanted, strict=True)) <= (1 if rows > 3 else 0)  # its exponential, see above


@pytest.mark.parametrize("rows", [2, 64])
def test_logprobs_match_their_reference(sampler: DeviceSampler, choice: random.Random, rows: int) -> None:
    logits = many_rows(choice, sampler._vocab, rows).nan_to_num(0.0, 1.0, -math.inf)
    logits[:, 0] = logits[:, 0].nan_to_num(0.0, 0.0, 0.0)
    results = step(sampler, logits, [row_of(i, seed=i, logprobs=20) for i in range(rows)])
    tokens = torch.tensor([result.token_id for result in results], device="cuda")
    own, ranks, ids, values = logprobs.reference(logits, tokens, 20)
    got = torch.tensor([[p.logprob for p in (r.logprob, *r.top_logprobs)] for r in results], dtype=torch.float64)
    torch.testing.assert_close(got.cuda(), torch.cat((own[:, None], values), dim=1), rtol=0, atol=1e-6)
    assert [r.logprob.rank for r in results] == ranks.tolist()
    assert [[p.token_id for p in r.top_logprobs] for r in results] == ids.tolist()


def test_rows_do_not_depend_on_their_batch(sampler: DeviceSampler, choice: random.Random) -> None:
    rows = [random_row(choice, sampler._vocab) for _ in range(40)]
    logits = many_rows(choice, sampler._vocab, 40)
    together = step(sampler, logits, rows)
    again = step(sampler, logits, rows)
    assert_same(again, together, rows)
    for i in range(0, 40, 7):
        assert_same(step(sampler, logits[i : i + 1].clone(), [rows[i]]), [together[i]], [rows[i]])


def test_rows_that_are_all_equal_logits_still_get_the_host_tokens(sampler: DeviceSampler, same_exponential) -> None:
    """The slow way: every token is near the end of the selection."""
    logits = torch.zeros(3, sampler._vocab, device="cuda")
    logits[:, 77] = 0.5
    rows = [row_of(1, top_k=5000), row_of(2, top_p=0.3), row_of(3, top_k=70_000, top_p=0.9)]
    assert_same(step(sampler, logits, rows), sample(logits.cpu(), rows), rows)


# -- distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"top_k": 12, "top_p": 0.8, "temperature": 0.9}], ids=str)
def test_draws_follow_the_distribution(filters: dict) -> None:
    vocab, batch, steps = 40, 256, 400
    sampler = DeviceSampler(batch, vocab, torch.device("cuda"))
    one = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    logits = one.cuda().expand(batch, -1).contiguous()
    rows = [row_of(seed=99, **filters) for _ in range(batch)]
    counts = torch.zeros(vocab, dtype=torch.int64, device="cuda")
    for number in range(steps):
        for i, row in enumerate(rows):
            row.token_index = number * batch + i
        sampler.stage(rows)
        sampler.run(logits)
        counts += torch.bincount(sampler.tokens[:batch], minlength=vocab)
    counts = counts.cpu().double().numpy()
    assert counts.sum() == batch * steps
    probabilities = torch.softmax(one.double() / filters.get("temperature", 1.0), 0).numpy()
    order = np.argsort(-probabilities)
    kept = order[: filters.get("top_k", vocab)]
    shares = probabilities[kept].cumsum() / probabilities[kept].sum()
    kept = kept[: np.count_nonzero(shares < filters.get("top_p", 1.0)) + 1]
    expected = probabilities[kept] / probabilities[kept].sum() * counts.sum()
    assert counts[kept].sum() == counts.sum()
    statistic, freedom = ((counts[kept] - expected) ** 2 / expected).sum(), len(kept) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


# -- launches, capture, no waiting -------------------------------------------------------------------------------

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "filtered": {"top_k": 50, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "penalised": {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "temperature": 0.0},
    "grammar": {"temperature": 0.0},
    "everything": {"top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": {7: -1.0}, "logprobs": 20},
}


def launched(sampler: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[str]:
    """Names of what one step ran on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        if sampler.stage(rows):
            sampler.greedy(logits)
        else:
            sampler.run(logits)
        sampler.send(len(rows))
        torch.cuda.synchronize()
    return sorted(e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)


def grow(rows: list[SamplingRow]) -> None:
    """What a step adds to running requests."""
    for row in rows:
        row.output_token_ids.append(8)
        row.token_index += 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_the_same_for_any_batch_and_never_waits(sampler: DeviceSampler, kind: str) -> None:
    counts = []
    for count in (1, 64, 256):
        logits = torch.randn(count, sampler._vocab, device="cuda")
        rows = [row_of(i, seed=i, **KINDS[kind]) for i in range(count)]
        for number, row in enumerate(rows):
            row.output_token_ids = [4, 4, 9]
            if kind in ("grammar", "everything"):
                row.grammar = FixedMask(np.random.default_rng(number).random(sampler._vocab) < 0.3)
        step(sampler, logits, rows)
        grow(rows)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
            if sampler.stage(rows):
                sampler.greedy(logits)
            else:
                sampler.run(logits)
            sampler.send(count)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        finally:
            torch.cuda.set_sync_debug_mode("default")
        sampler.collect()
        grow(rows)
        counts.append(launched(sampler, logits, rows))
    assert counts[0] == counts[1] == counts[2]
    if kind == "greedy":
        assert len(counts[0]) == 2, counts[0]  # one kernel, one copy


def test_greedy_in_a_captured_graph_follows_its_logits(sampler: DeviceSampler, choice: random.Random) -> None:
    rows = 33
    logits = torch.zeros(rows, sampler._vocab, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sampler.greedy(logits)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.greedy(logits)
    for _ in range(3):
        logits.copy_(many_rows(choice, sampler._vocab, rows))
        graph.replay()
        tokens, flags, _ = sampling.reference(logits)
        assert torch.equal(sampler.tokens[:rows], tokens)
        assert torch.equal(sampler.flags[:rows], flags)
        drawn = [random_row(choice, sampler._vocab) for _ in range(rows)]
        sampler.stage(drawn)
        sampler.run(logits, after_greedy=True)
        after = sampler.collect(sampler.send(rows))
        assert_same(after, step(sampler, logits, drawn), drawn)


def test_steps_that_follow_at_once_keep_their_own_results(sampler: DeviceSampler) -> None:
    """Two steps in flight, staged while the device is busy with others."""
    logits = [torch.randn(64, sampler._vocab, device="cuda") for _ in range(4)]
    batches = [[row_of(k * 64 + i, seed=i, top_p=0.9, logprobs=1) for i in range(64)] for k in range(4)]
    alone = [step(sampler, values, rows) for values, rows in zip(logits, batches, strict=True)]
    pending = []
    for k in [*range(4)] * 3:
        sampler.stage(batches[k])
        sampler.run(logits[k])
        pending.append((k, sampler.send(64)))
        if len(pending) == 2:
            which, sent = pending.pop(0)
            assert_same(sampler.collect(sent), alone[which], batches[which])
