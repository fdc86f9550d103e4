"""Products of up to 256 rows on a Hopper GPU: beside the reference, at odd sizes, in graphs, in the device's layers."""

from __future__ import annotations

import pytest
import torch

from engine.layers.device_linear import DeviceGated, DeviceLinear
from kernels import small_gemm, wide_gemm
from kernels.wide_gemm import Config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="it needs a Hopper GPU, compute capability 9.0",
)

WHOLE = [
    Config(columns=128, extra=32, stages=5),
    Config(columns=256),
    Config(rows=128, columns=128, extra=32, stages=3, pdl=False),
    Config(columns=64, extra=32, stages=6),
]
GATED = [*WHOLE, Config(rows=128, columns=128, stash=4096), Config(rows=128, columns=128, extra=32, stash=4096)]
SHARED = [
    Config(columns=128, extra=32, stages=6, stash=1024, shares=4),
    Config(columns=128, stages=6, stash=1024, shares=2),
    Config(rows=128, columns=128, extra=32, stages=4, stash=1024, shares=8),
]


def operands(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows * n + k)
    x = torch.randn(rows, k + 8, generator=generator, device="cuda").to(torch.bfloat16)[:, :k]  # rows lie apart
    weight = torch.randn(n, k, generator=generator, device="cuda").mul_(k**-0.5).to(torch.bfloat16)
    return x, weight


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding to bfloat16 away from it."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 3e-3, float(error)
    torch.testing.assert_close(found.double(), expected.double(), rtol=0.02, atol=0.02)


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def exact_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = exact_product(x, weight).to(x.dtype).double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 64), (77, 1032, 200), (150, 776, 1000), (250, 4096, 512)])
@pytest.mark.parametrize("config", WHOLE + SHARED)
def test_product_when_sizes_are_odd_then_equals_the_reference_and_repeats(
    config: Config, rows: int, n: int, k: int
) -> None:
    rows = min(rows, config.width)
    x, weight = operands(rows, n, k)
    if config.shares > 1 and (-(-n // config.height) * config.shares > 132 or -(-k // 64) < config.shares):
        with pytest.raises(ValueError, match="shares"):
            wide_gemm.linear(x, weight, config=config)
        return
    expected = exact_product(x, weight)
    found = wide_gemm.linear(x, weight, config=config)
    assert_near(found, expected)
    for _ in range(3):
        assert torch.equal(wide_gemm.linear(x, weight, config=config), found)
    larger = torch.full((rows + 1, n + 8), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide_gemm.linear(x, weight, config=config, out=larger[:rows, :n])
    assert torch.equal(larger[:rows, :n], found)
    assert larger[rows].isnan().all() and larger[:, n:].isnan().all(), "written past the end"


@pytest.mark.parametrize(
    ("rows", "inner", "k"), [(3, 8, 64), (150, 520, 328), (256, 4096, 512), (101, 1000, 256), (160, 14336, 256)]
)
@pytest.mark.parametrize("config", GATED)
def test_gated_product_when_sizes_are_odd_then_equals_the_reference(
    config: Config, rows: int, inner: int, k: int
) -> None:
    rows = min(rows, config.width)
    x, weight = operands(rows, 2 * inner, k)
    found = wide_gemm.gated(x, weight, config=config)
    assert_near(found, exact_gated(x, weight))
    assert torch.equal(wide_gemm.gated(x, weight, config=config), found)
    larger = torch.full((rows + 1, inner + 8), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide_gemm.gated(x, weight, config=config, out=larger[:rows, :inner])
    assert torch.equal(larger[:rows, :inner], found)
    assert larger[rows].isnan().all() and larger[:, inner:].isnan().all(), "written past the end"


@pytest.mark.parametrize("config", [WHOLE[0], WHOLE[1], SHARED[0]])
def test_rows_when_others_change_then_stay_as_they_are(config: Config) -> None:
    x, weight = operands(150, 4096, 1024)
    products = [wide_gemm.linear] if config.shares > 1 else [wide_gemm.linear, wide_gemm.gated]
    other = x.clone()
    other[70:] = torch.nan
    for product in products:
        before = product(x, weight, config=config)
        assert torch.equal(product(other, weight, config=config)[:70], before[:70])


@pytest.mark.parametrize("config", [WHOLE[0], WHOLE[1], SHARED[0], SHARED[2]])
def test_product_when_replayed_from_a_graph_then_has_the_bits_of_the_launch(config: Config) -> None:
    x, weight = operands(160, 4096, 4096)
    wide_gemm.prepare(x.device)
    expected = wide_gemm.linear(x, weight, config=config)
    static = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        first = wide_gemm.linear(static, weight, config=config)
        second = wide_gemm.linear(first.mul(2.0), weight, config=config)  # starts while what makes its input runs
    static.copy_(x)
    wanted = wide_gemm.linear(expected.mul(2.0), weight, config=config)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, expected) and torch.equal(second, wanted)


@pytest.mark.parametrize("rows", [100, 128, 160, 256])
def test_layers_when_the_table_names_the_kernel_then_compute_what_cublas_does(rows: int) -> None:
    gate_up = operands(rows, 28672, 4096)
    gated = DeviceGated(gate_up[1], None)
    assert gated.wide.get(rows) is not None
    x = gate_up[0].contiguous()
    assert_near(gated(x), small_gemm.gated_reference(x, gate_up[1]))
    for k in (4096, 14336):
        linear = DeviceLinear(operands(rows, 4096, k)[1], None)
        x = operands(rows, 8, k)[0].contiguous()
        assert_near(linear(x), small_gemm.reference(x, linear.weight))


def test_layers_when_prompts_are_long_then_are_left_to_cublas() -> None:
    linear = DeviceLinear(operands(1, 4096, 14336)[1], None)
    gated = DeviceGated(operands(1, 28672, 4096)[1], None)
    assert all(linear.wide.get(rows) is None and gated.wide.get(rows) is None for rows in (257, 1024, 8192))
