"""Starts and supervises the processes of a cluster on this machine.

Every process prints one JSON line on its standard output when it listens (`{"event": "ready", ...}`), which gives the
ports it got. A process that dies is started again on the same ports after a pause that grows; one that ends more than
`max_restarts` times without having run for STABLE_S in between ends the cluster. Children end when the launcher ends,
however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cli.gpu_places import Place, gpus_of, places, ranks_of
from cli.process import LaunchError, LaunchStopped, LaunchTimeout, Process
from router.settings import RouterSettings
from rpc.settings import SettingsError

__all__ = ["LaunchError", "LaunchStopped", "LaunchTimeout", "Launcher", "Process"]

RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_S = 60.0  # a process that has run for this long starts with a clean slate
FAST_EXIT_S = 3.0  # what a second SIGTERM leaves a server
WATCH_S = 0.1
# Engines of one machine share its cores, and so does whatever else runs there. A thread that spins while it waits for
# the others then takes the core from the very thread it waits for: on two cores with a load of 7, decoding was 18 times
# slower with the default policy. What the user has set stays.
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}
# Python's own allocator takes memory here and there in pieces of 1 MiB, of which huge pages (rpc/huge_pages.py) hold
# about half. Of the C library's they hold nearly all.
DENSE_MEMORY = {"PYTHONMALLOC": "malloc"}


@dataclass
class _Care:
    """What the launcher remembers about one process: how often it was started again, and when the next start is."""

    restarts: int = 0
    next_start: float | None = None
    announced: bool = True


@dataclass
class Launcher:
    """Router, prefill and decode servers of one cluster. `start()`, `supervise()`, `stop()`; used by one thread."""

    model: str
    prefill_servers: int = 1
    decode_servers: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    server_flags: list[str] = field(default_factory=list)
    prefill_flags: list[str] = field(default_factory=list)
    decode_flags: list[str] = field(default_factory=list)
    router_flags: list[str] = field(default_factory=list)
    access_log_dir: str = ""
    kv_disk_path: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 120.0
    max_restarts: int = len(RESTART_PAUSES_S)
    log: Callable[[str], None] | None = None
    say: Callable[[str], None] = print
    gpus: list[str] | None = None  # as CUDA_VISIBLE_DEVICES names them; None: those that are there
    servers: list[Process] = field(default_factory=list)
    _places: dict[str, Place] = field(default_factory=dict)  # by server
    _router: Process | None = None

    @property
    def router(self) -> Process:
        if self._router is None:
            raise RuntimeError("the cluster has not been started")
        return self._router

    @property
    def processes(self) -> list[Process]:
        return [*self.servers, *([self._router] if self._router is not None else [])]

    def start(self, stop: threading.Event | None = None) -> None:
        """Starts the servers side by side, then the router.

        Raises LaunchError, or LaunchStopped once `stop` is set; nothing is left running then.
        """
        check_free("--port", self.host, self.port)
        check_free("--grpc-port", self.host, self.grpc_port)
        self._check_router_flags()
        self._share_gpus()
        self.servers = [self._server("prefill", i, self.prefill_flags) for i in range(self.prefill_servers)]
        self.servers += [self._server("decode", i, self.decode_flags) for i in range(self.decode_servers)]
        try:
            for server in self.servers:
                server.start(self._environ(server.name))
            self._wait_ready(self.servers, stop)
            self._router = self._make_router()
            self._router.start(self._environ())
            self._wait_ready([self._router], stop)
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def _wait_ready(self, processes: list[Process], stop: threading.Event | None) -> None:
        """Until all listen; the first one that fails ends the wait, whichever it is."""
        waiting = list(processes)
        while waiting:
            for process in [p for p in waiting if p.check_ready(self.start_timeout_s)]:
                waiting.remove(process)
                self._say_ready(process)
            if stop is not None and stop.is_set():
                raise LaunchStopped("the start was given up")
            if waiting:
                waiting[0].wait_listening(WATCH_S)

    def start_again(self, process: Process) -> None:
        """One of the processes, which has ended, on the ports that it had; returns when it listens. Raises LaunchError.

        For whoever does not `supervise`.
        """
        process.start(self._environ(process.name))
        self._wait_ready([process], None)

    def _environ(self, name: str = "") -> dict[str, str]:
        """What a process of this name has in its environment besides the launcher's own."""
        ours = SHARED_CORES | DENSE_MEMORY
        place = self._places.get(name, Place())
        return {**{k: v for k, v in ours.items() if k not in os.environ}, **place.environ(), **self.environ}

    def _share_gpus(self) -> None:
        """Servers that start together would each take most of the memory of the same GPU."""
        sizes = {
            f"prefill-{i}": ranks_of([*self.server_flags, *self.prefill_flags]) for i in range(self.prefill_servers)
        }
        sizes |= {f"decode-{i}": ranks_of([*self.server_flags, *self.decode_flags]) for i in range(self.decode_servers)}
        gpus = gpus_of({**os.environ, **self.environ}) if self.gpus is None else self.gpus
        self._places = dict(zip(sizes, places(gpus, list(sizes.values())), strict=True))

    def _server(self, role: str, index: int, flags: list[str]) -> Process:
        arguments = ["--model", self.model, "--host", "127.0.0.1", "--port", "0"]
        arguments += ["--metrics-port", "0", "--cache-store-port", "0", "--drain-grace-secs", "0"]
        name = f"{role}-{index}"
        arguments += [*self._log_flags(name), *self._disk_flags(name, flags)]
        arguments += self._places.get(name, Place()).flags()
        return Process(role, name, [*arguments, *self.server_flags, *flags], self.log)

    def _make_router(self) -> Process:
        addresses: list[str] = []
        for server in self.servers:
            addresses += [f"--{server.role}", server.ready["grpc"]]
        return Process("router", "router", self._router_arguments(addresses), self.log)

    def _router_arguments(self, addresses: list[str]) -> list[str]:
        arguments = ["--model", self.model, "--host", self.host, "--drain-grace-secs", "0"]
        arguments += ["--port", str(self.port), "--grpc-port", str(self.grpc_port), *addresses]
        return [*arguments, *self._log_flags("router"), *self.router_flags]

    def _check_router_flags(self) -> None:
        """Raises LaunchError for a flag or variable that the router would refuse.

        It starts last, so that else one would hear of it when the servers have loaded their models. They look at their
        own flags at once.
        """
        try:
            RouterSettings.parse(self._router_arguments([]), {**os.environ, **self._environ()})
        except SettingsError as error:
            raise LaunchError(f"router: {error}") from None

    def _disk_flags(self, name: str, flags: list[str]) -> list[str]:
        """A directory for each server that computes prompts: two cannot share one."""
        if not self.kv_disk_path or "--no-allow-local-prefill" in (*self.server_flags, *flags):
            return []
        return ["--kv-disk-path", os.path.join(self.kv_disk_path, name)]

    def _log_flags(self, name: str) -> list[str]:
        """Each process has a file of its own: two that rotate the same one would take it from each other."""
        return ["--access-log-path", os.path.join(self.access_log_dir, f"{name}.log")] if self.access_log_dir else []

    def reopen_logs(self) -> None:
        """Has every process open its log file anew."""
        for process in self.processes:
            if process.listening:  # before that, SIGHUP would end it
                process.send_signal(signal.SIGHUP)

    def _say_ready(self, process: Process) -> None:
        places = f"HTTP {process.ready['http']}  gRPC {process.ready['grpc']}"
        self.say(f"  {process.name:<10} ready  {places}  pid {process.ready['pid']}")

    def supervise(self, stop: threading.Event) -> int:
        """Restarts what dies until `stop` is set. Returns 1 when a process keeps dying, else 0."""
        care = {process.name: _Care() for process in self.processes}
        while not stop.wait(WATCH_S):
            for process in self.processes:
                if not self._look_after(process, care[process.name]):
                    return 1
        return 0

    def _look_after(self, process: Process, care: _Care) -> bool:
        """One look at one process, without waiting; False when it is given up."""
        now = time.monotonic()
        if process.alive():
            if not care.announced and process.listening:
                care.announced = True
                self._say_ready(process)
            elif not care.announced and now - process.started_at > self.start_timeout_s:
                self.say(f"{process.name} was not ready within {self.start_timeout_s:.0f} s; ending it")
                process.send_signal(signal.SIGKILL)
            return True
        if care.next_start is None:
            ended = process.ending()
            if care.announced and now - process.started_at > STABLE_S:
                care.restarts = 0
            if care.restarts >= self.max_restarts:
                self.say(f"{ended}\n{process.name} has been started {care.restarts} times again; giving up")
                return False
            pause = RESTART_PAUSES_S[min(care.restarts, len(RESTART_PAUSES_S) - 1)]
            self.say(f"{ended}\nstarting {process.name} again in {pause:g} s")
            care.next_start = now + pause
        elif now >= care.next_start:
            care.restarts += 1
            care.next_start, care.announced = None, False
            process.start(self._environ(process.name))
        return True

    def stop(self, grace_s: float = 30.0, hurry: threading.Event | None = None) -> list[int]:
        """Drains the router, then the servers, all within `grace_s`; ends what is left. Returns the exit statuses.

        The router goes first, since its open streams need the servers. `hurry` cuts the grace short.
        """
        hurry = hurry or threading.Event()
        deadline = time.monotonic() + grace_s
        for group in ([self._router] if self._router is not None else [], self.servers):
            for process in group:
                process.send_signal(signal.SIGTERM)
            while any(process.alive() for process in group):
                if hurry.wait(WATCH_S / 4) or time.monotonic() > deadline:
                    break
        # A second SIGTERM is the fast exit of every server; SIGKILL is for one that ignores it.
        left = [process for process in self.processes if process.alive()]
        for process in left:
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + FAST_EXIT_S
        for process in left:
            if not process.wait(limit - time.monotonic()):
                process.send_signal(signal.SIGKILL)
                process.wait(FAST_EXIT_S)
        return [process.status for process in self.processes if process.status is not None]


def check_free(flag: str, host: str, port: int) -> None:
    """Raises LaunchError naming the flag when nothing can listen there; found out before any model is loaded."""
    if port == 0:
        return
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(f"{flag} {port}: cannot listen on {host}:{port} ({reason}); choose another one") from None
