"""Products with weights on a device: cuBLAS, but where a kernel of our own is measured to be faster.

With few rows a product is bound by reading its weight once, and cuBLAS' kernels for that leave up to a third of the
memory bandwidth unused; with one or two hundred, SwiGLU's way through memory between two products costs what one kernel
for both saves. Where the measured tables of `kernels/small_gemm_table.py` and `kernels/wide_gemm_table.py` say that a
kernel of our own is faster for a shape and number of rows, it is taken; `python -m bench.gpu.gemm` and
`bench.gpu.wide_gemm` measure. The choice depends on the shape alone, so that equal batches give equal numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import small_gemm, small_gemm_table, swiglu, wide_gemm, wide_gemm_table


def measured_sizes() -> list[int]:
    """Numbers of rows, ascending: the last of each range for which a table names a kernel. With one step of each, all
    of them are compiled."""
    entries = (*small_gemm_table.TABLE.values(), *wide_gemm_table.TABLE.values())
    return sorted({last for entry in entries for last, _ in entry})


class DeviceLinear:
    """y = x W^T + b. The weight stays as it came: [out, in], row-major."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.small = small_gemm_table.configs_for(weight)
        self.wide = wide_gemm_table.configs_for(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.small.get(x.shape[0])
        if config is not None:
            return small_gemm.linear(x, self.weight, self.bias, config=config)
        wide = self.wide.get(x.shape[0])
        if wide is not None:
            return wide_gemm.linear(x, self.weight, config=wide)
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += x W^T + b, from the accumulators."""
        weight = self.weight.t()
        if x.dtype == torch.float32:
            torch.addmm(residual, x, weight, out=residual)
        elif x.device.type == "cuda":
            torch.ops.aten.addmm.dtype_out(residual, x, weight, torch.float32, out=residual)
        else:
            residual.addmm_(x.float(), weight.float())
        if self.bias is not None:
            residual.add_(self.bias)

    def exact(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The accumulators themselves, which are float32. out: float32 [tokens, out], contiguous."""
        if out is None:
            out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=torch.float32, device=x.device)
        config = self.small.get(x.shape[0])
        if config is not None:
            return small_gemm.linear(x, self.weight, self.bias, config=config, out=out)
        weight = self.weight.t()
        if x.dtype == torch.float32:
            torch.mm(x, weight, out=out)
        elif x.device.type == "cuda":
            torch.mm(x, weight, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.float(), out=out)
        return out if self.bias is None else out.add_(self.bias)


class DeviceGated:
    """SwiGLU's inner half: one product with gate and up, whose element-wise step the small kernel does itself."""

    def __init__(self, gate_up: torch.Tensor, bias: torch.Tensor | None) -> None:
        """gate_up: [2 * inner, in], the gate's rows first; bias: [2 * inner]."""
        self.gate_up = DeviceLinear(gate_up, bias)
        self.small = small_gemm_table.configs_for(gate_up, gated=True)
        self.wide = wide_gemm_table.configs_for(gate_up, bias, gated=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.small.get(x.shape[0])
        if config is not None:
            return small_gemm.gated(x, self.gate_up.weight, self.gate_up.bias, config=config)
        wide = self.wide.get(x.shape[0])
        if wide is not None:
            return wide_gemm.gated(x, self.gate_up.weight, config=wide)
        return swiglu.swiglu(self.gate_up(x))
