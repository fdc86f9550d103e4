"""One NIXL agent: registered memory, peers whose memory it can read, and reads under way. For one thread.

What the library (tried: 1.5) promises less than its names say, and what is done about it:

* Releasing a transfer that is under way reports success, and so does forgetting its peer; its bytes are written
  nevertheless. So neither is done before the transfer's own state is final.
* What it has taken in of metadata that are damaged near their end stays, and whole ones of that agent are refused.
* A transfer that failed is reported with its first failing part. The others are given SETTLE_S to be thrown away.
* Its progress thread spins unless it is given a delay; with one, it sleeps until there is something to do.
* A read in host memory is a copy by the thread that begins it, unless the backend has threads of its own: then they
  share its descriptors. (Not on a device, whose driver these threads would have to be made known to.)
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import logging.config
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_store.memory.lease_words import WORD_BYTES

# The first is a package without a library of its own, which picks one of the others by the CUDA version of PyTorch.
PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
BACKEND = "UCX"
PROGRESS_DELAY_US = 1_000_000
MOST_THREADS = 4
SETTLE_S = 1.0
_PROBE_BYTES = 64
_LOOKS = 1024  # at words of peers, at once
_NAME_MARK = b"nixlSerDes|Agent"

# The library reports on stderr what is said by its answers already.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}

_log = logging.getLogger(__name__)


class NixlProblem(Exception):
    """The library refuses or fails; the text says what."""


class NixlAbsent(NixlProblem):
    """It is not installed."""


def installed() -> bool:
    """Whether one of its packages is there, which costs no import."""
    return any(importlib.util.find_spec(name) is not None for name in PACKAGES)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """The package sets up the logging of the whole process when it is imported; this keeps that as it is."""
    configure, raise_exceptions = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raise_exceptions


def load_bindings() -> Any:
    """The library's module. Raises NixlAbsent, or NixlProblem for one that cannot be loaded."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            continue
        try:
            with _own_logging():
                importlib.import_module(package)
                return importlib.import_module(f"{package}._bindings")
        except Exception as error:
            raise NixlProblem(f"{package} cannot be loaded: {error}") from error
    raise NixlAbsent(f"none of the packages {', '.join(PACKAGES)} is installed")


@dataclass(eq=False)
class _Known:
    """A peer's agent, as far as the library knows it; used by those who have opened its memory."""

    name: bytes
    agent: bytes
    users: int = 0
    broken: bool = False
    under_way: int = 0


@dataclass(frozen=True)
class TheirMemory:
    """A peer's: address and bytes of each layer, in host memory or on its CUDA device `device`, and of the words of its
    leases, in host memory (0 bytes: there are none)."""

    on_device: bool
    device: int
    layers: Sequence[tuple[int, int]]
    words: tuple[int, int]


@dataclass(eq=False)
class _Opened:
    known: _Known
    kind: Any
    device: int
    memory: TheirMemory


@dataclass(eq=False)
class _Transfer:
    known: _Known
    handle: int
    then: Callable[[str], None]
    until: float | None = None  # of a first read: when it is given up
    failed: str = ""
    settled_at: float = 0.0


class NixlAgent:
    """`layers`: address and bytes of each layer of the own pool, in host memory or on CUDA device `device`; `words`:
    those of the own words, 0 when there are none."""

    def __init__(
        self,
        name: str,
        on_device: bool,
        device: int,
        layers: Sequence[tuple[int, int]],
        words: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises NixlAbsent or NixlProblem."""
        self._nixl = nixl = load_bindings()
        self._clock = clock
        self._layers = layers
        self._kind = nixl.VRAM_SEG if on_device else nixl.DRAM_SEG
        self._device = device if on_device else 0
        self._peers: dict[int, _Opened] = {}
        self._known: dict[bytes, _Known] = {}
        self._transfers: list[_Transfer] = []
        self._scratch = np.zeros(_PROBE_BYTES, np.uint8)
        self._seen = np.zeros(_LOOKS, np.uint64)
        self._unused = list(range(_LOOKS))  # of those
        try:
            config = nixl.nixlAgentConfig()
            config.useProgThread, config.useListenThread = True, False
            config.pthrDelay = PROGRESS_DELAY_US
            config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
            self._agent = nixl.nixlAgent(name, config)
            self._agent.createBackend(BACKEND, {} if on_device else _threads())
            self._register(self._kind, [(address, size, self._device, "") for address, size in layers])
            own = [(each.ctypes.data, each.nbytes) for each in (self._scratch, self._seen)]
            self._register(nixl.DRAM_SEG, [(*each, 0, "") for each in (*own, words) if each[1]])
            self.metadata: bytes = self._agent.getLocalMD()
        except Exception as error:
            raise NixlProblem(f"a NIXL agent cannot be made: {_said(error)}") from error

    def _register(self, kind: Any, regions: list[tuple[int, int, int, str]]) -> None:
        self._agent.registerMem(self._nixl.nixlRegDList(kind, regions), [])

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    def open(
        self,
        peer: int,
        agent: bytes,
        memory: TheirMemory,
        within_s: float,
        then: Callable[[str], None],
    ) -> None:
        """Reads the first bytes of a peer's memory; `then` is told how that ended, "" for well."""
        try:
            known = self._learn(agent)
        except NixlProblem as problem:
            then(str(problem))
            return
        known.users += 1
        kind = self._nixl.VRAM_SEG if memory.on_device else self._nixl.DRAM_SEG
        opened = self._peers[peer] = _Opened(known, kind, memory.device if memory.on_device else 0, memory)
        address, size = memory.layers[0]
        size = min(size, _PROBE_BYTES)
        own = _one(self._scratch.ctypes.data, size)
        theirs = _one(address, size, opened.device)

        def ended(problem: str) -> None:
            if problem:
                self.shut(peer)
            then(problem)

        self._begin(known, self._nixl.DRAM_SEG, own, kind, theirs, ended, self._clock() + within_s)

    def _learn(self, agent: bytes) -> _Known:
        name = _name_in(agent)
        known = self._known.get(name)
        if known is not None:
            if known.agent == agent and not known.broken:
                return known
            if known.under_way:
                raise NixlProblem("reads of a lost connection to it have not ended yet")
            if known.users and not known.broken:
                raise NixlProblem("another server has an agent of this name")
            self._forget(known)
        try:
            loaded = self._agent.loadRemoteMD(agent)
        except Exception as error:
            raise NixlProblem(f"its NIXL agent cannot be added: {_said(error)}") from error
        known = self._known[name] = _Known(name, agent)
        if bytes(loaded) != name:
            self._forget(known)
            raise NixlProblem("its NIXL agent has another name than it says")
        return known

    def _forget(self, known: _Known) -> None:
        self._known.pop(known.name, None)
        try:
            self._agent.invalidateRemoteMD(known.name)
        except Exception as error:
            _log.debug("a NIXL agent that is to be forgotten has gone by itself: %s", _said(error))

    def shut(self, peer: int) -> None:
        """Its memory is not read any more from now on."""
        opened = self._peers.pop(peer, None)
        if opened is not None:
            opened.known.users -= 1
            self._tidy(opened.known)

    def _tidy(self, known: _Known) -> None:
        if not known.users and not known.under_way and self._known.get(known.name) is known:
            self._forget(known)

    def read(
        self,
        peer: int,
        layers: Sequence[tuple[int, int]],
        unit_bytes: int,
        source: np.ndarray,
        target: np.ndarray,
        then: Callable[[str], None],
    ) -> None:
        """Begins to read rows (int64 [n], in range) of layers of a peer, each into an own one: (theirs, own). `then` is
        told when none of it is written any more: "" when all is there, else what is wrong."""
        opened = self._peers.get(peer)
        if opened is None:
            then("the peer's memory is not open")
            return
        first, length, to = _runs(source, target)
        bases = [(opened.memory.layers[source][0], self._layers[target][0]) for source, target in layers]
        own = _descriptors([base for _, base in bases], to, length, unit_bytes, self._device)
        theirs = _descriptors([base for base, _ in bases], first, length, unit_bytes, opened.device)
        self._begin(opened.known, self._kind, own, opened.kind, theirs, then)

    def read_word(self, peer: int, index: int, then: Callable[[str, int], None]) -> None:
        """`then` is told what is wrong, or "" and the word of a peer's leases."""
        opened = self._peers.get(peer)
        if opened is None or not 0 <= index < opened.memory.words[1] // WORD_BYTES:
            then("there is no such word", 0)
            return
        if not self._unused:
            then("too many words are being looked at", 0)
            return
        place = self._unused.pop()

        def ended(problem: str) -> None:
            word = int(self._seen[place])
            self._unused.append(place)
            then(problem, word)

        own = _one(self._seen.ctypes.data + place * WORD_BYTES, WORD_BYTES)
        theirs = _one(opened.memory.words[0] + index * WORD_BYTES, WORD_BYTES)
        self._begin(opened.known, self._nixl.DRAM_SEG, own, self._nixl.DRAM_SEG, theirs, ended)

    def _begin(
        self,
        known: _Known,
        own_kind: Any,
        own: np.ndarray,
        their_kind: Any,
        theirs: np.ndarray,
        then: Callable[[str], None],
        until: float | None = None,
    ) -> None:
        nixl = self._nixl
        try:
            into, out_of = nixl.nixlXferDList(own_kind, own), nixl.nixlXferDList(their_kind, theirs)
            handle = self._agent.createXferReq(nixl.NIXL_READ, into, out_of, known.name, "", [])
        except Exception as error:  # nothing of it has begun
            then(f"the read is refused: {_said(error)}")
            return
        transfer = _Transfer(known, handle, then, until)
        known.under_way += 1
        self._transfers.append(transfer)
        try:
            state = self._agent.postXferReq(handle, "")
        except Exception as error:  # a part of it may have begun
            self._fail(transfer, error)
            return
        if state == nixl.NIXL_SUCCESS:
            self._end(transfer, "")

    def look(self) -> None:
        """Ends the reads that are over."""
        now = self._clock()
        for transfer in list(self._transfers):
            if transfer.failed:
                if now >= transfer.settled_at:
                    self._end(transfer, transfer.failed)
                continue
            try:
                state = self._agent.getXferStatus(transfer.handle)
            except Exception as error:
                self._fail(transfer, error)
                continue
            if state == self._nixl.NIXL_SUCCESS:
                self._end(transfer, "")
            elif transfer.until is not None and now >= transfer.until:
                transfer.until = None
                then, transfer.then = transfer.then, _unheard
                then("it does not answer")

    def _fail(self, transfer: _Transfer, error: Exception) -> None:
        transfer.known.broken = True
        transfer.failed = f"the read failed: {_said(error)}"
        transfer.settled_at = self._clock() + SETTLE_S

    def _end(self, transfer: _Transfer, problem: str) -> None:
        self._transfers.remove(transfer)
        transfer.known.under_way -= 1
        try:
            self._agent.releaseXferReq(transfer.handle)
        except Exception as error:
            _log.debug("a NIXL request that has ended keeps its own memory: %s", _said(error))
        self._tidy(transfer.known)
        transfer.then(problem)

    def close(self) -> None:
        """Ends its connections, and with them all reads: nothing is written any more afterwards."""
        del self._agent


def _threads() -> dict[str, str]:
    """Options of the backend: threads that share the descriptors of a read, however few there are."""
    count = max(2, min(MOST_THREADS, len(os.sched_getaffinity(0))))
    return {"num_threads": str(count), "split_batch_size": "1"}


def _unheard(_problem: str) -> None:
    return


def _one(address: int, size: int, device: int = 0) -> np.ndarray:
    """The table of one descriptor."""
    return np.array([[address, size, device]], np.uint64)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _name_in(agent: bytes) -> bytes:
    """The name in an agent's metadata, which says what the library will call it. Raises NixlProblem."""
    at = len(_NAME_MARK) + 8
    size = int.from_bytes(agent[len(_NAME_MARK) : at], "little")
    if not agent.startswith(_NAME_MARK) or not 0 < size <= 256 or len(agent) < at + size:
        raise NixlProblem("it is no NIXL agent that this version understands")
    return agent[at : at + size]


def _runs(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First source row, length, first target row of each run that is consecutive on both sides. int64 [runs] each."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    return source[starts], lengths, target[starts]


def _descriptors(bases: Sequence[int], first: np.ndarray, length: np.ndarray, unit: int, device: int) -> np.ndarray:
    """(address, bytes, device) of each run in each of the layers that begin at `bases`, uint64 [layers * runs, 3]."""
    table = np.empty((len(bases), len(first), 3), np.uint64)
    table[:, :, 0] = np.asarray(bases, np.uint64)[:, None] + first.astype(np.uint64) * np.uint64(unit)
    table[:, :, 1] = length.astype(np.uint64) * np.uint64(unit)
    table[:, :, 2] = device
    return table.reshape(-1, 3)
