"""`baton health`: asks a process of this machine whether it is ready, as health checks of containers do.

Where it listens is read from the same variables that the process reads, so that a check need not repeat them:
`baton health decode` beside a decode server with BATON_METRICS_PORT=9200 asks port 9200. Only the standard library is
imported: this runs every few seconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Mapping

# role: the variable of the port that answers /ready, and its default
PORTS = {
    "router": ("BATON_PORT", 8000),
    "prefill": ("BATON_METRICS_PORT", 9101),
    "decode": ("BATON_METRICS_PORT", 9102),
}
LOOPBACK = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
MOST_BYTES = 1 << 20


class HealthError(Exception):
    """The process is not well; one line that says why."""


def address_of(role: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the process of this role answers, given its environment. Raises HealthError."""
    variable, default = PORTS[role]
    text = environ.get(variable, str(default))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise HealthError(f"{variable}={text!r} is no port that can be asked; name it by --address host:port")
    host = environ.get("BATON_HOST", "127.0.0.1")
    return LOOPBACK.get(host, host.strip("[]")), int(text)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises HealthError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise HealthError(f"--address {address!r} must have the form host:port, with a port from 1 to 65535")
    return LOOPBACK.get(host, host.strip("[]")), int(port)


def check(host: str, port: int, path: str, timeout_s: float) -> None:
    """Returns when `path` answers 200. Raises HealthError with the reasons that the process gave, or with the cause."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise HealthError(f"{where}{path}: no answer ({error or type(error).__name__})") from None
    finally:
        connection.close()
    if response.status != 200:
        raise HealthError(f"{where}{path}: status {response.status}{_reasons(body)}")


def _reasons(body: bytes) -> str:
    try:
        reasons = json.loads(body)["reasons"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f" ({'; '.join(map(str, reasons))})" if isinstance(reasons, list) else ""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton health", description="Status 0: the process is ready. Status 1: it is not.")
    p.add_argument("role", nargs="?", choices=sorted(PORTS), help="what runs here; its variables say where it listens")
    p.add_argument("--address", default="", metavar="HOST:PORT", help="of its HTTP side, in place of a role")
    p.add_argument("--live", action="store_true", help="ask only whether the process lives, ready or not")
    p.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="longest wait (default 3)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when the process is well, else 1 after one line on stderr; a mistake in the flags ends with 2."""
    p = parser()
    arguments = p.parse_args(argv)
    if bool(arguments.role) == bool(arguments.address):
        p.error("give a role or an --address")
    if not 0 < arguments.timeout <= 3600:
        p.error(f"--timeout {arguments.timeout:g} must be above 0 and at most 3600 seconds")
    try:
        host, port = split_address(arguments.address) if arguments.address else address_of(arguments.role, os.environ)
        check(host, port, "/live" if arguments.live else "/ready", arguments.timeout)
    except HealthError as error:
        print(f"baton health: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
