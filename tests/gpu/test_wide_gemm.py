"""Products of many rows on a Hopper GPU: beside the reference, at odd sizes, in graphs, and in the device's layers."""

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

FEW = [
    Config(True, columns=128, extra=32, stages=5),
    Config(True, columns=256),
    Config(True, rows=128, columns=128, extra=32, stages=4, stash=4096, ahead=8),
    Config(True, groups=3, columns=128, extra=32, stages=4, ahead=16, pdl=False),
]
SHARED = [
    Config(True, columns=128, extra=32, stages=6, stash=1024, shares=4),
    Config(True, columns=128, stages=6, stash=1024, shares=2),
    Config(True, rows=128, columns=128, extra=32, stages=4, stash=1024, shares=8, ahead=8),
]
MANY = [
    Config(columns=256),
    Config(rows=128, columns=128, extra=64, stages=3, group=8),
    Config(groups=3, columns=128, extra=128, stages=3),
]


def operands(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows * n + k)
    x = torch.randn(rows, k + 8, generator=generator, device="cuda").to(torch.bfloat16)[:, :k]  # rows lie apart
    weight = torch.randn(n, k, generator=generator, device="cuda").mul_(k**-0.5).to(torch.bfloat16)
    return x, weight


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding to bfloat16 (or of the order of float32's sums) away from it."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (3e-3 if found.dtype == torch.bfloat16 else 1e-4), float(error)
    bound = 0.02 if found.dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound)


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def exact_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = exact_product(x, weight).to(x.dtype).double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 64), (77, 1032, 200), (150, 776, 1000), (300, 4096, 512)])
@pytest.mark.parametrize("config", FEW + SHARED + MANY)
def test_product_when_sizes_are_odd_then_equals_the_reference_and_repeats(
    config: Config, rows: int, n: int, k: int
) -> None:
    tiles = -(-n // (config.groups * config.rows)) * -(-rows // (config.columns + config.extra))
    if config.shares > 1 and (tiles * config.shares > 132 or k < 64 * config.shares):
        with pytest.raises(ValueError, match="shares"):
            wide_gemm.linear(*operands(rows, n, k), config=config)
        return
    x, weight = operands(rows, n, k)
    expected = exact_product(x, weight)
    found = wide_gemm.linear(x, weight, config=config)
    assert_near(found, expected)
    for _ in range(3):
        assert torch.equal(wide_gemm.linear(x, weight, config=config), found)
    wide = torch.full((rows + 1, n + 8), torch.nan, device="cuda")
    wide_gemm.linear(x, weight, config=config, out=wide[:rows, :n])
    assert_near(wide[:rows, :n], expected)
    assert wide[rows].isnan().all() and wide[:, n:].isnan().all(), "written past the end"
    residual = torch.randn(rows, n, device="cuda")
    before = residual.clone()
    wide_gemm.add_to(residual, x, weight, config=config)
    assert_near(residual - before, expected)


@pytest.mark.parametrize(("rows", "inner", "k"), [(3, 8, 64), (150, 520, 328), (256, 4096, 512), (700, 1000, 256)])
@pytest.mark.parametrize("config", FEW + MANY)
def test_gated_product_when_sizes_are_odd_then_equals_the_reference(
    config: Config, rows: int, inner: int, k: int
) -> None:
    x, weight = operands(rows, 2 * inner, k)
    found = wide_gemm.gated(x, weight, config=config)
    assert_near(found, exact_gated(x, weight))
    assert torch.equal(wide_gemm.gated(x, weight, config=config), found)


@pytest.mark.parametrize("config", [FEW[0], SHARED[0], MANY[0]])
def test_rows_when_others_change_then_stay_as_they_are(config: Config) -> None:
    x, weight = operands(150, 4096, 1024)
    before = wide_gemm.linear(x, weight, config=config)
    other = x.clone()
    other[70:] = torch.nan
    assert torch.equal(wide_gemm.linear(other, weight, config=config)[:70], before[:70])


@pytest.mark.parametrize("config", [FEW[0], SHARED[0], SHARED[2], MANY[0], MANY[2]])
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


@pytest.mark.parametrize("rows", [160, 256, 8192])
def test_layers_when_the_table_names_the_kernel_then_compute_what_cublas_does(rows: int) -> None:
    gate_up = operands(rows, 28672, 4096)
    gated = DeviceGated(gate_up[1], None)
    assert gated.wide.get(rows) is not None
    x = gate_up[0][:, :4096].contiguous()
    expected = small_gemm.gated_reference(x[-100:], gate_up[1])
    assert_near(gated(x)[-100:], expected)
    down = DeviceLinear(operands(rows, 4096, 14336)[1], None)
    inner = operands(rows, 8, 14336)[0].contiguous()
    residual = torch.randn(rows, 4096, device="cuda")
    before = residual.clone()
    down.add_to(residual, inner)
    assert_near((residual - before)[-100:], small_gemm.reference(inner[-100:], down.weight))
    assert_near(down(inner)[-100:], small_gemm.reference(inner[-100:], down.weight))
