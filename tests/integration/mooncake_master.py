"""A Mooncake master of a test, on free ports of this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from tests.integration.cluster import free_port
from tests.standstill import standing_still

START_S = 60.0  # on a machine that others use, too
ATTEMPTS = 5  # somebody else may take one of its ports before it does
CLIENT_TTL_S = 2  # after which the master forgets a client that says nothing, and what lay there


@cache
def why_not() -> str:
    """Why there can be no master here; empty if there can."""
    # In a process of its own: the library is native, and loads those of the system.
    loaded = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60)
    if loaded.returncode == 0:
        return ""
    return (
        f"Mooncake Store cannot be loaded ({loaded.stderr.strip().rpartition(chr(10))[2]}): install the extra "
        "`mooncake` and the Debian packages libibverbs1 librdmacm1 libnuma1 liburing2; `make test` as root does"
    )


def needs_mooncake() -> pytest.MarkDecorator:
    reason = why_not()
    return pytest.mark.skipif(bool(reason), reason=reason)


class MooncakeMaster:
    """`start` again after `kill` gives one with the same address and nothing in it."""

    def __init__(self, client_ttl_s: int = CLIENT_TTL_S) -> None:
        self.port = 0
        self._client_ttl_s = client_ttl_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`

    @property
    def address(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it listens."""
        for _ in range(ATTEMPTS):
            port = self.port or free_port()
            if self._started(port):
                self.port = port
                return
        raise AssertionError(f"no Mooncake master listens on port {port}:\n{self.log}")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing meanwhile, and its connections stay open."""
        process = self._process
        assert process is not None
        with standing_still(process.pid):
            yield

    def close(self) -> None:
        self.kill()
        self._log.close()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def _started(self, port: int) -> bool:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        program = Path(spec.origin).parent / "mooncake_master"
        metrics_port = free_port()
        process = self._process = subprocess.Popen(
            [
                str(program),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics_port}",
                "--rpc_thread_num=2",
                "--enable_metric_reporting=false",
                f"--client_ttl={self._client_ttl_s}",
                "--logtostderr",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        until = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                for listens in (metrics_port, port):
                    socket.create_connection(("127.0.0.1", listens), 1.0).close()
                return process.poll() is None
            time.sleep(0.01)
        self.kill()
        return False


@contextmanager
def running_master(client_ttl_s: int = CLIENT_TTL_S) -> Iterator[MooncakeMaster]:
    master = MooncakeMaster(client_ttl_s)
    try:
        master.start()
        yield master
    finally:
        master.close()


def alive(pid: int) -> bool:
    """Whether a process runs that is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def environment_of(pid: int) -> set[str]:
    """Names of the variables that a process was started with."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return {entry.partition("=")[0] for entry in text.split("\0") if entry}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
