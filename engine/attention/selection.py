"""Choice of the attention backend by name, or by what is there and was measured to be fast."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.attention.backend import AttentionBackend, BatchLimits
from engine.attention.native_backend import NativeBackend
from engine.attention.torch_backend import TorchBackend
from engine.loader.errors import ModelLoadError
from engine.models.config import ModelConfig

_log = logging.getLogger(__name__)

NAMES = ("torch", "native", "triton", "flashinfer")
_FEW = BatchLimits(max_rows=64, max_tokens=2048, max_blocks=1024)  # where the caller names no limits


def select_backend(
    name: str,
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    limits: BatchLimits | None = None,
) -> AttentionBackend:
    """The backend of `--attention-backend`.

    "auto": on the CPU `native` where it is available, else `torch`. On a CUDA device `triton`, and where FlashInfer is
    installed and was measured to be faster for some shapes (see table.py), both, chosen at every step.
    Raises ModelLoadError for an unknown name, or one that cannot run the model on the device.
    """
    return _Choice(config, block_size, dtype, device, limits or _FEW).backend(name)


class _Choice:
    def __init__(
        self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device, limits: BatchLimits
    ) -> None:
        self.config, self.block_size, self.dtype, self.device, self.limits = config, block_size, dtype, device, limits

    def backend(self, name: str) -> AttentionBackend:
        makers: dict[str, Callable[[], AttentionBackend]] = {
            "torch": self._torch,
            "native": self._native,
            "triton": self._triton,
            "flashinfer": self._flashinfer,
            "auto": self._auto,
        }
        if name not in makers:
            raise ModelLoadError(f"--attention-backend {name!r} is not available; available: auto, {', '.join(NAMES)}")
        backend = makers[name]()
        has = backend.capabilities
        if any(window is not None for window in self.config.windows) and not has.sliding_window:
            raise ModelLoadError(f"--attention-backend {name!r} cannot run models with a sliding window")
        return backend

    def _auto(self) -> AttentionBackend:
        config = self.config
        if self.device.type == "cuda":
            return self._measured()
        if NativeBackend.available(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype):
            return self._native()
        return self._torch()

    def _torch(self) -> AttentionBackend:
        self._only_on_cpu("torch")
        config = self.config
        return TorchBackend(
            config.num_heads, config.num_kv_heads, config.head_dim, self.block_size, config.windows, self.dtype
        )

    def _native(self) -> AttentionBackend:
        self._only_on_cpu("native")
        config = self.config
        if not NativeBackend.available(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype):
            raise ModelLoadError(
                "--attention-backend 'native' needs a processor with AVX-512 and AMX, a C compiler, and heads of a "
                f"multiple of 16 up to 256 (this model: {config.head_dim}); use 'torch'"
            )
        return NativeBackend(
            config.num_heads, config.num_kv_heads, config.head_dim, self.block_size, config.windows, self.dtype
        )

    def _only_on_cpu(self, name: str) -> None:
        if self.device.type != "cpu":
            raise ModelLoadError(f"--attention-backend {name!r} runs on the CPU only; use 'auto' or 'triton'")

    # Imported where they are chosen: a server on the CPU starts without Triton

    def _triton(self) -> AttentionBackend:
        from engine.attention.triton_backend import MOST_ROWS, TritonBackend

        config = self.config
        if self.limits.max_rows > MOST_ROWS:
            raise ModelLoadError(
                f"--max-num-seqs {self.limits.max_rows}: attention on a device takes at most {MOST_ROWS} rows; lower it"
            )
        if reason := TritonBackend.unavailable(config.head_dim, self.device):
            raise ModelLoadError(f"--attention-backend 'triton' {reason}; use 'auto'")
        return TritonBackend(
            config.num_heads, config.num_kv_heads, config.head_dim, device=self.device, limits=self.limits
        )

    def _flashinfer(self) -> AttentionBackend:
        from engine.attention.flashinfer_backend import FlashInferBackend

        config = self.config
        if reason := FlashInferBackend.unavailable(config.head_dim, self.dtype, self.device):
            raise ModelLoadError(f"--attention-backend 'flashinfer' {reason}; use 'auto'")
        if any(window is not None for window in config.windows):  # before it compiles anything
            raise ModelLoadError("--attention-backend 'flashinfer' cannot run models with a sliding window; use 'auto'")
        try:
            return FlashInferBackend(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self.block_size,
                config.windows,
                self.dtype,
                device=self.device,
                limits=self.limits,
            )
        except (ImportError, OSError, RuntimeError) as error:
            raise ModelLoadError(
                f"--attention-backend 'flashinfer': the library does not work here ({error}); use 'triton'"
            ) from error

    def _measured(self) -> AttentionBackend:
        from engine.attention.device_backend import DeviceBackend
        from engine.attention.flashinfer_backend import FlashInferBackend
        from engine.attention.measured_backend import MeasuredBackend
        from engine.attention.table import Heads, table_for

        config, device = self.config, self.device
        triton = self._triton()
        table = table_for(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        heads = Heads(config.head_dim, config.num_heads // config.num_kv_heads, config.num_layers)
        if not table.prefers("flashinfer", ("triton", "flashinfer"), heads):
            return triton
        windows = any(window is not None for window in config.windows)
        if windows or FlashInferBackend.unavailable(config.head_dim, self.dtype, device):
            return triton
        try:
            flashinfer = self._flashinfer()
        except ModelLoadError as error:
            _log.warning("attention by triton alone: %s", error)
            return triton
        assert isinstance(triton, DeviceBackend) and isinstance(flashinfer, DeviceBackend)
        return MeasuredBackend(triton, flashinfer, table, heads)
