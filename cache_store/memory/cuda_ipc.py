"""CUDA IPC: a handle by which another process of the machine maps device memory of this one.

By the driver's own library (libcuda.so.1, whose interface is stable), since torch has no public call for it. Works for
memory from cudaMalloc, which torch's allocator uses by default; not for its expandable segments
(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), whose handles are of another kind.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache

from cache_store.memory.staging import MemoryUnavailable

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
        driver.cuMemGetAddressRange_v2.argtypes = (pointer, size, ctypes.c_uint64)
        driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
        driver.cuIpcOpenMemHandle_v2.argtypes = (pointer, _Handle, ctypes.c_uint)
        driver.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
        driver.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    except (OSError, AttributeError) as error:
        raise MemoryUnavailable(f"the CUDA driver has no memory handles: {error}") from error
    return driver


def _check(what: str, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise MemoryUnavailable(f"{what}: {(name.value or b'error').decode()} ({status})")


class Exports:
    """Handles of this process's allocations, each made once: layers that share an allocation share its handle."""

    def __init__(self) -> None:
        self._handles: dict[int, bytes] = {}

    def locate(self, pointer: int) -> tuple[bytes, int]:
        """(handle, offset): the handle of the allocation that holds the device pointer, and where in it that points.

        The device's context must be current. Raises MemoryUnavailable.
        """
        driver = _driver()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        _check("cuMemGetAddressRange", driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer))
        if base.value not in self._handles:
            handle = _Handle()
            _check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(ctypes.byref(handle), base.value))
            self._handles[base.value] = bytes(handle.reserved)
        return self._handles[base.value], pointer - base.value


@dataclass
class _Mapping:
    base: int
    users: int


class _Mappings:
    """The allocations of other processes that are mapped here, each once, whatever the number of its users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[bytes, _Mapping] = {}

    def open(self, handle: bytes) -> int:
        with self._lock:
            mapping = self._mapped.get(handle)
            if mapping is None:
                base = ctypes.c_uint64()
                wire = _Handle.from_buffer_copy(handle)
                status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), wire, _LAZY_ENABLE_PEER_ACCESS)
                _check("cuIpcOpenMemHandle", status)
                mapping = self._mapped[handle] = _Mapping(base.value, 0)
            mapping.users += 1
            return mapping.base

    def close(self, handle: bytes) -> None:
        with self._lock:
            mapping = self._mapped[handle]
            mapping.users -= 1
            if not mapping.users:
                del self._mapped[handle]
                _check("cuIpcCloseMemHandle", _driver().cuIpcCloseMemHandle(mapping.base))


_mappings = _Mappings()


def open_handle(handle: bytes) -> int:
    """Device pointer to the allocation of another process; `close_handle` once for each. Raises MemoryUnavailable, also
    for a handle of this very process."""
    if len(handle) != HANDLE_BYTES:
        raise MemoryUnavailable(f"a memory handle of {len(handle)} bytes, {HANDLE_BYTES} are expected")
    return _mappings.open(handle)


def close_handle(handle: bytes) -> None:
    """No work on the memory may be under way."""
    _mappings.close(handle)
