"""How long processes that load no model need until they listen."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

LIMIT_S = 30.0
POLL_S = 0.005


class StartFailed(Exception):
    """The process ended, or did not listen in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_seconds(module: str, model_folder: str) -> float:
    """From starting `python -m module` to its first answer on /live. Fronts answer while their engine still loads."""
    port = free_port()
    flags = ["--port", "0", "--metrics-port", str(port)]
    flags += ["--grpc-port", "0"] if module == "router" else ["--cache-store-port", "0"]
    start = time.monotonic()
    with _running([sys.executable, "-m", module, "--model", model_folder, *flags]) as child:
        while time.monotonic() - start < LIMIT_S:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/live", timeout=1.0).status_code == 200:
                    return time.monotonic() - start
            if child.poll() is not None:
                raise StartFailed(f"{module} ended with status {child.returncode}")
            time.sleep(POLL_S)
    raise StartFailed(f"{module} did not listen within {LIMIT_S:g} s")


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
