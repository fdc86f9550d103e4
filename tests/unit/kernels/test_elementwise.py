"""Normalisation, SwiGLU, the QKV prologue and block copies against their references in float64."""

import pytest
import torch

from kernels import block_copy, qkv, rms_norm, swiglu

_DTYPES = [torch.float32, torch.bfloat16]


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    """got is exact (float64) up to one rounding and some float32 error."""
    step = torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.cpu().double(), exact, rtol=step * 1.02 + 2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 64), (3, 576), (5, 4096)])
def test_rms_norm_equals_the_reference_up_to_rounding(
    device: torch.device, rows: int, features: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    apart = _random(generator, rows, features + 16, dtype=dtype)
    x, weight = apart[:, :features], _random(generator, features, dtype=dtype)
    out = torch.full((rows, features), torch.nan, dtype=dtype, device=device)
    assert rms_norm.rms_norm(apart.to(device)[:, :features], weight.to(device), 1e-5, out) is out
    _assert_rounded_once(out, rms_norm.reference(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_add_rms_norm_adds_in_float32_and_norms_the_sum(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    residual, delta = _random(generator, 4, 576), _random(generator, 4, 576, dtype=dtype)
    weight = _random(generator, 576, dtype=dtype)
    got = residual.clone().to(device)
    out = rms_norm.add_rms_norm(got, delta.to(device), weight.to(device), 1e-6)
    assert out.dtype == dtype
    assert torch.equal(got.cpu(), residual + delta.float())
    _assert_rounded_once(out, rms_norm.reference(residual.double() + delta.double(), weight.double(), 1e-6))
    again = residual.clone()
    torch.testing.assert_close(out.cpu(), rms_norm.add_reference(again, delta, weight, 1e-6), rtol=0.01, atol=1e-5)
    assert torch.equal(again, got.cpu())


def test_norms_of_no_rows_launch_nothing(device: torch.device) -> None:
    empty, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert rms_norm.rms_norm(empty, weight, 1e-5).shape == (0, 64)
    assert rms_norm.add_rms_norm(empty, empty, weight, 1e-5).shape == (0, 64)
    assert swiglu.swiglu(empty).shape == (0, 32)


def test_rms_norm_when_a_row_is_nan_keeps_it_to_that_row(device: torch.device) -> None:
    x = torch.ones(3, 64, device=device)
    x[1, 5] = torch.nan
    out = rms_norm.rms_norm(x, torch.ones(64, device=device), 1e-5)
    assert torch.isfinite(out).all(dim=1).tolist() == [True, False, True]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a gate of -200, whose silu is 0
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("tokens", "inner"), [(1, 48), (3, 1536), (2, 1100)])
def test_swiglu_equals_the_reference_up_to_rounding(
    device: torch.device, tokens: int, inner: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inner)
    gate_up = _random(generator, tokens, 2 * inner, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    out = swiglu.swiglu(gate_up.to(device))
    assert out.dtype == dtype
    _assert_rounded_once(out, swiglu.reference(gate_up.double()))


class _Heads:
    """Random inputs of the QKV prologue."""

    def __init__(
        self, tokens: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norm: bool, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q_heads, self.kv_heads, self.block_size = q_heads, kv_heads, 16
        self.qkv = _random(generator, tokens, q_heads + 2 * kv_heads, dim, dtype=dtype)
        self.q_norm = _random(generator, dim, dtype=dtype) if norm else None
        self.k_norm = _random(generator, dim, dtype=dtype) if norm else None
        angle = _random(generator, tokens, dim // 2) * 100
        self.cos, self.sin = angle.cos(), angle.sin()
        blocks = -(-tokens // self.block_size) + 3
        self.slots = torch.randperm(blocks * self.block_size, generator=generator)[:tokens]
        self.slots[tokens // 2] = -1
        self.pool = torch.full((blocks, 2, kv_heads, self.block_size, dim), 7.5, dtype=dtype)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and pool in float64."""
        pool = self.pool.double()
        q = qkv.reference(
            self.qkv.double(), self.q_norm, self.k_norm, 1e-6, self.cos.double(), self.sin.double(), self.slots, pool
        )
        return q, pool

    def run(
        self, device: torch.device, pool: torch.Tensor, q_out: torch.Tensor | None, on: torch.Tensor
    ) -> torch.Tensor:
        norms = [None if norm is None else norm.to(device) for norm in (self.q_norm, self.k_norm)]
        angles = self.cos.to(device), self.sin.to(device)
        return qkv.split_norm_rotate_write(on, *norms, 1e-6, *angles, self.slots.to(device), pool, q_out)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "dim", "dtype", "norm"),
    [
        (1, 8, 2, 64, torch.bfloat16, False),
        (5, 9, 3, 64, torch.float32, False),
        (19, 4, 4, 64, torch.bfloat16, True),
        (3, 8, 1, 128, torch.float32, True),
        (2, 4, 2, 96, torch.float32, True),
    ],
)
def test_qkv_prologue_equals_the_reference_up_to_rounding(
    device: torch.device,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    norm: bool,
    packed: bool,
) -> None:
    case = _Heads(tokens, q_heads, kv_heads, dim, dtype, norm)
    pool, source = case.pool.clone().to(device), case.qkv.clone().to(device)
    q_out = source[:, :q_heads] if packed else torch.full((tokens, q_heads, dim), torch.nan, dtype=dtype).to(device)
    assert case.run(device, pool, q_out, source) is q_out
    exact_q, exact_pool = case.exact()
    _assert_rounded_once(q_out, exact_q)
    _assert_rounded_once(pool, exact_pool)
    # Values are copied, and what no slot names stays bit for bit
    assert torch.equal(pool[:, 1].cpu().double(), exact_pool[:, 1])
    assert torch.equal(pool[:, 0].cpu() == 7.5, exact_pool[:, 0] == 7.5)
    assert torch.equal(source[:, q_heads:].cpu(), case.qkv[:, q_heads:])


def test_qkv_prologue_with_positions_looks_angles_up(device: torch.device) -> None:
    case = _Heads(6, 4, 2, 64, torch.float32, norm=False)
    positions = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:6]
    tables = torch.full((2, 40, 32), torch.nan)
    tables[0, positions], tables[1, positions] = case.cos, case.sin
    pools = [case.pool.clone().to(device), case.pool.clone().to(device)]
    direct = case.run(device, pools[0], None, case.qkv.clone().to(device))
    looked_up = qkv.split_norm_rotate_write(
        case.qkv.clone().to(device),
        None,
        None,
        1e-6,
        *tables.to(device),
        case.slots.to(device),
        pools[1],
        positions=positions.to(device),
    )
    assert torch.equal(direct, looked_up)
    assert torch.equal(*pools)


def test_qkv_prologue_when_every_token_is_padding_writes_no_block(device: torch.device) -> None:
    case = _Heads(4, 4, 2, 64, torch.bfloat16, norm=False)
    case.slots[:] = -1
    pool = case.pool.clone().to(device)
    case.run(device, pool, None, case.qkv.clone().to(device))
    assert torch.equal(pool.cpu(), case.pool)


def test_qkv_prologue_when_shapes_do_not_fit_raises(device: torch.device) -> None:
    case = _Heads(2, 4, 2, 64, torch.float32, norm=True)
    pool, source = case.pool.clone().to(device), case.qkv.clone().to(device)
    with pytest.raises(ValueError, match="does not fit a pool"):
        case.run(device, pool[..., :32], None, source)
    with pytest.raises(ValueError, match="q_out"):
        case.run(device, pool, torch.empty(2, 3, 64, device=device), source)
    case.k_norm = None
    with pytest.raises(ValueError, match="both or none"):
        case.run(device, pool, None, source)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize(("words", "index"), [(3, torch.int32), (64, torch.int64), (2500, torch.int64)])
def test_row_copies_equal_the_references_and_touch_their_rows_alone(
    device: torch.device, dtype: torch.dtype, words: int, index: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(words)
    rows = torch.randint(0, 100, (9, words), generator=generator).to(dtype)
    numbers = torch.tensor([7, 4, 0, 8, 5], dtype=index)[1:]  # a list that begins in the middle of another
    got = torch.full((4, words), 101, dtype=dtype, device=device)
    block_copy.gather_rows(rows.to(device), numbers.to(device), got)
    assert torch.equal(got.cpu(), block_copy.gather_reference(rows, numbers))

    target, expected = rows.flip(0).to(device), rows.flip(0).clone()
    block_copy.scatter_rows(target, numbers.to(device), got)
    block_copy.scatter_reference(expected, numbers, got.cpu())
    assert torch.equal(target.cpu(), expected)


def test_row_copies_of_no_rows_do_nothing(device: torch.device) -> None:
    rows, none = torch.ones(3, 8, device=device), torch.empty(0, dtype=torch.int64, device=device)
    block_copy.gather_rows(rows, none, torch.empty(0, 8, device=device))
    block_copy.scatter_rows(rows, none, torch.empty(0, 8, device=device))
    assert rows.all()


def test_row_copies_when_shapes_do_not_fit_raise(device: torch.device) -> None:
    rows, numbers = torch.zeros(3, 8, device=device), torch.tensor([1, 2], device=device)
    for staged in (torch.zeros(2, 7, device=device), torch.zeros(3, 8, device=device), torch.zeros(2, 8).short()):
        with pytest.raises(ValueError, match="do not fit"):
            block_copy.gather_rows(rows, numbers, staged)
    with pytest.raises(ValueError, match="contiguous"):
        block_copy.scatter_rows(rows, numbers, torch.zeros(8, 2, device=device).T)
