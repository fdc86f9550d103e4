"""The engine's side of the process that holds the client of Mooncake Store: its life, the memory that both share, and
the requests that are under way.

No call here waits for longer than its caller says. A request that nobody waits for any more keeps its slots until it
is answered or the process has ended: the library may still write into them.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from cache_store.tiers.circuit import Circuit
from cache_store.tiers.mooncake_client import MAX_MESSAGE_BYTES, ClientConfig, Imported, Reply, Request
from cache_store.tiers.tier import TierError

IMPORT_TIMEOUT_S = 60.0  # for the process to start and to load the library
# A request that takes longer than the library itself would ever wait: the process is replaced.
HANG_S = 90.0
HANG_OF_PROBE_S = 20.0
LEAVE_S = 0.3  # that an engine which ends waits for the process to leave the store; it goes on by itself
END_S = 2.0  # for a process that was killed, and for the link's thread
TURN_S = 0.25  # between looks at what is due
STDERR_LINES = 8  # kept to say why a process has ended
MODULE = "cache_store.tiers.mooncake_client"
# The rest of the environment is nobody's business there: it may hold the API key.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
_ENVIRONMENT_OF_LIBRARY = ("MC_", "MOONCAKE_", "GLOG_")

_log = logging.getLogger(__name__)


class LibraryMissing(Exception):
    """The process could not load the library."""


class Call:
    """A request under way. Whoever has begun it waits or looks, and then gives it back by `ClientLink.release`."""

    __slots__ = ("_done", "codes", "ended", "hangs_at", "lost", "on_end", "released", "slots")

    def __init__(self, slots: Sequence[int], on_end: Callable[[Call], None] | None = None) -> None:
        self.slots = slots
        self.hangs_at = time.monotonic() + (HANG_S if on_end is None else HANG_OF_PROBE_S)
        self.codes: list[int] = []
        self.lost = False  # no answer, or one that says that the master did not give one
        self.ended = False
        self.released = False
        self.on_end = on_end
        self._done = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        return self._done.wait(timeout_s)

    def end(self, codes: list[int], lost: bool) -> None:
        self.codes, self.lost, self.ended = codes, lost, True
        self._done.set()


class ClientLink:
    """One process with a client of the store, replaced whenever it ends. Calls come from any thread."""

    def __init__(self, config: ClientConfig, write_slots: int) -> None:
        """The last `write_slots` slots are for records on their way to the store, the others for those that come."""
        self._config = config
        self._descriptor = os.memfd_create("baton-mooncake", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, config.slots * config.slot_bytes)
        self._map = mmap.mmap(self._descriptor, config.slots * config.slot_bytes)
        self._view = memoryview(self._map)
        self._lock = threading.Lock()
        self._first_write_slot = config.slots - write_slots
        self._free_reads = list(range(self._first_write_slot))
        self._free_writes = list(range(self._first_write_slot, config.slots))
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._connected = False
        self._connecting = False
        self._probing = False
        self._life = Circuit()  # of the process and its connection to the master
        self.reads = Circuit()
        self.writes = Circuit()
        self._told_available: bool | None = None
        self._reason = ""
        self.starts = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-mooncake-link", daemon=True)

    # -- for the tier -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process and waits until it has loaded the library. Raises LibraryMissing; OSError when there can
        be no process. The master need not be there."""
        try:
            self._start_process()
        except BaseException:
            self._end_process()
            self._free_memory()
            raise
        self._thread.start()

    def usable(self, circuit: Circuit) -> bool:
        """Whether a request may be sent now."""
        return self._connected and circuit.closed

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def slot(self, number: int) -> memoryview:
        """The memory of a slot."""
        size = self._config.slot_bytes
        return self._view[number * size : (number + 1) * size]

    def take_slots(self, count: int, *, write: bool = False) -> list[int]:
        """Up to `count` free slots."""
        with self._lock:
            free = self._free_writes if write else self._free_reads
            taken = free[-count:]
            del free[-count:]
            return taken

    def give_slots(self, slots: Sequence[int]) -> None:
        """Back, those that no request has been sent with."""
        with self._lock:
            self._put_back(slots)

    def begin(
        self,
        operation: str,
        keys: Sequence[bytes] = (),
        slots: Sequence[int] = (),
        size: int = 0,
        *,
        on_end: Callable[[Call], None] | None = None,
    ) -> Call:
        """Sends a request. Its slots are the call's, and come back with it. Raises TierError `unreachable` if the
        process is not there or takes nothing more; the slots are free again then."""
        call = Call(slots, on_end)
        with self._lock:
            control = self._control
            self._number += 1
            message = msgspec.msgpack.encode(Request(self._number, operation, list(keys), list(slots), size))
            try:
                if control is None:
                    raise ConnectionError("it is not running")
                control.send(message, socket.MSG_DONTWAIT)
            except OSError as error:
                self._put_back(slots)
                raise TierError("unreachable", f"the client of the store cannot be asked: {error}") from None
            self._calls[self._number] = call
        return call

    def release(self, call: Call) -> None:
        """Nobody looks at the call, or at its slots, any more."""
        with self._lock:
            call.released = True
            if call.ended:
                self._put_back(call.slots)
                call.slots = ()

    def failed(self, circuit: Circuit, reason: str) -> None:
        """A request was not answered as it should: nothing more is asked until a probe is."""
        self._reason = reason
        circuit.failed()

    def succeeded(self, circuit: Circuit) -> None:
        circuit.succeeded()
        self._life.succeeded()

    def close(self) -> None:
        """Ends the process, which may be a few seconds later: it takes its segment out of the store before. Calls
        under way end as lost."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
        process = self._process
        if process is not None:
            try:
                self.begin("close")
                process.wait(LEAVE_S)
            except TierError:  # it is ended below
                pass
            except subprocess.TimeoutExpired:
                self._process = None
                threading.Thread(target=_wait_for_end, args=(process,), name="kv-mooncake-leave", daemon=True).start()
        self._end_process()
        self._free_memory()

    def _free_memory(self) -> None:
        with contextlib.suppress(BufferError):  # somebody still looks at a slot; it ends with him
            self._view.release()
            self._map.close()
        os.close(self._descriptor)

    def _put_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            (self._free_writes if slot >= self._first_write_slot else self._free_reads).append(slot)

    # -- the link's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._process is None:
                    self._closing.wait(min(TURN_S, max(0.01, self._life.retry_in_s)))
                else:
                    self._listen()
                if not self._closing.is_set():
                    self._tend()
            except Exception as error:
                # Whatever it is, no process is better than one that nobody understands.
                _log.exception("the link to the client of a shared tier failed")
                self._lose_process(f"{type(error).__name__}: {error}")

    def _listen(self) -> None:
        """Takes up what the process says, for a turn."""
        process, control = self._process, self._control
        assert process is not None and process.stderr is not None and control is not None
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(process.stderr, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(TURN_S * 1000)}
        if process.stderr.fileno() in ready:
            self._keep_stderr(process)
        if control.fileno() not in ready:
            return
        try:
            message = control.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if message:
            self._answered(msgspec.msgpack.decode(message, type=Reply))
        else:
            self._lose_process("its process has ended")

    def _keep_stderr(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        text = os.read(process.stderr.fileno(), 1 << 16)
        self._stderr.extend(line[:300] for line in text.decode(errors="replace").splitlines() if line.strip())
        if not text:  # nothing more will come, but poll would say so again and again
            self._lose_process("its process has ended")

    def _answered(self, reply: Reply) -> None:
        with self._lock:
            call = self._calls.pop(reply.number, None)
            if call is not None:
                self._end_call(call, reply.codes, reply.lost)
        if call is not None and call.on_end is not None:
            call.on_end(call)

    def _end_call(self, call: Call, codes: list[int], lost: bool) -> None:
        call.end(codes, lost)
        if call.released:
            self._put_back(call.slots)
            call.slots = ()

    def _tend(self) -> None:
        """Does what is due: a process, a connection, a probe; and says when the state has changed."""
        now = time.monotonic()
        with self._lock:
            hangs = any(call.hangs_at < now for call in self._calls.values())
        if hangs:
            self._lose_process("its process hangs")
        if self._process is None:
            if self._life.closed or self._life.retry_in_s == 0.0:
                try:
                    self._start_process()
                except (OSError, LibraryMissing) as error:
                    self._lose_process(f"its process does not start: {error}")
        elif not self._connected:
            if not self._connecting and (self._life.closed or self._life.retry_in_s == 0.0):
                self._connecting = True
                self._ask("connect", self._connect_ended)
        else:
            due = [each for each in (self.reads, self.writes) if not each.closed and each.retry_in_s == 0.0]
            if due and not self._probing:
                self._probing = True
                self._ask("probe", self._probe_ended)
        self._tell()

    def _ask(self, operation: str, on_end: Callable[[Call], None]) -> None:
        try:
            self.begin(operation, on_end=on_end)
        except TierError as error:
            self._lose_process(str(error))

    def _connect_ended(self, call: Call) -> None:
        self._connecting = False
        if self._process is None:
            return
        if call.lost:
            self._reason = f"no Mooncake master answers at {self._config.master}"
            self._life.failed()
        else:
            self._life.probed()
            self._connected = True

    def _probe_ended(self, call: Call) -> None:
        self._probing = False
        for circuit in (self.reads, self.writes):
            if not circuit.closed and circuit.retry_in_s == 0.0:
                if call.lost:
                    circuit.failed()
                else:
                    circuit.probed()
        if call.lost and self._process is not None:
            self._reason = f"the Mooncake master at {self._config.master} does not answer"

    def _tell(self) -> None:
        available = self._connected and self.reads.closed and self.writes.closed
        if available == self._told_available or (not available and not self._reason):
            return
        if not available:
            _log.warning("the shared tier does not answer, its blocks are misses: %s", self._reason)
        else:
            _log.info("the shared tier answers", extra={"master": self._config.master})
        self._told_available = available

    # -- the process ------------------------------------------------------------------------------------------

    def _start_process(self) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_OF_LIBRARY)
        }
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is the engine's; the process ends with its socket
                )
            self.starts += 1
            self._stderr.clear()
            socket.send_fds(control, [msgspec.msgpack.encode(self._config)], [self._descriptor])
            control.settimeout(IMPORT_TIMEOUT_S)
            message = control.recv(MAX_MESSAGE_BYTES)
            control.settimeout(None)
            if not message:
                raise ConnectionResetError(f"it ended with status {process.wait(END_S)}")
            imported = msgspec.msgpack.decode(message, type=Imported)
            if imported.problem:
                raise LibraryMissing(imported.problem)
        except subprocess.TimeoutExpired:
            control.close()
            raise ConnectionResetError("it has closed its socket") from None
        except BaseException:
            control.close()
            raise
        with self._lock:
            self._control = control

    def _lose_process(self, reason: str) -> None:
        """The process has ended, or is ended now; another one is due after a pause."""
        process = self._process
        status = self._end_process()
        self._reason = reason if status is None else f"{reason} (status {status})"
        if process is not None and self._stderr:
            _log.info("the last words of a client of the shared tier", extra={"lines": list(self._stderr)})
        self._life.failed()

    def _end_process(self) -> int | None:
        """Ends the process, and then the calls that were under way. Its exit status, if it had one of its own."""
        process, self._process = self._process, None
        status: int | None = None
        if process is not None:
            status = process.poll()
            if status is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            assert process.stderr is not None
            process.stderr.close()
        self._connected = self._connecting = self._probing = False
        with self._lock:
            control, self._control = self._control, None
            calls = list(self._calls.values())
            self._calls.clear()
            for call in calls:
                self._end_call(call, [], True)
        if control is not None:
            control.close()
        for call in calls:
            if call.on_end is not None:
                call.on_end(call)
        return status


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes what leads there, and waits
        pass
