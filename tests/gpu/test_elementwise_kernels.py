"""Element-wise, copy and metadata kernels on a GPU: real shapes, 64-bit offsets, launches, capture, no waiting."""

from collections.abc import Callable, Iterator

import pytest
import torch

from bench.gpu.timing import seconds_per_call
from kernels import block_copy, qkv, rms_norm, swiglu
from kernels.attention_metadata import (
    PagePlan,
    attention_metadata,
    attention_metadata_reference,
    page_plan,
    page_plan_reference,
)
from kernels.metadata import (
    DecodeLayout,
    PrefillLayout,
    StepBuffers,
    prepare_decode,
    prepare_decode_reference,
    prepare_prefill,
    prepare_prefill_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_BF16 = torch.bfloat16
_HUGE = 2**31  # elements


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    """Seeded anew for every run, so that no input is ever special; the seed is in the output of a failure."""
    seed = torch.seed()
    print("seed", seed)
    yield torch.Generator("cuda").manual_seed(seed % 2**63)
    torch.cuda.empty_cache()


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def _assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    """got is exact (float64) up to one rounding and some float32 error."""
    step = torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.double(), exact, rtol=step * 1.02 + 4e-6, atol=4e-6)


def _needs(gibibytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


# -- correct over the shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [_BF16, torch.float32])
@pytest.mark.parametrize("features", [64, 576, 4096, 5120, 8192])
@pytest.mark.parametrize("rows", [1, 3, 33, 256, 257, 2048])
def test_norms_equal_float64(generator: torch.Generator, rows: int, features: int, dtype: torch.dtype) -> None:
    weight, delta = _random(generator, features, dtype=dtype), _random(generator, rows, features, dtype=dtype)
    residual = _random(generator, rows, features, dtype=torch.float32) * 3
    before = residual.clone()
    out = torch.full_like(delta, torch.nan)
    rms_norm.add_rms_norm(residual, delta, weight, 1e-5, out)
    assert torch.equal(residual, before + delta.float())
    _assert_rounded_once(out, rms_norm.reference(before.double() + delta.double(), weight.double(), 1e-5))
    for x in (delta, residual):
        out.fill_(torch.nan)
        rms_norm.rms_norm(x, weight, 1e-5, out)
        _assert_rounded_once(out, rms_norm.reference(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", [_BF16, torch.float32])
@pytest.mark.parametrize("inner", [1536, 12288, 14336, 1000])
@pytest.mark.parametrize("tokens", [1, 5, 256, 2048])
def test_swiglu_equals_float64(generator: torch.Generator, tokens: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = _random(generator, tokens, 2 * inner, dtype=dtype) * 5
    out = torch.full((tokens, inner), torch.nan, dtype=dtype, device="cuda")
    swiglu.swiglu(gate_up, out)
    _assert_rounded_once(out, swiglu.reference(gate_up.double()))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(32, 8, 128), (8, 8, 64), (9, 3, 64), (16, 2, 128), (8, 1, 64)]
)
@pytest.mark.parametrize("tokens", [1, 7, 160, 1024, 4097])
def test_qkv_prologue_equals_float64_and_touches_its_slots_alone(
    generator: torch.Generator, tokens: int, q_heads: int, kv_heads: int, dim: int, block_size: int, norm: bool
) -> None:
    blocks = -(-tokens // block_size) + 5
    source = _random(generator, tokens, q_heads + 2 * kv_heads, dim)
    q_norm, k_norm = (_random(generator, dim), _random(generator, dim)) if norm else (None, None)
    angle = _random(generator, tokens, dim // 2, dtype=torch.float32) * 1000
    cos, sin = angle.cos(), angle.sin()
    slots = torch.randperm(blocks * block_size, generator=generator, device="cuda")[:tokens]
    slots[torch.rand(tokens, generator=generator, device="cuda") < 0.1] = -1
    pool = _random(generator, blocks, 2, kv_heads, block_size, dim)
    exact_pool = pool.double()
    before = pool.clone()
    exact_q = qkv.reference(source.double(), q_norm, k_norm, 1e-6, cos.double(), sin.double(), slots, exact_pool)
    for packed in (False, True):
        pool.copy_(before)
        q_out = source[:, :q_heads] if packed else torch.full_like(source[:, :q_heads], torch.nan).contiguous()
        qkv.split_norm_rotate_write(source, q_norm, k_norm, 1e-6, cos, sin, slots, pool, q_out)
        _assert_rounded_once(q_out, exact_q)
        _assert_rounded_once(pool, exact_pool)
        written = torch.zeros(blocks * block_size, dtype=torch.bool, device="cuda")
        written[slots[slots >= 0]] = True
        unwritten = ~written.view(blocks, 1, 1, block_size, 1).expand(pool.shape)
        assert torch.equal(pool[unwritten], before[unwritten])


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_row_copies_equal_indexing(generator: torch.Generator, dtype: torch.dtype, parts: int) -> None:
    pool = _random(generator, 300, 2, 8, 64, 128).view(dtype)
    rows = pool.view(300 * 2 * parts, -1)  # keys and values of all heads, or of a quarter of them
    numbers = torch.randperm(len(rows), generator=generator, device="cuda")[:129][1:]
    got = torch.full((128, rows.shape[1]), 3, dtype=dtype, device="cuda")
    block_copy.gather_rows(rows, numbers, got)
    assert torch.equal(got, block_copy.gather_reference(rows, numbers))
    target, expected = (torch.full_like(rows, 3) for _ in range(2))
    block_copy.scatter_rows(target, numbers, got)
    block_copy.scatter_reference(expected, numbers, got)
    assert torch.equal(target, expected)


def test_row_copies_reach_pinned_host_memory(generator: torch.Generator) -> None:
    rows = _random(generator, 20, 2 * 8 * 64 * 128).view(torch.int64)
    numbers = torch.tensor([3, 19, 7], device="cuda")
    staged = torch.zeros(3, rows.shape[1], dtype=torch.int64, pin_memory=True)
    block_copy.gather_rows(rows, numbers, staged)
    torch.cuda.synchronize()
    assert torch.equal(staged, rows[numbers].cpu())
    target = torch.zeros_like(rows)
    block_copy.scatter_rows(target, numbers, staged)
    assert torch.equal(target[numbers], rows[numbers])


# -- offsets beyond 31 bits --------------------------------------------------------------------------------------


def test_pool_kernels_reach_blocks_beyond_2_to_the_31_elements(generator: torch.Generator) -> None:
    _needs(16)
    pool = torch.zeros(_HUGE // (2 * 8 * 64 * 128) + 100, 2, 8, 64, 128, dtype=_BF16, device="cuda")
    last = pool.shape[0] - 1
    source = _random(generator, 3, 48, 128)
    angle = _random(generator, 3, 64, dtype=torch.float32)
    slots = torch.tensor([last * 64 + 63, last * 64, 5], device="cuda")
    qkv.split_norm_rotate_write(source, None, None, 1e-6, angle.cos(), angle.sin(), slots, pool)
    assert torch.equal(pool[last, 1, :, 63], source[0, 40:])
    assert torch.equal(pool[last, 1, :, 0], source[1, 40:])
    assert torch.equal(pool[0, 1, :, 5], source[2, 40:])
    blocks = torch.tensor([last, 0], dtype=torch.int32, device="cuda")
    rows = pool.view(len(pool), -1)
    got = torch.empty(2, rows.shape[1], dtype=_BF16, device="cuda")
    block_copy.gather_rows(rows, blocks, got)
    assert torch.equal(got, rows[[last, 0]])
    assert torch.count_nonzero(got[0]).item() >= 3 * 8 * 128
    block_copy.scatter_rows(rows, blocks, got.flip(0))
    assert torch.equal(rows[last], got[1]) and torch.equal(rows[0], got[0])


def test_row_kernels_reach_rows_beyond_2_to_the_31_elements(generator: torch.Generator) -> None:
    _needs(40)
    rows, features = _HUGE // 8192 + 40, 8192
    weight = _random(generator, features)
    x = torch.zeros(rows, features, dtype=_BF16, device="cuda")
    x[-5:] = _random(generator, 5, features)
    out = rms_norm.rms_norm(x, weight, 1e-5)
    _assert_rounded_once(out[-5:], rms_norm.reference(x[-5:].double(), weight.double(), 1e-5))
    gated = swiglu.swiglu(x, out[:, : features // 2])
    _assert_rounded_once(gated[-5:], swiglu.reference(x[-5:].double()))
    residual = x.float()
    out = rms_norm.add_rms_norm(residual, x, weight, 1e-5)
    _assert_rounded_once(out[-5:], rms_norm.reference(2 * x[-5:].double(), weight.double(), 1e-5))


# -- metadata ----------------------------------------------------------------------------------------------------


def _decode_staging(rows: int, width: int, changed: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    layout = DecodeLayout(rows, changed, width)
    words = torch.zeros(layout.words, dtype=torch.int32)
    words[:4] = torch.tensor(layout.header, dtype=torch.int32)
    positions = torch.randint(0, width * 64, (rows,), generator=random, dtype=torch.int32)
    tables = torch.randint(1, 1 << 20, (rows, width), generator=random, dtype=torch.int32)
    words[layout.token_ids] = torch.randint(0, 1 << 17, (rows,), generator=random, dtype=torch.int32)
    words[layout.positions] = positions
    words[layout.blocks] = tables[torch.arange(rows), positions.long() // 64]
    words[layout.changed_rows] = torch.randperm(rows, generator=random)[:changed].int()
    words[layout.tables] = tables[words[layout.changed_rows].long()].flatten()
    return words


def _prefill_staging(lengths: list[int], starts: list[int], seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    columns = max((start + length + 63) // 64 for start, length in zip(starts, lengths, strict=True))
    layout = PrefillLayout(len(lengths), sum(lengths), columns, len(lengths))
    words = torch.zeros(layout.words, dtype=torch.int32)
    words[:4] = torch.tensor(layout.header, dtype=torch.int32)
    words[layout.cu_seqlens] = torch.tensor([0, *lengths]).cumsum(0).int()
    words[layout.starts] = torch.tensor(starts, dtype=torch.int32)
    words[layout.sampled_tokens] = torch.tensor(lengths).cumsum(0).int() - 1
    words[layout.token_ids] = torch.randint(0, 1 << 17, (layout.tokens,), generator=random, dtype=torch.int32)
    words[layout.tables] = torch.randint(1, 1 << 20, (layout.rows * columns,), generator=random, dtype=torch.int32)
    return words


def _assert_same(got: StepBuffers, expected: StepBuffers) -> None:
    for name in StepBuffers.__dataclass_fields__:
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("rows", "capacity", "width", "changed"), [(1, 1, 17, 1), (100, 112, 600, 100), (256, 256, 64, 3)]
)
def test_prepare_decode_when_captured_follows_the_staging(rows: int, capacity: int, width: int, changed: int) -> None:
    staging = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
    got, expected = (StepBuffers.allocate(capacity, capacity, width, device) for device in ("cuda", "cpu"))
    addresses = [getattr(got, name).data_ptr() for name in StepBuffers.__dataclass_fields__]
    prepare_decode(staging, got, 64)  # compiled before the capture; an empty batch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_decode(staging, got, 64)
    for seed in range(4):
        batch = rows - seed if rows > 4 else rows
        words = _decode_staging(batch, width, min(changed, batch) if seed else batch, seed)
        staging[: words.shape[0]].copy_(words)
        graph.replay()
        prepare_decode_reference(words, expected, 64)
        _assert_same(got, expected)
    assert addresses == [getattr(got, name).data_ptr() for name in StepBuffers.__dataclass_fields__]


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([8192], [0]),
        ([1] * 64 + [2000], [*range(1000, 1064), 4096]),
        ([24, 32, 0, 104], [0] * 4),
        ([512] * 16, [64] * 16),
    ],
)
def test_prepare_prefill_equals_the_reference(lengths: list[int], starts: list[int]) -> None:
    words = _prefill_staging(lengths, starts, 0)
    rows, tokens = len(lengths) + 3, sum(lengths) + 100
    got, expected = (StepBuffers.allocate(rows, tokens, 200, device) for device in ("cuda", "cpu"))
    prepare_prefill(words.cuda(), got, 64, max(lengths))
    prepare_prefill_reference(words, expected, 64)
    _assert_same(got, expected)


@pytest.mark.parametrize(("rows", "longest"), [(1, 131072), (8, 5000), (300, 700), (1024, 40), (5000, 3)])
def test_attention_metadata_and_page_plan_equal_the_references(
    generator: torch.Generator, rows: int, longest: int
) -> None:
    lengths, prefixes = (
        torch.randint(0, longest + 1, (rows,), generator=generator, device="cuda", dtype=torch.int32) for _ in range(2)
    )
    tokens = int(lengths.sum().item())
    cu, cu_kv = (torch.full((rows + 3,), -7, dtype=torch.int32, device="cuda") for _ in range(2))
    offset = torch.full((tokens + 9,), -7, dtype=torch.int32, device="cuda")
    attention_metadata(lengths, prefixes, cu, cu_kv, offset, longest)
    exact = attention_metadata_reference(lengths, prefixes, longest)
    for got, wanted in zip((cu, cu_kv, offset), exact, strict=True):
        assert torch.equal(got[: wanted.shape[0]], wanted)
    assert (cu[rows:] == tokens).all() and (cu_kv[rows:] == cu_kv[rows]).all() and not offset[tokens:].any()

    kv_lens, width = lengths + prefixes, 2 * longest // 16 + 1
    tables = torch.randint(1, 1 << 20, (rows, width), generator=generator, device="cuda", dtype=torch.int32)
    pages = int((-(-kv_lens.long() // 16)).sum().item())
    out = PagePlan.allocate(rows, pages, tokens, "cuda")
    page_plan(cu[: rows + 1], kv_lens, tables, 16, out)
    wanted_plan = page_plan_reference(cu[: rows + 1], kv_lens, tables, 16)
    for name in PagePlan.__dataclass_fields__:
        assert torch.equal(getattr(out, name), getattr(wanted_plan, name)), name


@pytest.mark.parametrize("rows", [1, 128, 1024])
def test_metadata_of_128k_tokens_takes_less_than_ten_times_as_long_as_of_1k(rows: int) -> None:
    times: dict[str, list[float]] = {"metadata": [], "plan": [], "prefill": []}
    for tokens in (1024, 131072):
        each = tokens // rows
        lengths = torch.full((rows,), each, dtype=torch.int32, device="cuda")
        prefixes, cu = torch.zeros_like(lengths), torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        cu_kv, offset = torch.zeros_like(cu), torch.zeros(tokens, dtype=torch.int32, device="cuda")
        tables = torch.ones(rows, each // 16 + 1, dtype=torch.int32, device="cuda")
        plan = PagePlan.allocate(rows, rows * (each // 16 + 1), tokens, "cuda")
        metadata = (lengths, prefixes, cu, cu_kv, offset, each)
        times["metadata"].append(seconds_per_call(lambda i, args=metadata: attention_metadata(*args), 50))
        planned = (cu, lengths, tables, 16, plan)
        times["plan"].append(seconds_per_call(lambda i, args=planned: page_plan(*args), 50))
        words = _prefill_staging([each] * rows, [0] * rows, 0).cuda()
        step = (words, StepBuffers.allocate(rows, tokens, each // 16 + 1, "cuda"), 64, each)
        times["prefill"].append(seconds_per_call(lambda i, args=step: prepare_prefill(*args), 50))
    print({name: [f"{seconds * 1e6:.2f} us" for seconds in pair] for name, pair in times.items()})
    assert all(long < 10 * short for short, long in times.values())


# -- launches and synchronisation ----------------------------------------------------------------------------------


def _launchers(rows: int) -> dict[str, Callable[[], object]]:
    """Every launcher on a decode-like batch of that many rows, outputs given."""
    residual = torch.randn(rows, 4096, device="cuda")
    delta, weight = residual.to(_BF16), torch.ones(4096, dtype=_BF16, device="cuda")
    out, gate_up = torch.empty_like(delta), torch.randn(rows, 28672, device="cuda").to(_BF16)
    inner = torch.empty(rows, 14336, dtype=_BF16, device="cuda")
    heads, norm = torch.randn(rows, 48, 128, device="cuda").to(_BF16), torch.ones(128, dtype=_BF16, device="cuda")
    angle, slots = torch.randn(rows, 64, device="cuda"), torch.arange(rows, device="cuda")
    pool = torch.zeros(rows // 64 + 2, 2, 8, 64, 128, dtype=_BF16, device="cuda")
    q_out = torch.empty(rows, 32, 128, dtype=_BF16, device="cuda")
    blocks = torch.arange(pool.shape[0], device="cuda")
    staged = torch.empty_like(pool).view(len(pool), -1)
    buffers = StepBuffers.allocate(rows, rows, 64, "cuda")
    decode, prefill = _decode_staging(rows, 64, rows, 0).cuda(), _prefill_staging([1] * rows, [7] * rows, 0).cuda()
    lengths, cu = (
        torch.ones(rows, dtype=torch.int32, device="cuda"),
        torch.zeros(rows + 1, dtype=torch.int32, device="cuda"),
    )
    cu_kv, offset = torch.zeros_like(cu), torch.zeros(rows, dtype=torch.int32, device="cuda")
    plan = PagePlan.allocate(rows, rows * 64, rows, "cuda")
    return {
        "rms_norm": lambda: rms_norm.rms_norm(residual, weight, 1e-5, out),
        "add_rms_norm": lambda: rms_norm.add_rms_norm(residual, delta, weight, 1e-5, out),
        "swiglu": lambda: swiglu.swiglu(gate_up, inner),
        "qkv": lambda: qkv.split_norm_rotate_write(heads, norm, norm, 1e-6, angle, angle, slots, pool, q_out),
        "gather": lambda: block_copy.gather_rows(pool.view(len(pool), -1), blocks, staged),
        "scatter": lambda: block_copy.scatter_rows(pool.view(len(pool), -1), blocks, staged),
        "prepare_decode": lambda: prepare_decode(decode, buffers, 64),
        "prepare_prefill": lambda: prepare_prefill(prefill, buffers, 64, 1),
        "attention_metadata": lambda: attention_metadata(lengths, lengths, cu, cu_kv, offset, 1),
        "page_plan": lambda: page_plan(cu, lengths, buffers.block_tables, 64, plan),
    }


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_each_call_is_one_launch_whatever_the_batch_and_never_waits(rows: int) -> None:
    for name, launch in _launchers(rows).items():
        launch()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
            launch()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated, name
        finally:
            torch.cuda.set_sync_debug_mode("default")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            launch()
            torch.cuda.synchronize()
        on_device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(on_device) == 1, (name, on_device)


def test_rows_do_not_depend_on_their_batch(generator: torch.Generator) -> None:
    """Bit for bit, within the few rows of a decode step."""
    delta, weight = _random(generator, 256, 4096), _random(generator, 4096)
    residual = _random(generator, 256, 4096, dtype=torch.float32)
    whole_residual = residual.clone()
    whole = rms_norm.add_rms_norm(whole_residual, delta, weight, 1e-5)
    for first, last in ((0, 1), (3, 20), (255, 256)):
        part_residual = residual[first:last].clone()
        part = rms_norm.add_rms_norm(part_residual, delta[first:last], weight, 1e-5)
        assert torch.equal(part, whole[first:last])
        assert torch.equal(part_residual, whole_residual[first:last])
