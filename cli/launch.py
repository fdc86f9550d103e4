"""Starts and supervises the processes of a cluster on this machine.

Every process prints one JSON line on its standard output when it listens (`{"event": "ready", ...}`), which gives the
ports it got. A process that dies is started again on the same ports, with a growing pause, up to `max_restarts` times.
Children end when this process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PR_SET_PDEATHSIG = 1
RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
LOG_LINES_KEPT = 40


class LaunchError(Exception):
    """A process did not come up; the message holds the cause it gave."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Process:
    """One server: how to start it, and the running process."""

    role: str  # prefill, decode or router
    name: str  # for people: prefill-0
    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    log: Callable[[str], None] | None = None
    child: subprocess.Popen[bytes] | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES_KEPT))

    def start(self) -> None:
        """Starts the process; returns at once. A restart asks for the ports that the first start got."""
        module = {"router": "router", "prefill": "prefill_server", "decode": "decode_server"}[self.role]
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, *self.arguments, *self._port_flags()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.env},
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then stops the children in order
            preexec_fn=_die_with_parent,
        )
        threading.Thread(target=self._collect_log, args=(self.child,), daemon=True).start()

    def _port_flags(self) -> list[str]:
        if not self.ready:
            return []
        if self.role == "router":
            return ["--port", _port(self.ready["http"]), "--grpc-port", _port(self.ready["grpc"])]
        return [
            *("--port", _port(self.ready["grpc"])),
            *("--metrics-port", _port(self.ready["http"])),
            *("--cache-store-port", _port(self.ready["cache_store"][0])),
        ]

    def _collect_log(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        for raw in child.stderr:
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            if self.log is not None:
                self.log(f"{self.name}: {line}")

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the ready line. Raises LaunchError with the process's own last words."""
        assert self.child is not None and self.child.stdout is not None
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self.child.stdout], [], [], min(remaining, 0.2))
            if readable:
                line = self.child.stdout.readline()
                if line:
                    with contextlib.suppress(json.JSONDecodeError):
                        message = json.loads(line)
                        if isinstance(message, dict) and message.get("event") == "ready":
                            self.ready = message
                            threading.Thread(target=_drain, args=(self.child.stdout,), daemon=True).start()
                            return message
                    continue
            if self.child.poll() is not None:
                raise LaunchError(f"{self.name} ended with status {self.child.returncode}: {self.last_words()}")
        raise LaunchError(f"{self.name} was not ready within {timeout_s:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        return " | ".join(list(self.tail)[-3:]) or "it printed nothing"

    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def signal(self, number: int) -> None:
        if self.child is not None and self.alive():
            self.child.send_signal(number)


def _port(address: str) -> str:
    return address.rsplit(":", 1)[1]


def _drain(stream: Any) -> None:
    for _ in stream:
        pass


@dataclass
class Launcher:
    """Router, prefill and decode servers of one cluster."""

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
    start_timeout_s: float = 120.0
    max_restarts: int = len(RESTART_PAUSES_S)
    log: Callable[[str], None] | None = None
    say: Callable[[str], None] = print
    processes: list[Process] = field(default_factory=list)

    def start(self) -> None:
        """Starts the servers side by side, then the router. Raises LaunchError after stopping what had started."""
        servers = [self._server("prefill", i, self.prefill_flags) for i in range(self.prefill_servers)]
        servers += [self._server("decode", i, self.decode_flags) for i in range(self.decode_servers)]
        self.processes = list(servers)
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready(self.start_timeout_s)
                self.say(f"  {server.name:<10} ready  gRPC {server.ready['grpc']}  metrics {server.ready['http']}")
            router = self._router(servers)
            self.processes.append(router)
            router.start()
            router.wait_ready(self.start_timeout_s)
            self.say(f"  {router.name:<10} ready  HTTP {router.ready['http']}  gRPC {router.ready['grpc']}")
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def _server(self, role: str, index: int, flags: list[str]) -> Process:
        arguments = ["--model", self.model, "--host", "127.0.0.1", "--port", "0"]
        arguments += ["--metrics-port", "0", "--cache-store-port", "0", "--drain-grace-secs", "0"]
        return Process(role, f"{role}-{index}", [*arguments, *self.server_flags, *flags], log=self.log)

    def _router(self, servers: list[Process]) -> Process:
        arguments = ["--model", self.model, "--host", self.host, "--drain-grace-secs", "0"]
        arguments += ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        for server in servers:
            arguments += [f"--{server.role}", server.ready["grpc"]]
        return Process("router", "router", [*arguments, *self.router_flags], log=self.log)

    @property
    def router(self) -> Process:
        return self.processes[-1]

    def supervise(self, stop: threading.Event) -> int:
        """Restarts what dies until `stop` is set. Returns 1 when a process keeps dying, else 0."""
        while not stop.wait(0.2):
            for process in self.processes:
                if process.alive() or stop.is_set():
                    continue
                status = process.child.returncode if process.child else None
                if process.restarts >= self.max_restarts:
                    self.say(f"{process.name} ended again (status {status}): {process.last_words()}")
                    return 1
                pause = RESTART_PAUSES_S[process.restarts]
                self.say(f"{process.name} ended (status {status}); starting it again in {pause} s")
                process.restarts += 1
                if stop.wait(pause):
                    break
                process.start()
                try:
                    process.wait_ready(self.start_timeout_s)
                except LaunchError as error:
                    self.say(str(error))
        return 0

    def stop(self, grace_s: float = 30.0) -> list[int]:
        """SIGTERM to all, the router first; SIGKILL after `grace_s`. Returns the exit statuses."""
        for process in reversed(self.processes):
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        statuses = []
        for process in self.processes:
            if process.child is None:
                continue
            try:
                process.child.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # A second SIGTERM is the fast exit of every server; SIGKILL is for one that ignores it.
                process.signal(signal.SIGTERM)
                try:
                    process.child.wait(timeout=3.0)
                except subprocess.TimeoutExpired:
                    process.child.kill()
                    process.child.wait()
            statuses.append(process.child.returncode)
        return statuses
