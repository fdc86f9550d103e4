"""`baton status`: the servers of a running router, their load, and where their KV blocks are."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.client import ApiError, auth_headers, raise_api_error

TIMEOUT_S = 5.0  # for each page of the router
LEDGER_TIMEOUT_S = 2.0  # for each server's ledger; a server that hangs must not hide the others
PIPE_WIDTH = 200  # columns where no terminal says how many there are
NARROW = 120  # below it lines between the columns are left out, and the longest names cut
SHORT = {"running": "run", "receiving": "recv", "quarantined": "quar", "imbalance": "imbal"}
STATES = ("total", "free", "cached", "running", "staged", "receiving", "quarantined", "imbalance")
_COLOURS = {"ready": "green", "draining": "yellow", "unhealthy": "red", "incompatible": "red"}


class RouterUnreachable(Exception):
    """Nothing answers there, or it is no router; one line that names the address."""


@dataclass(frozen=True)
class Ledger:
    """Blocks of one cache group on one rank, by state; `total` is the sum of the states."""

    rank: int
    group: str
    blocks: dict[str, int]  # STATES, and reserved outside the total


@dataclass(frozen=True)
class Server:
    """One registered server. Counts are None until it has reported; `ledger_error` says why there is no ledger."""

    role: str
    address: str
    state: str
    reasons: list[str]
    breaker: str
    inflight: int  # requests that this router has open there
    running: int | None
    waiting: int | None
    loading: int | None
    uptime_seconds: float | None
    http_address: str
    ranks: int = 1  # engine processes that share its model
    ledger: list[Ledger] = field(default_factory=list)
    ledger_error: str = ""


@dataclass(frozen=True)
class RouterState:
    """The router itself. `inflight` and `queued` are client requests."""

    url: str
    version: str
    ready: bool
    reasons: list[str]
    models: list[str]
    inflight: int | None
    queued: int | None


@dataclass(frozen=True)
class ClusterStatus:
    router: RouterState
    servers: list[Server]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


async def read_status(base_url: str, api_key: str = "") -> ClusterStatus:
    """Asks the router for its servers, and each server for its ledger, all at once.

    Raises RouterUnreachable, or ApiError when the router refuses (API key).
    """
    headers = auth_headers(api_key)
    async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            pages = [client.get(base_url + path) for path in ("/workers", "/version", "/ready", "/v1/models", "/load")]
            workers, version, ready, models, load = await asyncio.gather(*pages)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RouterUnreachable(
                f"no router answers at {base_url} ({str(error) or type(error).__name__}); is --base-url right?"
            ) from None
    listed = _json(workers, base_url).get("workers")
    if not isinstance(listed, list):
        raise RouterUnreachable(f"{base_url}/workers is not a router's list of servers")
    waiting = _json(ready, base_url, also=503)
    figures = _json(load, base_url)
    router = RouterState(
        url=base_url,
        version=str(_json(version, base_url).get("version", "")),
        ready=bool(waiting.get("ready")),
        reasons=[str(reason) for reason in waiting.get("reasons", [])],
        models=[str(model["id"]) for model in _json(models, base_url).get("data", [])],
        inflight=figures.get("inflight"),
        queued=figures.get("queued"),
    )
    # Without the router's key: it is for the router alone.
    async with httpx.AsyncClient(timeout=LEDGER_TIMEOUT_S, trust_env=False) as client:
        servers = await asyncio.gather(*(_read_server(client, line) for line in listed))
    return ClusterStatus(router, list(servers))


def _json(response: httpx.Response, base_url: str, also: int = 200) -> dict[str, Any]:
    if response.status_code not in (200, also):
        raise_api_error(response.status_code, response.content)
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RouterUnreachable(f"{base_url}{response.request.url.path} is no page of a router")
    return found


async def _read_server(client: httpx.AsyncClient, line: Mapping[str, Any]) -> Server:
    status = line.get("status") or {}
    server = Server(
        role=str(line["role"]),
        address=str(line["address"]),
        state=str(line["state"]),
        reasons=[str(reason) for reason in line.get("reasons", [])],
        breaker=str(line.get("breaker", "")),
        inflight=int(line.get("inflight", 0)),
        running=status.get("running"),
        waiting=status.get("waiting"),
        loading=status.get("loading"),
        uptime_seconds=status.get("uptime_seconds"),
        http_address=str((line.get("facts") or {}).get("http_address", "")),
    )
    if not server.http_address:
        return dataclasses.replace(server, ledger_error="the server has not said where its pages are")
    try:
        response = await client.get(f"http://{server.http_address}/debug/ledger")
        response.raise_for_status()
        page = response.json()
        # Fresher than what the router was last told.
        [rank, *_] = page["ranks"]
        return dataclasses.replace(
            server,
            running=int(rank["running_requests"]),
            waiting=int(rank["waiting_requests"]),
            loading=int(rank["loading_requests"]),
            ranks=len(page["ranks"]),
            ledger=_ledgers(page),
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = f"{server.http_address}/debug/ledger: {str(error) or type(error).__name__}"
        return dataclasses.replace(server, ledger_error=reason)


def _ledgers(page: Mapping[str, Any]) -> list[Ledger]:
    return [
        Ledger(int(rank["rank"]), str(group["group"]), {name: int(group[name]) for name in (*STATES, "reserved")})
        for rank in page["ranks"]
        for group in rank["groups"]
    ]


def _table(title: str, narrow: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    if narrow:
        table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
    return table


def render(status: ClusterStatus, width: int = PIPE_WIDTH) -> Group:
    """The tables that are printed into so many columns: the router's line, servers, blocks."""
    narrow = width < NARROW
    router = status.router
    head = Text.assemble(
        ("router ", "bold"),
        router.url,
        "  ",
        ("ready", "green") if router.ready else ("not ready", "red"),
        f"  {', '.join(router.models) or 'no model known'}",
        f"  in flight {_count(router.inflight)}, queued {_count(router.queued)}  version {router.version}",
    )
    parts: list[Any] = [head, *(Text(f"  {reason}", "red") for reason in router.reasons)]
    if not status.servers:
        return Group(*parts, Text("no server is registered"))
    servers = _table("Servers", narrow)
    for name in ("role", "address", "state"):
        servers.add_column(name, no_wrap=True)
    several = any(server.ranks > 1 for server in status.servers)
    for name in (*(["ranks"] if several else []), "in flight", "running", "waiting", "loading", "up"):
        servers.add_column(name, justify="right", no_wrap=True)
    servers.add_column("reasons", overflow="fold")
    for server in status.servers:
        reasons = list(server.reasons)
        if server.breaker not in ("", "closed"):
            reasons.append(f"breaker {server.breaker.replace('_', '-')}")
        servers.add_row(
            server.role,
            server.address,
            Text(server.state, _COLOURS.get(server.state, "")),
            *([str(server.ranks)] if several else []),
            str(server.inflight),
            *(_count(count) for count in (server.running, server.waiting, server.loading)),
            _duration(server.uptime_seconds),
            "; ".join(reasons),
        )
    blocks = _table("KV blocks", narrow)
    for name in ("role", "address", "group"):
        blocks.add_column(name, no_wrap=True)
    for name in STATES:
        blocks.add_column(SHORT.get(name, name) if narrow else name, justify="right", no_wrap=True)
    for server in status.servers:
        if server.ledger_error:
            blocks.add_row(server.role, server.address, Text("?", "red"), *["-"] * len(STATES))
        for ledger in server.ledger:
            group = ledger.group if len({x.rank for x in server.ledger}) == 1 else f"{ledger.group} rank {ledger.rank}"
            counts = [Text(str(ledger.blocks[name])) for name in STATES]
            if ledger.blocks["imbalance"]:
                counts[-1].stylize("red")
            blocks.add_row(server.role, server.address, group, *counts)
    errors = [Text(f"no ledger of {s.address}: {s.ledger_error}", "red") for s in status.servers if s.ledger_error]
    return Group(*parts, servers, blocks, *errors)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton status", description=__doc__)
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="router (default http://127.0.0.1:8000)")
    p.add_argument("--api-key", default=os.environ.get("BATON_API_KEY", ""), help="default: BATON_API_KEY")
    p.add_argument("--json", action="store_true", help="one JSON object in place of tables; with --watch one a line")
    p.add_argument("--watch", type=float, metavar="SECONDS", help="show it again every so many seconds, until Ctrl-C")
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.watch is not None and not arguments.watch > 0:
        print(f"baton status: --watch {arguments.watch:g} must be above 0", file=sys.stderr)
        return 2
    base_url = arguments.base_url.rstrip("/").removesuffix("/v1")
    try:
        status = asyncio.run(read_status(base_url, arguments.api_key))
        if arguments.watch is not None:
            _watch(base_url, arguments, status)
        elif arguments.json:
            print(json.dumps(status.to_json(), indent=2))
        else:
            console = _console()
            console.print(render(status, console.width))
    except KeyboardInterrupt:
        return 0 if arguments.watch is not None else 130
    except (RouterUnreachable, ApiError) as error:
        print(f"baton status: {error}", file=sys.stderr)
        return 1
    return 0


def _console() -> Console:
    """As wide as the terminal, or as COLUMNS says; in a pipe or a file as wide as the tables need."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPE_WIDTH) if wide else Console()


def _watch(base_url: str, arguments: argparse.Namespace, status: ClusterStatus) -> None:
    """Until interrupted. A router that goes away later is shown as such, and comes back by itself."""
    if arguments.json:
        while True:
            print(json.dumps(status.to_json()), flush=True)
            time.sleep(arguments.watch)
            status = asyncio.run(read_status(base_url, arguments.api_key))
    console = _console()
    first = render(status, console.width)
    with Live(first, console=console, auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            time.sleep(arguments.watch)
            stamp = Text(f"{datetime.now():%H:%M:%S}, every {arguments.watch:g} s, Ctrl-C ends", "dim")
            try:
                shown = render(asyncio.run(read_status(base_url, arguments.api_key)), console.width)
                live.update(Group(shown, stamp), refresh=True)
            except RouterUnreachable as error:
                live.update(Group(Text(str(error), "red"), stamp), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
