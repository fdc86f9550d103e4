"""A machine beneath containers, where there is no Docker: a network namespace with a bridge, names, published ports.

Nothing of it outlives the test process: the namespaces have no names, only processes that the kernel kills with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.integration.tcp_proxy import TcpProxy

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNET = 0x40000000
HANDSHAKE_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


def unavailable() -> str:
    """Why containers cannot be made here; empty when they can."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "needs root on Linux: network and mount namespaces are made"
    missing = [name for name in ("ip", "nsenter", "unshare", "env") if shutil.which(name) is None]
    if missing:
        return f"needs the programs {', '.join(missing)}"
    if ROOT.stat().st_mode & 0o005 != 0o005:
        return f"{ROOT} must be readable for everybody: containers run as a user without rights"
    script = (
        "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && ip link set v0 master br0"
        " && mount -t tmpfs none /mnt"
    )
    command = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "sh", "-c", script]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return f"the kernel refuses: {tried.stderr.strip()[:300]}" if tried.returncode else ""


def die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)


def enter_network(path: str) -> None:
    """Moves the calling thread into the network namespace."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(descriptor)


def ip_batch(network: str, *commands: str) -> None:
    """Runs `ip` commands in a network namespace. Raises RuntimeError with what `ip` says."""
    text = "\n".join(commands) + "\n"
    command = ["nsenter", f"--net={network}", "ip", "-batch", "-"]
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=20, check=False)
    if ended.returncode:
        raise RuntimeError(f"ip: {ended.stderr.strip()}\n{text}")


class Names:
    """A name server for the containers of one host: names of those that run lead to their address, others nowhere."""

    def __init__(self, network: str, address: str) -> None:
        self.addresses: dict[str, str] = {}
        self.asked: set[str] = set()
        self._network, self._address = network, address
        self._socket: socket.socket | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="names", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._started.wait(HANDSHAKE_S) or self._socket is None:
            raise RuntimeError("the name server did not start")

    def stop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(HANDSHAKE_S)
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        try:
            enter_network(self._network)
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind((self._address, 53))
        finally:
            self._started.set()
        while True:
            try:
                query, sender = self._socket.recvfrom(4096)
            except OSError:
                return
            if not query:
                return
            with contextlib.suppress(OSError, IndexError, struct.error):
                self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        labels, position = [], 12
        while length := query[position]:
            labels.append(query[position + 1 : position + 1 + length].decode("ascii", "replace").lower())
            position += 1 + length
        (kind,) = struct.unpack_from("!H", query, position + 1)
        name, question = ".".join(labels), query[12 : position + 5]
        self.asked.add(name)
        address = self.addresses.get(name)
        answers = 1 if address and kind == 1 else 0
        flags = 0x8580 if address else 0x8583  # NXDOMAIN for a name that nobody has
        head = query[:2] + struct.pack("!HHHHH", flags, 1, answers, 0, 0)
        if not answers:
            return head + question
        assert address is not None
        return head + question + struct.pack("!HHHIH", 0xC00C, 1, 1, 600, 4) + socket.inet_aton(address)


class Host:
    """A machine: a network namespace with a bridge at `subnet`.1, a name server, and published ports.

    `lan` connects it to a network of several hosts, with the address given there.
    """

    def __init__(self, subnet: str = "172.31.77", lan: tuple[Host, str] | None = None) -> None:
        self.subnet = subnet
        self.gateway = f"{subnet}.1"
        self.proxies: dict[int, TcpProxy] = {}
        self._addresses = itertools.count(2)
        self._lan = lan
        self.address = lan[1] if lan else self.gateway
        self._holder: subprocess.Popen[bytes] | None = None
        self.names = Names("", "")

    @property
    def holder(self) -> int:
        """The process that the namespace lives with."""
        assert self._holder is not None
        return self._holder.pid

    @property
    def network(self) -> str:
        return f"/proc/{self.holder}/ns/net"

    def __enter__(self) -> Host:
        # `cat` ends with its input, which ends with this process.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        own = os.stat("/proc/self/ns/net").st_ino
        deadline = time.monotonic() + HANDSHAKE_S
        while os.stat(self.network).st_ino == own:
            if time.monotonic() > deadline:
                raise TimeoutError("a network namespace was not made")
            time.sleep(0.002)
        ip_batch(
            self.network,
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {self.gateway}/24 dev br0",
            "link set br0 up",
        )
        if self._lan is not None:
            self._lan[0].connect(self.network, f"{self._lan[1]}/24", "lan0")
        self.names = Names(self.network, self.gateway)
        self.names.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        self.proxies.clear()
        self.names.stop()
        assert self._holder is not None and self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.kill()
        self._holder.wait(HANDSHAKE_S)

    def next_address(self) -> str:
        return f"{self.subnet}.{next(self._addresses)}"

    def connect(self, network: str, address: str, device: str) -> None:
        """A cable from this host's bridge to a device of another namespace."""
        name = f"v{next(_numbers)}"
        peer = network.split("/")[2]
        ip_batch(
            self.network,
            f"link add {name} type veth peer name {device} netns {peer}",
            f"link set {name} master br0",
            f"link set {name} up",
        )
        ip_batch(network, f"addr add {address} dev {device}", f"link set {device} up", "link set lo up")

    def publish(self, port: int, target: Callable[[], tuple[str, int] | None]) -> TcpProxy:
        """A port of 127.0.0.1 outside that leads to a container; a free one outside stands for the published one."""
        proxy = TcpProxy(("127.0.0.1", 0), target, enter=lambda: enter_network(self.network))
        proxy.__enter__()
        self.proxies[port] = proxy
        return proxy
