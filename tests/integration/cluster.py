"""A cluster of real processes on this machine: servers and a router on free ports, for integration tests.

    with Cluster(prefill=1, decode=1, model=folder) as cluster:
        cluster.router.http                     # "127.0.0.1:port"
        cluster.prefill[0].kill()               # SIGKILL
        cluster.assert_clean_ledgers()

Every wait has a deadline and says what it waited for. When the `with` body fails, the state of every process (ledger,
requests, end of its log) is printed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import httpx

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 100.0  # on a machine that others use, too; less than the limit of a test
STOP_LIMIT_S = 15.0
POLL_S = 0.01
MODULES = {"prefill": "prefill_server", "decode": "decode_server", "router": "router"}
SERVER_FLAGS = (
    "--port", "0", "--metrics-port", "0", "--cache-store-port", "0", "--threads", "1", "--dtype", "float32",
    "--num-kv-blocks", "64", "--drain-grace-secs", "0", "--drain-timeout-secs", "10",
    "--access-log-flush-interval-seconds", "0.05",
)  # fmt: skip
# On a machine that stands still for a while no server is taken for silent.
ROUTER_FLAGS = (
    "--port", "0", "--grpc-port", "0", "--drain-grace-secs", "0", "--drain-timeout-secs", "10",
    "--access-log-flush-interval-seconds", "0.05", "--health-check-timeout-secs", "10",
)  # fmt: skip

FIRST_PORT = 12000

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T | None], limit_s: float, poll_s: float = POLL_S) -> T:
    """The first true result of `probe`. Raises TimeoutError naming `what`."""
    limit = time.monotonic() + limit_s
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() >= limit:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(poll_s)


def process_exists(pid: int) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


@functools.cache
def _own_ports() -> Iterator[int]:
    """Ports below those that the kernel gives to whoever asks for any, other ones in each worker of a test run."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    workers = 16
    span = (low - FIRST_PORT) // workers
    if span < 100:
        raise RuntimeError(f"the kernel gives away all ports from {low} on; tests need some below that are their own")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    first, offset = FIRST_PORT + worker * span, random.SystemRandom().randrange(span)
    return (first + (offset + number) % span for number in itertools.count())


def free_port() -> int:
    """One that nobody listens at, and that no other process is given meanwhile, as happens to those that are asked for
    with port 0: also while the server that has it is started again."""
    for port in itertools.islice(_own_ports(), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("a thousand ports are in use")


class ServerProcess:
    """One server or router process. Output goes to files in `folder`."""

    def __init__(self, role: str, number: int, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.role = role
        self.name = f"{role}-{number}"
        self.argv = [sys.executable, "-m", MODULES[role], *argv]
        self._stdout = folder / f"{self.name}.out"
        self._stderr = folder / f"{self.name}.err"
        self.ready_line: dict[str, Any] = {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self.started = time.monotonic()
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                self.argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    # -- life --------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> ServerProcess:
        """Until the ready line was printed. A process that ends before it fails at once, with its log."""

        def probe() -> dict[str, Any] | None:
            for line in self._stdout.read_text().splitlines(keepends=True):
                if line.endswith("\n") and '"ready"' in line:
                    return dict(json.loads(line))
            if not self.alive:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode} at its start:\n{self.log(4000)}")
            return None

        try:
            self.ready_line = wait_for(f"ready line of {self.name}", probe, limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log(4000)}") from None
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.process.kill()
        self.process.wait(STOP_LIMIT_S)

    def terminate(self, limit_s: float = STOP_LIMIT_S) -> int:
        """SIGTERM, and waits for the drain; returns the exit status."""
        if self.alive:
            self.signal(signal.SIGTERM)
        return self.wait(limit_s)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Waits for the end; returns the exit status (negative: signal)."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} did not end within {limit_s:g} s\n{self.log(4000)}") from None

    # -- addresses and pages -----------------------------------------------------------------------------------

    @property
    def grpc(self) -> str:
        return str(self.ready_line["grpc"])

    @property
    def http(self) -> str:
        return str(self.ready_line["http"])

    @property
    def cache_store(self) -> list[str]:
        return list(self.ready_line["cache_store"])

    @property
    def engine_id(self) -> str:
        return str(self.ready_line["engine_id"])

    def get(self, path: str, timeout_s: float = 20.0) -> httpx.Response:
        # Without `verify` no store of certificates is read for each call, which takes longer than all the rest.
        return httpx.get(f"http://{self.http}{path}", timeout=timeout_s, verify=False)

    def page(self, path: str) -> Any:
        return self.get(path).raise_for_status().json()

    def ledger(self) -> list[dict[str, Any]]:
        """Block counts, one entry per rank and group."""
        page = self.page("/debug/ledger")
        return [{"rank": rank["rank"], **group} for rank in page["ranks"] for group in rank["groups"]]

    def requests(self) -> dict[str, Any]:
        """The `/debug/requests` page: `open` and `finished`, latest first."""
        return dict(self.page("/debug/requests"))

    def finished(self, request_id: str, limit_s: float = 30.0) -> dict[str, Any]:
        """The terminal record of a request, once it is there."""

        def probe() -> dict[str, Any] | None:
            found = self.requests()["finished"]
            return next((entry for entry in found if entry["request_id"] == request_id), None)

        return wait_for(f"record of {request_id} on {self.name}", probe, limit_s)

    def open_state(self, request_id: str) -> str | None:
        """State of an open request; None when it is not open."""
        found = self.requests()["open"]
        return next((entry["state"] for entry in found if entry["request_id"] == request_id), None)

    def has_open(self, request_ids: Iterable[str]) -> bool:
        """Whether all of these are open, beside whatever else is."""
        return set(request_ids) <= {entry["request_id"] for entry in self.requests()["open"]}

    def metrics(self) -> str:
        return self.get("/metrics").raise_for_status().text

    def metric(self, name: str, **labels: str) -> float | None:
        """Value of the one sample with this name whose labels include `labels`; None when there is none."""
        for line in self.metrics().splitlines():
            head, _, value = line.rpartition(" ")
            sample, _, text = head.partition("{")
            if sample == name and all(f'{key}="{value_}"' in text for key, value_ in labels.items()):
                return float(value)
        return None

    def counted(self, name: str, **labels: str) -> float:
        """As `metric`, and 0 for what has not happened yet."""
        return self.metric(name, **labels) or 0.0

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples with this name whose labels include `labels`."""
        found = 0.0
        for line in self.metrics().splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                found += float(value)
        return found

    @property
    def engine_pid(self) -> int:
        return int(self.page("/server_info")["engine_pid"])

    def channel(self) -> grpc.Channel:
        """A new gRPC channel; the caller closes it."""
        return grpc.insecure_channel(self.grpc)

    def log(self, tail: int = 0) -> str:
        """What the process wrote to stderr; the last `tail` characters, or all."""
        text = self._stderr.read_text(errors="replace")
        return text[-tail:] if tail else text

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """The JSON lines of the log."""
        for line in self.log().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                parsed = json.loads(line)
                if isinstance(parsed, dict):
                    yield parsed

    def describe(self) -> str:
        """State for a failed test."""
        state = "alive" if self.alive else f"ended with {self.process.returncode}"
        parts = [f"===== {self.name} pid {self.pid} {state}"]
        if self.alive and self.ready_line.get("http"):
            for path in ("/ready", "/debug/ledger", "/debug/requests") if self.role != "router" else ("/ready",):
                try:
                    text = self.get(path, 1.0).text
                except httpx.HTTPError as error:
                    text = repr(error)
                parts.append(f"--- {path}\n{text[:3000]}")
        parts.append(f"--- stderr\n{self.log(3000)}")
        return "\n".join(parts)


class Cluster:
    """Prefill and decode servers and, unless `router` is False, a router that knows them.

    `model` is a Hugging Face folder. Flags are appended to short defaults for tests (SERVER_FLAGS, ROUTER_FLAGS), so
    a later one wins. `env` is for every process, the others for those of one role; `BATON_FAULTS` arms fault points.
    With `wait` False the servers' ready lines are not waited for.
    """

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        model: str | Path,
        router: bool = True,
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        prefill_env: Mapping[str, str] | None = None,
        decode_env: Mapping[str, str] | None = None,
        router_env: Mapping[str, str] | None = None,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self.model = str(model)
        self.prefill: list[ServerProcess] = []
        self.decode: list[ServerProcess] = []
        self._router: ServerProcess | None = None
        self._counts = {"prefill": prefill, "decode": decode}
        self._with_router = router
        self._flags = {"prefill": list(prefill_flags), "decode": list(decode_flags), "router": list(router_flags)}
        common = dict(env or {})
        self._env = {
            "prefill": {**common, **(prefill_env or {})},
            "decode": {**common, **(decode_env or {})},
            "router": {**common, **(router_env or {})},
        }
        self._limit_s = start_limit_s
        self._started: list[ServerProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="baton-cluster-")
        # What the processes keep for a while is here too: apart from that of others, and gone with the cluster.
        self.temporary = Path(self._folder.name) / "tmp"
        self.temporary.mkdir()

    # -- life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        try:
            for role in ("prefill", "decode"):
                for _ in range(self._counts[role]):
                    self._start_server(role)
            for server in self.servers:
                server.wait_ready(self._limit_s)
            if self._with_router:
                self.start_router()
                self.wait_router_ready()
        except BaseException:
            self.end(failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(failed=kind is not None)

    def end(self, *, failed: bool) -> None:
        """Ends every process. `failed`: their state is printed."""
        if failed:
            for process in self._started:
                sys.stderr.write(process.describe() + "\n")
        engines = []
        for server in self.servers:
            if server.alive and server.ready_line:
                with contextlib.suppress(httpx.HTTPError, KeyError, TypeError):
                    engines.append(server.engine_pid)
        # The router first: it must not see its servers leave and complain.
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                process.process.send_signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                process.wait(STOP_LIMIT_S)
            except TimeoutError as error:
                sys.stderr.write(f"{error}\n")
                process.kill()
        for pid in engines:
            with contextlib.suppress(TimeoutError):
                wait_for(f"end of engine {pid}", lambda pid=pid: not process_exists(pid), 10.0)
            if process_exists(pid):
                sys.stderr.write(f"engine {pid} outlived its server\n")
                os.kill(pid, signal.SIGKILL)
        self._folder.cleanup()

    @property
    def servers(self) -> list[ServerProcess]:
        return [*self.prefill, *self.decode]

    @property
    def router(self) -> ServerProcess:
        if self._router is None:
            raise AssertionError("this cluster has no router")
        return self._router

    def _start(self, role: str, flags: Sequence[str], env: Mapping[str, str]) -> ServerProcess:
        number = sum(1 for process in self._started if process.role == role)
        process = ServerProcess(role, number, flags, {"TMPDIR": str(self.temporary), **env}, Path(self._folder.name))
        self._started.append(process)
        return process

    def _start_server(
        self, role: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> ServerProcess:
        # On these it can be started again. (Those of the cache stores of several ranks would have to be neighbours.)
        ports = ["--port", str(free_port()), "--metrics-port", str(free_port())]
        if "--tensor-parallel-size" not in (*self._flags[role], *flags):
            ports += ["--cache-store-port", str(free_port())]
        argv = ["--model", self.model, *SERVER_FLAGS, *ports, *self._flags[role], *flags]
        server = self._start(role, argv, {**self._env[role], **(env or {})})
        (self.prefill if role == "prefill" else self.decode).append(server)
        return server

    def start_prefill(self, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> ServerProcess:
        """One more prefill server, not waited for and unknown to a running router."""
        return self._start_server("prefill", flags, env)

    def start_decode(self, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> ServerProcess:
        """One more decode server, not waited for and unknown to a running router."""
        return self._start_server("decode", flags, env)

    def start_router(self, flags: Sequence[str] = (), among: Sequence[ServerProcess] | None = None) -> ServerProcess:
        """The router, which knows the servers that are ready by now, or those of them that are named; not waited for
        beyond its own ready line. A later one takes the place of an earlier one as `router`; both end with the
        cluster."""
        argv = ["--model", self.model, *ROUTER_FLAGS]
        for server in self.servers if among is None else among:
            argv += [f"--{server.role}", server.grpc] if server.ready_line else []
        self._router = self._start("router", [*argv, *self._flags["router"], *flags], self._env["router"])
        return self._router.wait_ready(self._limit_s)

    def restart(self, *ended: ServerProcess, flags: Sequence[str] = ()) -> ServerProcess:
        """New processes with the flags and on the ports of servers that have ended, started side by side; waits until
        all of them are ready. The last of them."""
        fresh = [self._start_again(server, flags) for server in ended]
        return [server.wait_ready(self._limit_s) for server in fresh][-1]

    def _start_again(self, server: ServerProcess, flags: Sequence[str]) -> ServerProcess:
        servers = self.prefill if server.role == "prefill" else self.decode
        position = servers.index(server)
        ports = {"--port": server.grpc, "--metrics-port": server.http}
        if len(server.cache_store) == 1:  # those of several ranks would have to be neighbours
            ports["--cache-store-port"] = server.cache_store[0]
        argv = [part for flag, address in ports.items() for part in (flag, address.rpartition(":")[2])]
        fresh = self._start_server(server.role, [*argv, *flags])
        servers.remove(fresh)
        servers[position] = fresh
        return fresh

    def wait_router_ready(self, limit_s: float = 30.0) -> None:
        """Until the router is ready and finds all servers ready that it knows.

        It is ready itself with the first pair, or with a decode server that computes prompts, too, and would send what
        comes then there.
        """

        def probe() -> bool:
            try:
                if self.router.get("/ready", 5.0).status_code != 200:
                    return False
                workers = self.router.total("baton_router_workers")
                return self.router.total("baton_router_workers", state="ready") == workers > 0
            except httpx.HTTPError:
                return False

        wait_for("readiness of the router and of its servers", probe, limit_s)

    def wait_workers_ready(self, limit_s: float = 30.0) -> None:
        """Until the router finds every living server ready."""
        wanted = {(server.role, server.grpc) for server in self.servers if server.alive}

        def ready() -> bool:
            workers = self.router.page("/workers")["workers"]
            return wanted <= {(worker["role"], worker["address"]) for worker in workers if worker["state"] == "ready"}

        wait_for("the router to find its servers ready", ready, limit_s)

    # -- ledgers -----------------------------------------------------------------------------------------------

    def dirty_ledgers(self) -> list[str]:
        """What keeps the ledgers of the living servers from being clean; empty when they are."""
        found = []
        for server in self.servers:
            if not server.alive:
                continue
            for counts in server.ledger():
                where = f"{server.name} rank {counts['rank']} group {counts['group']}"
                for state in ("running", "staged", "receiving", "quarantined"):
                    if counts[state]:
                        found.append(f"{where}: {state} = {counts[state]}")
                if counts["free"] + counts["cached"] != counts["total"]:
                    found.append(f"{where}: free {counts['free']} + cached {counts['cached']} != {counts['total']}")
        return found

    def assert_clean_ledgers(self, limit_s: float = 15.0) -> None:
        """On every living server running = staged = receiving = quarantined = 0 and free + cached = total, in time."""
        try:
            wait_for("clean ledgers", lambda: not self.dirty_ledgers(), limit_s)
        except TimeoutError:
            dirty = self.dirty_ledgers()
            if dirty:
                raise AssertionError(f"ledgers not clean after {limit_s:g} s: {'; '.join(dirty)}") from None

    # -- a part of it ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lent(
        self,
        prefill: Sequence[ServerProcess],
        decode: Sequence[ServerProcess],
        router_flags: Sequence[str] = (),
        router_env: Mapping[str, str] | None = None,
    ) -> Iterator[Cluster]:
        """Some of its servers with a router of their own, which has found all of them ready."""
        with Cluster(0, 0, model=self.model, router=False, router_flags=router_flags, router_env=router_env) as part:
            part.prefill, part.decode = list(prefill), list(decode)
            try:
                part.start_router()
                part.wait_workers_ready()
                yield part
            finally:
                part.prefill, part.decode = [], []  # each cluster ends the processes that it has started

    def errors_without_code(self) -> list[str]:
        """ERROR lines of the logs that carry no code: defects."""
        found = []
        for process in self._started:
            for line in process.log_lines():
                if line.get("level") in ("error", "critical") and "code" not in line:
                    found.append(f"{process.name}: {line.get('message')}")
        return found
