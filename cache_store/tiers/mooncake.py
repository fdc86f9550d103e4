"""The tier that the servers of a fleet share: Mooncake Store, `--kv-tier mooncake://HOST:PORT`.

The address is that of the store's master. Each server gives the store a part of its memory (`segment_bytes`); where a
record lies is the master's affair. See docs/operations.md for how to run it, and who may reach it.

A call waits for `timeout_s` at the most. What does not answer in time, and what cannot be reached, is left alone for a
while (circuit.py): meanwhile `find` finds nothing and `put` takes nothing, at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from cache_store.tiers.circuit import Circuit
from cache_store.tiers.mooncake_client import ABSENT, FULL, MOST_KEYS, OK, ClientConfig
from cache_store.tiers.mooncake_link import Call, ClientLink, LibraryMissing
from cache_store.tiers.read_ahead import ReadAhead
from cache_store.tiers.shared import FLAG
from cache_store.tiers.tier import Record, TierError, TierStats
from rpc.errors import BatonError, ErrorCode
from rpc.server import join_address

DEFAULT_SEGMENT_BYTES = 1 << 30
LEAST_SEGMENT_BYTES = 16 << 20  # the library takes no smaller part
MOST_SEGMENT_BYTES = 1 << 44
PUT_TIMEOUT_S = 2.0  # nobody waits for it; one who is slower is left alone
FULL_PAUSE_S = 1.0  # in which the store makes room, and nothing is copied for it
SLOT_MEMORY_BYTES = 64 << 20  # of all slots, as long as there are enough of them
BATCH = 16  # records of one read; more are hardly faster
READ_SLOTS = 4 * BATCH  # two batches that readers copy, and two on their way
WRITE_SLOTS = 4
_PAGE_BYTES = 4096
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """`mooncake://HOST:PORT?segment_bytes=N&host=H`."""

    host: str  # of the master
    port: int
    segment_bytes: int = DEFAULT_SEGMENT_BYTES  # of this server's memory that the store may use; 0: none
    own_host: str = ""  # under which other servers reach this one; empty: what the master sees

    @classmethod
    def parse(cls, address: str) -> MooncakeAddress:
        """Raises INVALID_PARAMS that names the flag."""
        parts = urlsplit(address)
        try:
            host, port = parts.hostname, parts.port
            options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise _refusal(address, str(error)) from None
        if parts.scheme != "mooncake" or not host or not port or parts.path not in ("", "/") or parts.fragment:
            raise _refusal(address, "must be mooncake://HOST:PORT, the address of a Mooncake master")
        if parts.username is not None or parts.password is not None:
            raise _refusal("mooncake://…", "Mooncake Store knows no users; leave name and password out")
        segment_bytes, own_host = DEFAULT_SEGMENT_BYTES, ""
        for name, value in options:
            if name == "segment_bytes":
                segment_bytes = int(value) if value.isascii() and value.isdigit() else -1
                if segment_bytes != 0 and not LEAST_SEGMENT_BYTES <= segment_bytes <= MOST_SEGMENT_BYTES:
                    text = f"segment_bytes is {value!r}; it must be 0, or from {LEAST_SEGMENT_BYTES} on"
                    raise _refusal(address, text)
            elif name == "host":
                if not _HOST.fullmatch(value):
                    raise _refusal(address, f"host is {value!r}; it must be a name or an address of this server")
                own_host = value
            else:
                raise _refusal(address, f"there is no option {name!r}; segment_bytes and host are")
        return cls(host, port, segment_bytes, own_host)

    @property
    def master(self) -> str:
        return join_address(self.host, self.port)


def _refusal(address: str, text: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, f"{FLAG} {address!r}: {text}", param=FLAG)


def open_tier(address: str, record_bytes: int, timeout_s: float) -> MooncakeTier:
    """See `shared.open_shared`. Returns once the client library is loaded, whether or not the master is there."""
    parsed = MooncakeAddress.parse(address)
    slot_bytes = -(-record_bytes // _PAGE_BYTES) * _PAGE_BYTES
    read_slots = max(2, min(READ_SLOTS, SLOT_MEMORY_BYTES // slot_bytes))
    config = ClientConfig(
        master=parsed.master,
        master_host=parsed.host,
        master_port=parsed.port,
        host=parsed.own_host,
        segment_bytes=parsed.segment_bytes,
        slot_bytes=slot_bytes,
        slots=read_slots + WRITE_SLOTS,
    )
    link = ClientLink(config, WRITE_SLOTS)
    try:
        link.start()
    except (LibraryMissing, OSError) as error:
        raise _refusal(
            address,
            f"the client of Mooncake Store does not start ({error}); install Baton with the extra `mooncake` and the "
            "Debian packages libibverbs1 librdmacm1 libnuma1 liburing2, or leave the flag out",
        ) from None
    return MooncakeTier(link, record_bytes, timeout_s, batch=max(1, min(BATCH, read_slots // 4)))


class MooncakeTier:
    """A `Tier` over the store. Safe to use from several threads."""

    name = "mooncake"
    shared = True

    def __init__(self, link: ClientLink, record_bytes: int, timeout_s: float, batch: int = BATCH) -> None:
        self.link = link
        self._record_bytes = record_bytes
        self._timeout_s = timeout_s
        self._ahead = ReadAhead(link, record_bytes, batch)
        self._full_until = 0.0

    @property
    def takes(self) -> bool:
        return self.link.usable(self.link.writes) and time.monotonic() >= self._full_until

    def find(self, keys: Sequence[bytes]) -> int:
        link, found = self.link, 0
        while found < len(keys) and link.usable(link.reads):
            asked = keys[found : found + MOST_KEYS]
            count = self._ask("find", asked, link.reads, self._timeout_s)[0]
            if count < 0:
                raise TierError("other", f"Mooncake Store could not look blocks up (code {count})")
            found += count
            if count < len(asked):
                break
        if found:
            self._ahead.found(keys[:found])
        return found

    def has(self, key: bytes) -> bool:
        return self.find((key,)) == 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """The store goes by what is looked up."""

    def get(self, key: bytes, into: memoryview) -> bool:
        link = self.link
        if into.nbytes != self._record_bytes or not link.usable(link.reads):
            return False
        batch = self._ahead.claim(key)
        drop = True
        try:
            self._wait(batch.call, link.reads, self._timeout_s)
            position = batch.positions[key]
            code = batch.call.codes[position]
            if code == OK:
                into[:] = link.slot(batch.call.slots[position])[: self._record_bytes]
                link.succeeded(link.reads)
            drop = False
        finally:
            self._ahead.done(batch, drop=drop)
            if drop:
                self._ahead.clear()
        if code not in (OK, ABSENT):
            raise TierError("unreachable", f"a server that holds a block did not give it to Mooncake Store ({code})")
        return code == OK

    def lent(self, key: bytes) -> None:
        """Slots are memory of the library's process too."""

    def put(self, key: bytes, record: Record) -> bool:
        link, view = self.link, memoryview(record)
        if view.nbytes != self._record_bytes or not link.usable(link.writes):
            return False
        slots = link.take_slots(1, write=True)
        if not slots:
            raise TierError("timeout", "all slots are held by writes that do not end")
        link.slot(slots[0])[: self._record_bytes] = view
        (code,) = self._ask("put", [key], link.writes, max(PUT_TIMEOUT_S, self._timeout_s), slots)
        if code not in (OK, FULL):
            raise TierError("unreachable", f"Mooncake Store could not write a block to where it was to be ({code})")
        if code == FULL:
            self._full_until = time.monotonic() + FULL_PAUSE_S
        else:
            link.succeeded(link.writes)
        return code == OK

    def discard(self, key: bytes) -> None:
        """Removes the record from the store, for everybody, so that it can be written anew."""
        if self.link.usable(self.link.writes):
            self._ask("remove", [key], self.link.writes, self._timeout_s)

    def clear(self) -> None:
        """The records are the other servers' too, and named by what they depend on: they stay."""

    def stats(self) -> TierStats:
        return TierStats(wasted_blocks=self._ahead.wasted)

    def close(self) -> None:
        self.link.close()

    def _ask(
        self, operation: str, keys: Sequence[bytes], circuit: Circuit, timeout_s: float, slots: Sequence[int] = ()
    ) -> list[int]:
        call = self.link.begin(operation, keys, slots, self._record_bytes)
        try:
            self._wait(call, circuit, timeout_s)
            return call.codes
        finally:
            self.link.release(call)

    def _wait(self, call: Call, circuit: Circuit, timeout_s: float) -> None:
        """Returns when the call has ended well; opens the circuit otherwise."""
        if not call.wait(timeout_s):
            self.link.failed(circuit, f"no answer within {timeout_s:g} s")
            raise TierError("timeout", f"Mooncake Store did not answer within {timeout_s:g} s")
        if call.lost:
            self.link.failed(circuit, "the Mooncake master cannot be reached")
            raise TierError("unreachable", "the Mooncake master cannot be reached")
