"""Signals, drain and exit status; the signals are real, sent to processes of their own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rpc.lifecycle import Lifecycle, OpenWork, watch_loop_lag
from rpc.metrics import Registry
from tests.unit.rpc.waiting import until

PROGRAM = """
import asyncio, sys, time
from rpc.lifecycle import Lifecycle, OpenWork, run

async def nothing() -> None:
    return

async def main() -> int:
    life, work = Lifecycle(), OpenWork()
    life.install()
    kind = sys.argv[1]
    if kind != "idle":
        work.add(1)
    print("up", flush=True)
    await life.stopping.wait()
    async def begin() -> None:
        print("draining", flush=True)
    async def refuse() -> None:
        if kind == "ends":
            asyncio.get_running_loop().call_later(0.05, work.add, -1)
    async def abort() -> None:
        print("aborting", flush=True)
        if kind == "hangs":
            time.sleep(60)
        work.set(0)
    limit = float(sys.argv[2])
    finished = await life.drain(work, grace_s=0.05, timeout_s=limit, begin=begin, refuse=refuse, abort=abort)
    print("finished", finished, flush=True)
    return life.exit_code

run(main)
"""

ROOT = Path(__file__).resolve().parents[3]
SCHEDULING_S = 4.0  # what a busy machine may add; what is cut short would take a minute


class Process:
    def __init__(self, kind: str, timeout_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind, str(timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self) -> Process:
        self.expect("up")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def expect(self, line: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == line

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def status(self) -> int:
        return self._process.wait(10)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["idle", "ends"])
def test_first_signal_drains_and_exits_0(kind: str, signum: signal.Signals) -> None:
    with Process(kind, 30) as process:
        process.send(signum)
        process.expect("draining")
        process.expect("finished True")
        assert process.status() == 0


def test_drain_at_its_time_limit_aborts_the_rest_and_exits_0() -> None:
    with Process("stays", 0.2) as process:
        process.send(signal.SIGTERM)
        process.expect("draining")
        process.expect("aborting")
        process.expect("finished False")
        assert process.status() == 0


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_aborts_at_once_and_names_itself_in_the_status(signum: signal.Signals, status: int) -> None:
    with Process("stays", 60) as process:
        process.send(signal.SIGTERM)
        process.expect("draining")
        began = time.monotonic()
        process.send(signum)
        process.expect("aborting")
        assert process.status() == status
        assert time.monotonic() - began < 2 + SCHEDULING_S


def test_second_signal_ends_a_process_whose_clean_up_hangs_within_2_s() -> None:
    with Process("hangs", 60) as process:
        process.send(signal.SIGTERM)
        process.expect("draining")
        began = time.monotonic()
        process.send(signal.SIGTERM)
        assert process.status() == 143
        assert time.monotonic() - began < 2 + SCHEDULING_S


async def test_drain_goes_through_its_phases_in_order_and_shows_them() -> None:
    registry = Registry("decode")
    life = Lifecycle()
    work = OpenWork(lambda count: registry.set("baton_drain_remaining_requests", count))
    phases: list[str] = []

    async def phase(name: str) -> None:
        phases.append(name)
        assert registry.value("baton_drain_state") == 1
        if name == "begin":
            with work.scope():  # still taken within the grace
                pass
        if name == "refuse":
            assert registry.value("baton_drain_remaining_requests") == 1
            work.add(-1)

    work.add(1)
    assert registry.value("baton_drain_state") == 0
    async with asyncio.timeout(20):
        finished = await life.drain(
            work,
            grace_s=0.01,
            timeout_s=5,
            begin=lambda: phase("begin"),
            refuse=lambda: phase("refuse"),
            abort=lambda: phase("abort"),
            registry=registry,
        )
    assert finished
    assert phases == ["begin", "refuse"]
    assert registry.value("baton_drain_state") == 2


async def test_signal_during_the_grace_cuts_it_short() -> None:
    exits: list[int] = []
    life = Lifecycle(exit_process=exits.append)
    work = OpenWork()
    work.add(1)
    aborted = asyncio.Event()

    async def begin() -> None:
        life.on_signal(signal.SIGTERM)
        life.on_signal(signal.SIGTERM)
        life.on_signal(signal.SIGINT)  # a third changes nothing

    async def refuse() -> None:
        return

    async def abort() -> None:
        aborted.set()

    async with asyncio.timeout(20):
        await life.drain(work, grace_s=60, timeout_s=120, begin=begin, refuse=refuse, abort=abort)
    assert aborted.is_set()
    assert life.exit_code == 143
    life.uninstall()
    assert exits == []


@pytest.mark.invariant("RPC-3")
async def test_open_work_counts_every_exit_and_never_falls_below_zero() -> None:
    work = OpenWork()

    def fail() -> None:
        with work.scope():
            assert work.count == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert work.count == 0
    with pytest.raises(ValueError):
        work.add(-1)
    async with asyncio.timeout(20):
        await work.wait_idle()


async def test_loop_lag_is_measured() -> None:
    registry = Registry("router")
    task = asyncio.create_task(watch_loop_lag(registry, 0.005))
    await until(lambda: bool(registry.value("baton_event_loop_lag_seconds_count")))
    time.sleep(0.05)  # noqa: ASYNC251 - blocking the loop is what is measured
    await until(lambda: (registry.value("baton_event_loop_lag_seconds_sum") or 0) >= 0.03)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
