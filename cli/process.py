"""One server process as its launcher sees it: started, watched for its ready line, its last words kept."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

MODULES = {"router": "router", "prefill": "prefill_server", "decode": "decode_server"}
LOG_LINES_KEPT = 40
LAST_WORDS_S = 1.0  # how long the last lines of a process that has ended are waited for
_PR_SET_PDEATHSIG = 1
_ROOT = str(Path(__file__).resolve().parents[1])
# Looked up here: a child between fork and exec must not take locks.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class LaunchError(Exception):
    """A process did not come up; one line with the cause it gave."""


class LaunchTimeout(LaunchError):
    """A process did not come up in time."""


class LaunchStopped(Exception):
    """The start was given up because a stop was asked for."""


class Process:
    """`start()`, then `check_ready()` until it is true and `ready` filled. Another `start()` takes its ports again.

    A child ends when the thread that started it ends, however that ends: it gets SIGTERM from the system.
    """

    def __init__(self, role: str, name: str, arguments: list[str], log: Callable[[str], None] | None = None) -> None:
        self.role = role
        self.name = name  # for people: prefill-0
        self.arguments = arguments
        self.ready: dict[str, Any] = {}
        self.child: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self._log = log
        self._listening = threading.Event()
        self._reader: threading.Thread | None = None
        self._tail: deque[str] = deque(maxlen=LOG_LINES_KEPT)

    def start(self, environ: Mapping[str, str] | None = None) -> None:
        """Starts the process; returns at once."""
        launcher = os.getpid()

        def die_with_launcher() -> None:
            if _libc is not None:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != launcher:  # it died before the system knew
                    os._exit(1)

        environment = {**os.environ, **(environ or {})}
        # The servers are the ones of this installation, whatever lies in the folder where the user stands.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
        environment["PYTHONSAFEPATH"] = "1"
        self._listening = threading.Event()
        self._tail.clear()
        self.started_at = time.monotonic()
        self.child = subprocess.Popen(
            [sys.executable, "-m", MODULES[self.role], *self.arguments, *self._same_ports()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then stops the children in order
            preexec_fn=die_with_launcher,
        )
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        out = threading.Thread(target=self._read_stdout, args=(self.child.stdout, self._listening), daemon=True)
        self._reader = threading.Thread(target=self._read_stderr, args=(self.child.stderr,), daemon=True)
        out.start()
        self._reader.start()

    def _same_ports(self) -> list[str]:
        """Flags for the ports of the start before; none before the first one was ready."""
        if not self.ready:
            return []
        if self.role == "router":
            return ["--port", _port(self.ready["http"]), "--grpc-port", _port(self.ready["grpc"])]
        same = ["--port", _port(self.ready["grpc"]), "--metrics-port", _port(self.ready["http"])]
        ports = [int(_port(address)) for address in self.ready["cache_store"]]
        # Those of several ranks are one after the other only if they were asked for; others are told the new ones
        if ports == list(range(ports[0], ports[0] + len(ports))):
            same += ["--cache-store-port", str(ports[0])]
        return same

    def _read_stdout(self, stream: IO[bytes], listening: threading.Event) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict) and message.get("event") == "ready":
                        self.ready = message
                        listening.set()

    def _read_stderr(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self._tail.append(line)
                if self._log is not None:
                    self._log(f"{self.name}: {line}")

    @property
    def listening(self) -> bool:
        """Whether this start's ready line has come."""
        return self._listening.is_set()

    def wait_listening(self, timeout_s: float) -> bool:
        """Waits for this start's ready line; False when it has not come within `timeout_s`."""
        return self._listening.wait(timeout_s)

    def check_ready(self, limit_s: float) -> bool:
        """Whether it listens.

        Raises LaunchError with its own last words when it never will, LaunchTimeout after `limit_s`.
        """
        if self.listening:
            return True
        if not self.alive():
            raise LaunchError(self.ending())
        if time.monotonic() - self.started_at > limit_s:
            raise LaunchTimeout(f"{self.name} was not ready within {limit_s:g} s: {self.last_words()}")
        return False

    def ending(self) -> str:
        """How it ended, in one line: status, the name of the signal if it was one, last words."""
        status = self.status
        name = ""
        if status is not None and status < 0:
            with contextlib.suppress(ValueError):  # of a real-time signal, which has none
                name = f" ({signal.Signals(-status).name})"
        return f"{self.name} ended with status {status}{name}: {self.last_words()}"

    def last_words(self) -> str:
        """What it said last that is an error of its log, or no log at all; else the last messages of its log.

        Lines of the access log are about requests, and say nothing of that.
        """
        if self._reader is not None and not self.alive():
            self._reader.join(LAST_WORDS_S)
        reasons: list[str] = []
        logged: list[str] = []
        for line in filter(None, map(str.strip, list(self._tail))):
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if not isinstance(entry, dict):
                reasons.append(line)
            elif "message" in entry and "log" not in entry:
                logged.append(str(entry["message"]))
                if entry.get("level") == "error":
                    reasons.append(logged[-1])
        return " | ".join(reasons[-1:] or logged[-3:]) or "it printed nothing"

    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.child.poll() if self.child is not None else None

    def send_signal(self, number: signal.Signals) -> None:
        if self.child is not None and self.alive():
            self.child.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended within `timeout_s`."""
        if self.child is None:
            return True
        try:
            self.child.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True


def _port(address: str) -> str:
    return address.rsplit(":", 1)[1]
