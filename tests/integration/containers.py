"""A service of a compose file as a container in all but name, where there is no Docker.

It runs its command as its image and the compose file say: with their environment, user, limits, volumes and published
ports, in network, PID, mount, IPC and UTS namespaces of its own (container_init.py) on a `Host`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.compose_file import Service
from tests.integration.dockerfile import Image
from tests.integration.virtual_host import HANDSHAKE_S, ROOT, Host, die_with_parent, ip_batch

INIT = Path(__file__).with_name("container_init.py")


@dataclass
class _Running:
    """One life of a container."""

    outer: subprocess.Popen[str]
    pid: int  # of its first process, as seen from outside
    address: str
    started: float


@dataclass
class Container:
    """A service as it runs: `state` is created, running or exited; `health` is starting, healthy or unhealthy."""

    service: Service
    image: Image
    host: Host
    volumes: Path  # folder of the named volumes
    folder: Path  # of its log and its root
    state: str = "created"
    health: str = "starting"
    status: int | None = None
    starts: int = 0
    last_check: str = ""
    _running: _Running | None = None
    _check: subprocess.Popen[str] | None = None
    _check_began: float = 0.0
    _next_check: float = 0.0
    _failures: int = 0
    _log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = self.folder / "log"
        self._log.touch()

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def pid(self) -> int:
        assert self._running is not None, f"{self.name} does not run"
        return self._running.pid

    @property
    def address(self) -> str:
        assert self._running is not None, f"{self.name} does not run"
        return self._running.address

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def environment(self) -> dict[str, str]:
        return {**self.image.environment, **self.service.environment}

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when its command runs, or has ended; raises RuntimeError when it could not be made."""
        service, host = self.service, self.host
        assert not (service.host_ipc or service.host_pid), f"{self.name}: these namespaces are not made here"
        address = host.address if service.host_network else host.next_address()
        with self._log.open("ab") as log:
            outer = subprocess.Popen(
                [sys.executable, "-I", "-S", str(INIT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        assert outer.stdin is not None and outer.stdout is not None
        outer.stdin.write(json.dumps(self._spec(address)) + "\n")
        outer.stdin.flush()
        self._expect(outer, "unshared")
        network = f"/proc/{outer.pid}/ns/net"
        if not service.host_network:
            host.connect(network, f"{address}/24", "eth0")
            ip_batch(network, f"route add default via {host.gateway}")
            host.names.addresses[self.name] = address
        outer.stdin.write("go\n")
        outer.stdin.flush()
        pid = int(self._expect(outer, "started").split()[1])
        self._running = _Running(outer, pid, address, time.monotonic())
        self.state, self.health, self.status = "running", "starting", None
        self.starts += 1
        self._failures = 0
        if service.health is not None:
            self._next_check = time.monotonic() + service.health.start_interval_s

    def _expect(self, outer: subprocess.Popen[str], word: str) -> str:
        assert outer.stdout is not None
        line = outer.stdout.readline()
        if not line.startswith(word):
            raise RuntimeError(f"{self.name}: no {word!r} but {line!r}\n{self.log()[-2000:]}")
        return line

    def _spec(self, address: str) -> dict[str, Any]:
        service, image = self.service, self.image
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        uid, gid = image.user
        mounts = [
            {"source": self._source(mount.source, mount.target) if mount.named else mount.source,
             "target": mount.target, "read_only": mount.read_only}
            for mount in service.mounts
        ]  # fmt: skip
        shared = {str(ROOT), sys.base_prefix, *([] if Path(sys.prefix).is_relative_to(ROOT) else [sys.prefix])}
        hosts = f"127.0.0.1 localhost\n{address} {service.name}\n"
        passwd = (
            f"root:x:0:0:root:/root:/bin/sh\nuser:x:{uid}:{gid}:user:{image.environment.get('HOME', '/')}:/bin/sh\n"
        )
        return {
            "root": str(root),
            "network": self.host.network if service.host_network else "",
            "hostname": service.name,
            "argv": [*image.entrypoint, *(image.command if service.command is None else service.command)],
            "environment": self.environment(),
            "uid": uid, "gid": gid,
            "workdir": image.workdir,
            "owned": list(image.owned),
            "shared": sorted(place for place in shared if not Path(place).is_relative_to("/usr")),
            # The image has its packages here, the test those of its own environment.
            "links": {"/opt/baton": sys.prefix} if image.entrypoint == ("baton",) else {},
            "mounts": mounts,
            "files": {
                "/etc/hosts": hosts,
                "/etc/resolv.conf": f"nameserver {self.host.gateway}\noptions ndots:0\n",
                "/etc/passwd": passwd,
                "/etc/group": f"root:x:0:\nuser:x:{gid}:\n",
                **{config.target: config.content for config in service.configs},
            },
            "ulimits": dict(service.ulimits),
            "shm_bytes": service.shm_bytes,
            "init": service.init,
            "drop_capabilities": "ALL" in service.cap_drop,
            "no_new_privileges": "no-new-privileges:true" in service.security_opt,
        }  # fmt: skip

    def _source(self, volume: str, target: str) -> str:
        """The folder of a named volume; a new one has the owner of the image's folder at its place, if there is one."""
        folder = self.volumes / volume
        if not folder.exists():
            folder.mkdir(parents=True)
        if target in self.image.owned and not any(folder.iterdir()):
            os.chown(folder, *self.image.user)
        return str(folder)

    def signal(self, number: int) -> None:
        """To its first process, as Docker does; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def processes(self) -> dict[int, str]:
        """Processes inside, by their number outside, with their command lines."""
        found = {}
        mine = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(entry / "ns/pid").st_ino == mine:
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def end(self) -> None:
        """Kills it and what belongs to it; a restart policy does not apply any more."""
        self._end_check()
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running.pid, signal.SIGKILL)
            self._running.outer.kill()
            self._running.outer.wait(HANDSHAKE_S)
            self._gone(self._running)

    def _gone(self, life: _Running) -> None:
        for stream in (life.outer.stdin, life.outer.stdout):
            if stream is not None:
                stream.close()
        if self.host.names.addresses.get(self.name) == life.address:
            del self.host.names.addresses[self.name]
        self._running = None
        self.state = "exited"

    def look(self) -> bool:
        """Notices an end, and runs the health check when it is due. Returns True when it has just ended."""
        if self._running is None:
            return False
        status = self._running.outer.poll()
        if status is not None:
            self._end_check()
            self.status = status
            self._gone(self._running)
            return True
        self._look_at_health()
        return False

    # -- health ----------------------------------------------------------------------------------------------------

    def _look_at_health(self) -> None:
        check, now = self.service.health, time.monotonic()
        if check is None or self._running is None:
            return
        if self._check is None:
            if now >= self._next_check:
                self._check = self.run(*check.test)
                self._check_began = now
            return
        status = self._check.poll()
        if status is None and now - self._check_began < check.timeout_s:
            return
        if status is None:
            self._check.kill()
        output = self._check.communicate(timeout=HANDSHAKE_S)[0]
        self._check = None
        self.last_check = f"status {status}: {output.strip()[-300:]}"
        starting = self.health == "starting" and now - self._running.started < check.start_period_s
        if status == 0:
            self.health, self._failures = "healthy", 0
        elif not starting:
            self._failures += 1
            if self._failures >= check.retries:
                self.health = "unhealthy"
        pause = check.start_interval_s if starting and status != 0 else check.interval_s
        self._next_check = time.monotonic() + pause

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.kill()
            self._check.communicate(timeout=HANDSHAKE_S)
            self._check = None

    def run(self, *words: str) -> subprocess.Popen[str]:
        """A command inside, as the container's user with its environment, like `docker exec`."""
        uid, gid = self.image.user
        environment = [f"{name}={value}" for name, value in self.environment().items()]
        command = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--ipc", "--uts", "--root",
                   "--wd", "--setgid", str(gid), "--setuid", str(uid), "env", "-i", *environment, *words]  # fmt: skip
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def call(self, *words: str, limit_s: float = 20.0) -> str:
        """Output of a command inside. Raises AssertionError when it fails."""
        process = self.run(*words)
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, f"{self.name}: {' '.join(words)}: {process.returncode}: {output}"
        return output

    def describe(self) -> str:
        return (
            f"===== {self.name}: {self.state}, {self.health}, status {self.status}, started {self.starts} times, "
            f"last check: {self.last_check}\n{self.log()[-3000:]}"
        )


def named_volume(folder: Path, name: str, content: Mapping[str, Path]) -> None:
    """Fills a named volume with copies of folders, readable for everybody."""
    for target, source in content.items():
        shutil.copytree(source, folder / name / target)
    for place in _tree(folder / name):
        place.chmod(0o755 if place.is_dir() else 0o644)


def _tree(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")
