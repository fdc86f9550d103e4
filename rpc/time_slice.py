"""How long the kernel lets a thread run while others wait for its processor.

Router and fronts work for some hundred microseconds at a time, and somebody waits for each of these. On a machine whose
processors are busy with computation, a thread that wakes up waits for the end of the running thread's slice, about
1.5 ms by default, at every hop of a request. From Linux 6.12 on a thread that asks for short slices may interrupt those
that do not; it does not get more time than its share. Elsewhere, and on older kernels, asking changes nothing.

Processes that compute one step together are the opposite case: each message between them wakes a thread that interrupts
its sender, which has the next message to send. They ask not to interrupt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

SHORT_S = 0.0003  # the kernel takes 0.1 ms at least
DEFAULT_S = 0.0

_SET_ATTR = {"x86_64": 314, "aarch64": 274}  # numbers of sched_setattr(2), which no library wraps
_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def set_time_slice(seconds: float) -> bool:
    """Asks for slices of `seconds` for the calling thread and for what it starts from now on, threads and processes.

    DEFAULT_S is the kernel's own length. False where that cannot be asked for.
    """
    number = _SET_ATTR.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return False
    with contextlib.suppress(OSError):
        policy = os.sched_getscheduler(0)
        if policy in (os.SCHED_OTHER, os.SCHED_BATCH):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            attributes = _ATTR.pack(_ATTR.size, policy, 0, nice, 0, int(seconds * 1e9), 0, 0)
            return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
    return False


def never_interrupt() -> bool:
    """Asks that the calling thread, and what it starts from now on, interrupts no running thread when it wakes up
    (SCHED_BATCH). Its share of the time stays the same. False where that cannot be asked for.
    """
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) in (os.SCHED_OTHER, os.SCHED_BATCH):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            return True
    return False
