"""Builds the C kernels once per machine and loads them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

SWITCH = "BATON_CPU_KERNELS"  # "off": never use them
CACHE_DIR = "BATON_KERNEL_DIR"  # where the built library is kept; default ~/.cache/baton/kernels
_SOURCES = ("amx.c", "threads.c", "linear.c", "decode.c", "prefill.c", "elementwise.c")
_HEADERS = ("common.h", "products.h", "threads.h")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-pthread", "-fPIC", "-shared")
_PROCESSOR = {
    "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16",
}  # fmt: skip
_BUILD_TIMEOUT_S = 120

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "baton_request_amx": [],
    "baton_set_threads": [_INT],
    "baton_linear_bf16": [
        _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT,
    ],
    "baton_linear_f32": [
        _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _INT,
    ],
    "baton_decode_attention": [
        _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT,
        _INT, _POINTER, _LONG,
    ],
    "baton_prefill_attention": [
        _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG,
        _LONG, _FLOAT, _INT, _POINTER, _LONG,
    ],
    "baton_write_kv": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG],
    "baton_rms_norm": [
        _POINTER, _LONG, _INT, _POINTER, _FLOAT, _POINTER, _LONG, _INT, _LONG, _LONG, _LONG,
    ],
    "baton_rotate": [_POINTER, _LONG, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG],
}  # fmt: skip


@functools.cache
def load() -> ctypes.CDLL | None:
    """The kernels, built if need be; None where they cannot be used (the log says why). Takes seconds the first time.

    They run on one thread until `set_threads` gives them more.
    """
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        _log.info("CPU kernels are switched off by %s", SWITCH)
        return None
    missing = _PROCESSOR - _processor_flags()
    if missing:
        _log.info("no CPU kernels: the processor lacks %s", ", ".join(sorted(missing)))
        return None
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        _log.info("no CPU kernels: no C compiler (gcc) was found")
        return None
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr[-500:] if isinstance(error, subprocess.CalledProcessError) else ""
        _log.warning("no CPU kernels: building or loading them failed: %s %s", error, detail)
        return None
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    if library.baton_request_amx() != 0:
        _log.info("no CPU kernels: the kernel does not grant the AMX tiles")
        return None
    return library


def name() -> str:
    """What computes, to the last bit: sources, compiler and processor; empty without kernels."""
    kernels = load()
    return "" if kernels is None else Path(kernels._name).stem


def set_threads(count: int) -> None:
    """How many threads the kernels compute on, the calling one included; without effect where there are no kernels."""
    kernels = load()
    if kernels is not None:
        kernels.baton_set_threads(count)


def _processor_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _built(compiler: str) -> Path:
    """Path of the library for these sources, this compiler and this processor."""
    here = Path(__file__).parent
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True, timeout=30).stdout
    recipe = hashlib.sha256("\0".join([version, *_FLAGS, *sorted(_processor_flags())]).encode())
    for name in (*_SOURCES, *_HEADERS):
        recipe.update((here / name).read_bytes())
    folder = _folder()
    target = folder / f"cpu-{recipe.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two servers that start together, one builds
        if not target.exists():
            building = target.with_suffix(f".{os.getpid()}")
            try:
                sources = [str(here / name) for name in _SOURCES]
                subprocess.run(
                    [compiler, *_FLAGS, *sources, "-lm", "-o", str(building)],
                    capture_output=True, check=True, text=True, timeout=_BUILD_TIMEOUT_S,
                )  # fmt: skip
                building.rename(target)
            finally:
                building.unlink(missing_ok=True)
    return target


def _folder() -> Path:
    """Where libraries are kept: a folder that only this user can write to, since its contents are executed."""
    kept = Path(os.environ.get(CACHE_DIR) or "~/.cache/baton/kernels").expanduser()
    try:
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(kept, os.W_OK):
            return kept
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="baton-kernels-"))  # built anew by every process


def main() -> int:
    """`python -m kernels.cpu.library` builds the kernels ahead of the first start."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return 0 if load() is not None else 1


if __name__ == "__main__":
    sys.exit(main())
