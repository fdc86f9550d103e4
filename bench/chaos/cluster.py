"""The cluster under fire: its processes, the blows at them, and what they say about themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.faults import Blow, Kind, armament
from cli.launch import DENSE_MEMORY, SHARED_CORES
from cli.process import LaunchError, Process
from rpc.faults import POINT_RAISED

RUN_VARIABLE = "BATON_CHAOS_RUN"  # by it every process of a campaign is known, whoever its parent is
POLL_S = 0.1
START_LIMIT_S = 120.0
DEATH_LIMIT_S = 15.0  # of a front whose engine has died, and of an engine whose front has
DRAIN_LIMIT_S = 30.0
STARTS_TRIED = 5  # an armed start may fail
PAGE_S = 5.0
LINES_KEPT = 60
_LOADS = re.compile(
    r'^baton_kv_transfer_seconds_count\{(?=[^}]*outcome="ok")[^}]*transport="(\w+)"[^}]*\} (\S+)$', re.MULTILINE
)
# A pool of 4,096 tokens, what is evicted from it in host memory, what has no room there on disk: a server that starts
# again finds its blocks. A prompt waits less for them than its client does.
TIER_FLAGS = (
    "--kv-host-bytes", "2MiB", "--kv-disk-bytes", "64MiB", "--kv-tier-min-tokens", "16", "--kv-tier-timeout-ms", "500",
)  # fmt: skip
# Failures are noticed fast, and what was given up is tried again soon: a campaign is short.
SERVER_FLAGS = (
    "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0", "--cache-store-port", "0", "--drain-grace-secs", "0",
    "--drain-timeout-secs", "10", "--threads", "1", "--dtype", "float32", "--load-cache-timeout-ms", "2000",
    "--num-kv-blocks", "256", "--kv-lease-seconds", "6",
)  # fmt: skip
ROUTER_FLAGS = (
    "--host", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--drain-grace-secs", "0", "--allow-pins",
    "--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "2",
    "--health-success-threshold", "1", "--cb-timeout-duration-secs", "3", "--reserve-timeout-secs", "5",
    "--stream-inactivity-timeout-secs", "10", "--retry-budget-ratio", "0.5",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What is started. `folder`: of the logs. `temporary`: of what processes keep for a while; its path is short, since
    sockets lie in it."""

    model: str
    folder: Path
    temporary: Path
    run_id: str
    seed: int
    kinds: frozenset[Kind]
    prefill_servers: int = 2
    decode_servers: int = 2
    request_timeout_s: float = 30.0
    server_flags: Sequence[str] = ()
    prefill_flags: Sequence[str] = ()
    decode_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    transports: Sequence[str] = ("auto",)  # of the decode servers, which take the next ones at each start
    intensity: float = 1.0  # factor of the chances of fault points
    tiers: bool = True  # below the KV pool of every server: host memory and a directory of its own
    extra_faults: str = ""  # BATON_FAULTS of all processes beside those of the kinds

    def transport_of(self, index: int, starts: int) -> str:
        """Of decode server `index` at its start number `starts`, from 1: together they go through all of them."""
        return self.transports[((starts - 1) * self.decode_servers + index) % len(self.transports)]

    def has_points(self, role: str, index: int, starts: int) -> bool:
        """Whether a process has fault points at its start number `starts`. Prefill servers have every second time: with
        any, what happens at once does not travel together as it does otherwise (`cache_store.serving.sending`)."""
        return role != "prefill" or (index + starts) % 2 == 1

    @property
    def turns(self) -> int:
        """How often each decode server has to start again until each transport was had."""
        return -(-len(self.transports) // self.decode_servers) - 1


@dataclass
class Member:
    """A process, and what the campaign knows about it."""

    process: Process
    arguments: list[str] = field(default_factory=list)
    starts: int = 0
    failed_starts: int = 0
    busy: bool = False  # a blow at it is not over
    engine_pid: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def role(self) -> str:
        return self.process.role

    @property
    def pid(self) -> int:
        return self.process.child.pid if self.process.child is not None else 0


class ChaosCluster:
    """Belongs to one event loop, whose thread starts the processes: they end with it."""

    def __init__(self, layout: Layout, say: Callable[[str], None]) -> None:
        self.layout = layout
        self.members: list[Member] = []
        self.hits: Counter[tuple[str, str]] = Counter()  # (point, action) of armed points
        self.errors_without_code: list[str] = []
        self.defects: list[str] = []  # what a process did that none may do
        self.recoveries: list[tuple[float, str]] = []  # seconds from a blow to readiness in the router's eyes
        self._loads: dict[tuple[str, int, str], int] = {}
        self._say = say
        self._client = httpx.AsyncClient(timeout=PAGE_S, verify=False)
        self._file = layout.temporary / "faults"  # as long as it is there, fault points are in force

    # ---- life

    async def start(self) -> None:
        """Starts everything; no fault is in force yet. Raises LaunchError."""
        layout = self.layout
        for role, count in (("prefill", layout.prefill_servers), ("decode", layout.decode_servers)):
            for index in range(count):
                name = f"{role}-{index}"
                arguments = ["--model", layout.model, *SERVER_FLAGS]
                if layout.tiers:
                    arguments += [*TIER_FLAGS, "--kv-disk-path", str(layout.temporary / "kv" / name)]
                arguments += [
                    *layout.server_flags,
                    *(layout.prefill_flags if role == "prefill" else layout.decode_flags),
                ]
                self._add(role, name, arguments)
        for member in self.servers:
            self._start(member)
        for member in self.servers:
            await self._wait_listening(member)
        arguments = ["--model", layout.model, *ROUTER_FLAGS, "--request-timeout-secs", f"{layout.request_timeout_s:g}"]
        for member in self.servers:
            arguments += [f"--{member.role}", member.process.ready["grpc"]]
        self._add("router", "router", [*arguments, *layout.router_flags])
        self._start(self.router)
        await self._wait_listening(self.router)
        await self.wait_ready(START_LIMIT_S)

    def arm(self) -> None:
        """From now on fault points are in force, in every process."""
        self._file.touch()

    def disarm(self) -> None:
        self._file.unlink(missing_ok=True)

    def _add(self, role: str, name: str, arguments: list[str]) -> None:
        member = Member(Process(role, name, arguments), arguments)
        log = (self.layout.folder / f"{name}.log").open("a", buffering=1)

        def take(line: str) -> None:
            log.write(line + "\n")
            self._take_line(member, line.partition(": ")[2])

        member.process = Process(role, name, arguments, take)
        self.members.append(member)

    def _start(self, member: Member) -> None:
        layout = self.layout
        member.starts += 1
        seed = layout.seed * 1000 + member.starts * 10 + self.members.index(member)
        index = 0 if member.role == "router" else self._of(member.role).index(member)
        own_faults = ""
        if layout.has_points(member.role, index, member.starts):
            own_faults = armament(member.role, layout.kinds, seed, self._file, layout.intensity)
        extra = [f"{fault},while={self._file}" for fault in filter(None, layout.extra_faults.split(";"))]
        own = SHARED_CORES | DENSE_MEMORY | {"OMP_NUM_THREADS": "1"}
        environment = {key: value for key, value in own.items() if key not in os.environ}
        environment |= {
            RUN_VARIABLE: layout.run_id,
            "TMPDIR": str(layout.temporary),
            "BATON_FAULTS": ";".join(filter(None, (own_faults, *extra))),
        }
        if member.role == "decode":
            transport = layout.transport_of(index, member.starts)
            member.process.arguments = [*member.arguments, "--kv-transport", transport]
        member.process.start(environment)

    async def _wait_listening(self, member: Member) -> None:
        await _until(lambda: member.process.check_ready(START_LIMIT_S), START_LIMIT_S + 1.0)
        if member.role != "router":
            page = await self.page(member, "/server_info")
            member.engine_pid = int(page["engine_pid"])

    async def bring_up(self, member: Member) -> None:
        """Starts a process that has ended on the address that it had. Raises LaunchError when it never comes."""
        for attempt in range(STARTS_TRIED):
            self._start(member)
            try:
                await self._wait_listening(member)
                return
            except (LaunchError, httpx.HTTPError) as error:
                member.failed_starts += 1
                await self._end(member, signal.SIGKILL)
                if attempt == STARTS_TRIED - 1:
                    raise LaunchError(f"{member.name} did not start {STARTS_TRIED} times running: {error}") from error

    async def _end(self, member: Member, number: signal.Signals) -> None:
        """Sends the signal and waits for the end of the process, which is killed when it does not come."""
        process = member.process
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        if not await _until(lambda: not process.alive(), DRAIN_LIMIT_S):
            self.defects.append(f"{member.name} did not end within {DRAIN_LIMIT_S:g} s of {number.name}")
            process.send_signal(signal.SIGKILL)
            await _until(lambda: not process.alive(), DEATH_LIMIT_S)
        engine, member.engine_pid = member.engine_pid, 0
        if engine and not await _until(lambda: not exists(engine), DEATH_LIMIT_S):
            self.defects.append(f"the engine of {member.name} outlived its front")
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    async def stop(self) -> None:
        """Ends everything. Afterwards nothing of the campaign runs; what did is booked as a defect."""
        for member in reversed(self.members):
            for pid in (member.pid, member.engine_pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if pid and (pid != member.pid or member.process.alive()):
                        os.kill(pid, signal.SIGCONT)
        for role in ("router", "decode", "prefill"):  # whoever calls others before those who are called
            ending = (self._end(member, signal.SIGTERM) for member in self.members if member.role == role)
            await asyncio.gather(*ending)
        await self._client.aclose()
        if not await _until(lambda: not list(self.processes_of_run()), DEATH_LIMIT_S):
            for pid in self.processes_of_run():
                self.defects.append(f"process {pid} outlived the campaign: {_command_line(pid)}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes_of_run(self) -> Iterator[int]:
        """All processes, but this one, that carry the campaign's mark in their environment."""
        mark = f"{RUN_VARIABLE}={self.layout.run_id}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0") and exists(int(entry.name)):
                        yield int(entry.name)

    @property
    def servers(self) -> list[Member]:
        return [member for member in self.members if member.role != "router"]

    @property
    def router(self) -> Member:
        return next(member for member in self.members if member.role == "router")

    def _of(self, role: str) -> list[Member]:
        return [member for member in self.servers if member.role == role]

    def member(self, role: str, index: int) -> Member:
        return self._of(role)[index]

    # ---- blows

    async def strike(self, blow: Blow) -> bool:
        """Deals the blow and sees the process through to its new life. False: it lies on the ground already, or is the
        last of its role that does not."""
        peers = self._of(blow.role)
        standing = [each for each in peers if not each.busy and each.process.alive() and each.engine_pid]
        member = peers[blow.index]
        if member not in standing or (len(standing) == 1 < len(peers) and not blow.last_too):
            return False
        member.busy = True
        began = time.monotonic()
        try:
            if blow.kind is Kind.PAUSE:
                await self._pause(member, blow)
            else:
                await self._fell(member, blow)
            await self._until_used(member)
            self.recoveries.append((time.monotonic() - began - blow.lasts_s, f"{blow.kind} {blow.part} {member.name}"))
        finally:
            member.busy = False
        return True

    async def _pause(self, member: Member, blow: Blow) -> None:
        pid = member.pid if blow.part == "front" else member.engine_pid
        try:
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(blow.lasts_s)
            finally:
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it ended of something else
        if not member.process.alive():
            await self._revive(member)

    async def _fell(self, member: Member, blow: Blow) -> None:
        if blow.kind is Kind.RESTART:
            await self._end(member, signal.SIGTERM)
        elif blow.part == "front":
            await self._end(member, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.engine_pid, signal.SIGKILL)
            if not await _until(lambda: not member.process.alive(), DEATH_LIMIT_S):
                self.defects.append(f"the front of {member.name} outlived its engine by {DEATH_LIMIT_S:g} s")
            await self._end(member, signal.SIGKILL)
        await asyncio.sleep(blow.lasts_s)
        await self.bring_up(member)

    async def _revive(self, member: Member) -> None:
        await self._end(member, signal.SIGKILL)
        await self.bring_up(member)

    async def look_after(self) -> None:
        """Starts what has ended by itself; returns when cancelled."""
        while True:
            for member in self.servers:
                if not member.busy and not member.process.alive():
                    member.busy = True
                    try:
                        words = member.process.last_words()
                        self._say(f"{member.name} ended with {member.process.status}: {words}")
                        # A fault point may end an engine: one of several ranks that fails in a step.
                        if POINT_RAISED not in words:
                            self.defects.append(f"{member.name} ended by itself with {member.process.status}: {words}")
                        await self._revive(member)
                    finally:
                        member.busy = False
            await asyncio.sleep(POLL_S)

    # ---- what they say

    async def page(self, member: Member, path: str) -> Any:
        response = await self._client.get(f"http://{member.process.ready['http']}{path}")
        return response.raise_for_status().json()

    async def note_loads(self) -> None:
        """Books how many loads each decode server has completed, by transport, since its start."""
        for member in self.servers:
            if member.role != "decode" or not member.engine_pid or not member.process.alive():
                continue
            with contextlib.suppress(httpx.HTTPError):
                response = await self._client.get(f"http://{member.process.ready['http']}/metrics")
                for transport, count in _LOADS.findall(response.text):
                    self._loads[member.name, member.pid, transport] = int(float(count))

    def loads(self) -> Counter[str]:
        """Completed loads by transport, as far as they were seen: those right before a kill are not."""
        found: Counter[str] = Counter()
        for (_, _, transport), count in self._loads.items():
            found[transport] += count
        return found

    async def post(self, member: Member, path: str) -> Any:
        response = await self._client.post(f"http://{member.process.ready['http']}{path}")
        return response.raise_for_status().json()

    async def _used(self, member: Member) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            workers = (await self.page(self.router, "/workers"))["workers"]
            address = member.process.ready["grpc"]
            return any(worker["address"] == address and worker["state"] == "ready" for worker in workers)
        return False

    async def _until_used(self, member: Member) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not await self._used(member):
            if not member.process.alive():
                await self._revive(member)
            if time.monotonic() > limit:
                self.defects.append(f"the router does not use {member.name}, which is up again")
                return
            await asyncio.sleep(POLL_S)

    async def wait_ready(self, limit_s: float) -> None:
        """Until the router has every server. Raises LaunchError."""
        limit = time.monotonic() + limit_s
        for member in self.servers:
            while not await self._used(member):
                if time.monotonic() > limit:
                    raise LaunchError(f"the router does not find {member.name} ready within {limit_s:g} s")
                await asyncio.sleep(POLL_S)

    async def dirty_ledgers(self) -> list[str]:
        """What keeps the ledgers of the servers from being those of a cluster at rest; empty when they are."""
        found = []
        for member in self.servers:
            try:
                page = await self.page(member, "/debug/ledger")
                opened = (await self.page(member, "/debug/requests"))["open"]
            except httpx.HTTPError as error:
                found.append(f"{member.name}: no answer ({error!r})")
                continue
            for rank in page["ranks"]:
                for counts in rank["groups"]:
                    where = f"{member.name} rank {rank['rank']} group {counts['group']}"
                    held = ("running", "staged", "receiving", "quarantined")
                    found += [f"{where}: {state} = {counts[state]}" for state in held if counts[state]]
                    if counts["free"] + counts["cached"] != counts["total"]:
                        found.append(f"{where}: free {counts['free']} + cached {counts['cached']} != {counts['total']}")
            found += [f"{member.name}: request {entry['request_id']} is open ({entry['state']})" for entry in opened]
        return found

    async def describe(self) -> str:
        """State of everything, for whoever has to find out why."""
        parts = []
        for member in self.members:
            state = "alive" if member.process.alive() else f"ended with {member.process.status}"
            parts.append(f"===== {member.name} pid {member.pid} engine {member.engine_pid} {state}")
            paths = (
                ("/ready", "/workers", "/load")
                if member.role == "router"
                else ("/ready", "/debug/ledger", "/debug/requests")
            )
            for path in paths if member.process.alive() and member.process.ready else ():
                try:
                    text = json.dumps(await self.page(member, path))
                except (httpx.HTTPError, ValueError) as error:
                    text = repr(error)
                parts.append(f"--- {path}\n{text[:4000]}")
            parts.append("--- last lines of its log\n" + "\n".join(member.lines))
        return "\n".join(parts)

    def _take_line(self, member: Member, line: str) -> None:
        member.lines.append(line)
        try:
            entry = json.loads(line)
        except ValueError:
            if line.startswith("Traceback"):
                self.errors_without_code.append(f"{member.name}: {line}")
            return
        if not isinstance(entry, dict):
            return
        if "fault" in entry and entry.get("message") == "fault point hit":
            self.hits[str(entry["fault"]), str(entry.get("action"))] += 1
        if entry.get("level") in ("error", "critical") and "code" not in entry:
            self.errors_without_code.append(f"{member.name}: {entry.get('message')}")


async def _until(probe: Callable[[], bool], limit_s: float) -> bool:
    """True as soon as `probe` is, False after `limit_s`."""
    limit = time.monotonic() + limit_s
    while not probe():
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(POLL_S / 4)
    return True


def exists(pid: int) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone"
