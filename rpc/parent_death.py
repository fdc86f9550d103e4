"""Processes that end with the one that started them, even if they hang or are stopped."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. Raises OSError.

    A parent that has ended before is not noticed: whoever calls this has a socket, say, that tells.
    """
    _set_death_signal(signal.SIGKILL)


def outlive_parent() -> None:
    """Takes `end_with_parent` back, for one that puts something in order and then ends by itself. Raises OSError."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
