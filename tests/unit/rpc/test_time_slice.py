"""Asking the kernel for short time slices, with the kernel's own word for it."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import pytest

from rpc.time_slice import DEFAULT_S, SHORT_S, never_interrupt, set_time_slice


def slice_ns() -> int:
    """The calling thread's slice as the kernel has it; 0 where it does not say."""
    try:
        lines = Path("/proc/thread-self/sched").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("se.slice ")), 0)


def in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join(10.0)


def test_slice_when_asked_for_then_the_thread_and_those_it_starts_have_it_and_no_others() -> None:
    before = slice_ns()
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if not before or release < (6, 12):
        pytest.skip("this kernel has no slices of a thread's own, or does not show them")
    seen: list[int] = []

    def ask() -> None:
        assert set_time_slice(SHORT_S)
        seen.append(slice_ns())
        in_a_thread(lambda: seen.append(slice_ns()))
        assert set_time_slice(DEFAULT_S)
        seen.append(slice_ns())

    in_a_thread(ask)
    assert seen == [300_000, 300_000, before]
    assert slice_ns() == before


def test_slice_when_the_system_is_unknown_then_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    assert not set_time_slice(SHORT_S)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no such policy")
def test_never_interrupt_when_asked_for_then_the_thread_and_those_it_starts_wait_and_keep_their_slices() -> None:
    seen: list[int] = []

    def ask() -> None:
        assert never_interrupt()
        assert never_interrupt()
        set_time_slice(SHORT_S)
        seen.append(os.sched_getscheduler(0))
        in_a_thread(lambda: seen.append(os.sched_getscheduler(0)))

    in_a_thread(ask)
    assert seen == [os.SCHED_BATCH, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
