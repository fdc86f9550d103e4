"""The engine process: `python -m engine.process`, started by a front through `engine.client`, one for each rank.

Its configuration comes on stdin. Rank 0 says hello when both sockets work, loads the model, says that it is ready, and
runs steps until the front tells it to stop. The other ranks do what rank 0 says. A process's life is the front's:
signals for termination are ignored here, because the front gets them too and ends its engine in order, and the kernel
kills it when the front dies.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.config import EngineConfig
from engine.messages import EngineEnvelope, EngineFailed, EngineHello
from engine.parallel.lost import RankLost
from engine.scheduler.news import engine_error
from rpc.errors import BatonError, ErrorCode
from rpc.huge_pages import gather_memory
from rpc.logs import close_logging, setup_logging
from rpc.time_slice import DEFAULT_S, never_interrupt, set_time_slice

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.parallel.hub import Hub

FIRST_MESSAGE_S = 60.0
LAST_MESSAGE_MS = 1000
AGENT_CLOSE_S = 2.0
DRAIN_S = 2.0  # for prefix blocks on their way to a tier when the server ends
# How long a thread may keep the interpreter while another one waits for it. The step loop takes it back after every
# operator; at the default of 5 ms a busy cache-store thread would hold up the answer of the step by that much.
SWITCH_INTERVAL_S = 0.0002
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after the front's shutdown message, 1 after a failure that it was told of, 2 without a front."""
    # SIGHUP asks for log files to be opened anew; this process has none, and writes where its front's stderr goes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="Engine of a Baton server. Started by its front, not by hand.")
    parser.add_argument("--front-pid", type=int, required=True, help="process whose death ends this one")
    parser.add_argument("--inbox", help="rank 0: socket of the front's messages")
    parser.add_argument("--outbox", help="rank 0: socket of the engine's messages")
    parser.add_argument("--followers", help="rank 0 of several: descriptors of its connections to the others")
    parser.add_argument("--leader", type=int, help="every other rank: descriptor of its connection to rank 0")
    parser.add_argument("--report", type=int, help="every other rank: descriptor to which it writes why it ends")
    parser.add_argument("--meeting", type=int, help="of several ranks: descriptor of the file where they meet")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configuration = sys.stdin.buffer.read()
    try:
        if options.leader is not None:
            return _follow(configuration, options)
        return _lead(configuration, options)
    finally:
        close_logging()


def _lead(configuration: bytes, options: argparse.Namespace) -> int:
    """The life of rank 0, which is the only one of most engines."""
    context = zmq.Context(io_threads=1)
    # The first socket starts the thread that moves messages. It keeps the short time slices of the front, whose child
    # this process is; what computes does not interrupt others.
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    set_time_slice(DEFAULT_S)
    for link in (inbox, outbox):
        link.setsockopt(zmq.RCVHWM, 0)
        link.setsockopt(zmq.SNDHWM, 0)
        link.setsockopt(zmq.LINGER, LAST_MESSAGE_MS)
    inbox.connect(options.inbox)
    outbox.connect(options.outbox)
    try:
        if not _meet_front(inbox, outbox, options.front_pid):
            shutil.rmtree(Path(options.inbox.removeprefix("ipc://")).parent, ignore_errors=True)
            return 2
        return _serve(configuration, inbox, outbox, options)
    finally:
        inbox.close(0)
        outbox.close()
        context.term()


def _meet_front(inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], front_pid: int) -> bool:
    """Ties this process to the front's life and says hello. False: the front is gone."""
    deadline = time.monotonic() + FIRST_MESSAGE_S
    while not inbox.poll(100):
        if os.getppid() != front_pid or time.monotonic() > deadline:
            return False
    inbox.recv()
    outbox.send(msgspec.msgpack.encode(EngineEnvelope(hello=EngineHello(os.getpid()))))
    # From now on the front has removed the sockets' folder, so a sudden death leaves nothing behind.
    return _die_with_front(front_pid)


def _die_with_front(front_pid: int) -> bool:
    """The kernel ends this process when the front ends. False: it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == front_pid


def _set_up_logging(config: EngineConfig) -> None:
    setup_logging(
        config.role,
        config.log_level,  # type: ignore[arg-type]  # checked by the front's settings
        config.log_format,  # type: ignore[arg-type]
        rank=config.rank,
        process=f"engine:{os.getpid()}",
    )


def _share_processors(config: EngineConfig) -> None:
    """Ranks on the same processors do not interrupt each other at every message of a step, which takes half the time
    then where there are fewer processors than ranks (docs/benchmarks.md). Before a rank's other threads begin."""
    from engine.device import resolve_device

    if config.tensor_parallel_size > 1 and resolve_device(config.device, config.rank).type == "cpu":
        never_interrupt()


def _settle(config: EngineConfig) -> None:
    """Between the start and the first step. What is alive now stays alive: left to the collector, torch's objects cost
    a step 0.1 s now and then."""
    from engine.device import resolve_device

    gc.collect()
    gc.freeze()
    if resolve_device(config.device, config.rank).type == "cpu":
        gather_memory()  # else a step that has read all weights finds nothing of what it needs next


def _failure(error: Exception) -> BatonError:
    """What is reported of the error that ends this process."""
    if isinstance(error, BatonError):
        return error
    _log.error("the engine failed", exc_info=error)
    return BatonError(ErrorCode.ENGINE_DEAD, "the engine failed; see its log", metadata={"cause": type(error).__name__})


def _serve(
    configuration: bytes, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], options: argparse.Namespace
) -> int:
    """Runs the engine; whatever ends it is told to the front."""
    try:
        config = EngineConfig.from_json(configuration)
        config.check()
    except BatonError as error:
        return _report(error, outbox)
    from engine.core import EngineLoop, EngineUnusable, Wakeup

    wakeup = Wakeup()
    core: EngineCore | None = None
    hub: Hub | None = None
    failure: BatonError | None = None
    try:
        _set_up_logging(config)
        if options.followers:
            from engine.parallel.hub import Hub

            links = [_inherited(int(number)) for number in options.followers.split(",")]
            hub = Hub(links, config.tp_broadcast_timeout_seconds)
        _share_processors(config)
        from engine.startup import start_core

        core, ready = start_core(config, wakeup, hub, _meeting(options))
        if config.profile_dir:
            from engine.profiling import StepProfiler

            name = f"{config.role}-{ready.engine_id[:8]}"
            core.profiler = StepProfiler(Path(config.profile_dir), name, config.profile_max_seconds, wakeup.wake)
            core.profiler.prepare()
        _settle(config)
        if hub is not None:
            hub.serve()
        outbox.send(msgspec.msgpack.encode(EngineEnvelope(ready=ready)))
        _log.info("engine ready", extra={"blocks": ready.num_blocks, "load_seconds": round(ready.load_seconds, 3)})
        EngineLoop(core, inbox, outbox, wakeup).run()
        return 0
    except EngineUnusable as error:
        failure = error.error
    except Exception as error:
        failure = _failure(error)
    finally:
        if core is not None:
            if core.tiers is not None:
                core.tiers.close(drain_s=DRAIN_S if failure is None else 0)
            core.agent.close(AGENT_CLOSE_S)
        if failure is not None:
            _report(failure, outbox)
        if hub is not None:
            hub.close()  # now the others end too, and what they say of that is no cause
        wakeup.close()
    return 1


def _meeting(options: argparse.Namespace) -> str:
    """Path of the file where the ranks meet; it has no name in any folder."""
    return f"/proc/self/fd/{options.meeting}" if options.meeting is not None else ""


def _inherited(descriptor: int) -> socket.socket:
    """A connection that the front made. No process that this one starts may hold it too: its end would go unnoticed."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def _report(failure: BatonError, outbox: zmq.Socket[bytes]) -> int:
    _log.error("engine ends: %s", failure, extra={"code": failure.code.name})
    outbox.send(msgspec.msgpack.encode(EngineEnvelope(failed=EngineFailed(engine_error(failure)))))
    return 1


def _follow(configuration: bytes, options: argparse.Namespace) -> int:
    """The life of every rank but the first."""
    set_time_slice(DEFAULT_S)
    if not _die_with_front(options.front_pid):
        return 2
    from engine.core import Wakeup
    from engine.parallel.follower import Follower, start_follower
    from engine.parallel.messages import RankFrame
    from engine.parallel.port import Port

    wakeup = Wakeup()
    port: Port | None = None
    follower: Follower | None = None
    failed: BatonError | None = None
    try:
        config = EngineConfig.from_json(configuration)
        config.check()
        _set_up_logging(config)
        port = Port(_inherited(options.leader), config.tp_broadcast_timeout_seconds)
        _share_processors(config)
        follower = start_follower(config, port, _meeting(options), wakeup)
        _settle(config)
        follower.tell_ready()
        _log.info("rank ready", extra={"load_seconds": round(time.monotonic() - follower.rank.began, 3)})
        follower.run()
        return 0
    except Exception as error:
        failed = _failure(error)
        _log.error("rank ends: %s", failed, extra={"code": failed.code.name})
        report = engine_error(failed)
        # The front first: it may end this process once rank 0 has ended.
        with contextlib.suppress(OSError):
            os.write(options.report, msgspec.msgpack.encode(EngineFailed(report)))
        os.close(options.report)
        if port is not None:
            with contextlib.suppress(RankLost):
                port.send(RankFrame(failed=report))
                port.flush(LAST_MESSAGE_MS / 1000)
        return 1
    finally:
        if follower is not None:
            if follower.tiers is not None:
                follower.tiers.close(DRAIN_S if failed is None else 0)
            follower.rank.agent.close(AGENT_CLOSE_S)
        if port is not None:
            port.close()
        wakeup.close()


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # Everything is closed. Taking the interpreter, torch and gRPC apart would only delay the front, which waits.
    os._exit(exit_status)
