"""D's view of prefill servers: channels, handshakes, memory of peers on this machine, and the two control calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from cache_store import handshake
from cache_store.failures import again
from cache_store.geometry.layout import AgentIdentity
from cache_store.memory.fetching import Fetcher
from cache_store.memory.lease_words import WordReader
from cache_store.memory.staging import MemoryUnavailable, PeerMemory
from cache_store.nixl.link import START_S as NIXL_START_S
from cache_store.nixl.link import NixlUnavailable, NotYet
from cache_store.observations import Observe
from cache_store.settings import AgentSettings
from cache_store.tcp.dialer import DataDialer
from cache_store.transports import GRPC, NIXL, ONE_SIDED, TCP, AbsentNotice, Offer
from cache_store.wire import SERVICE
from protos import cache_store_pb2 as pb
from rpc.block_sizes import block_sizes_fit
from rpc.channels import ChannelPool, Connection
from rpc.errors import BatonError, ErrorCode
from rpc.faults import fault_async
from rpc.ids import split_request_key
from rpc.status import from_rpc_error

FORGET_LOST_S = 600.0
MEMORY_LOOK_S = 1.0
TCP_AGAIN_S = 60.0
BETTER_SOON_S = 2.0  # after a handshake that had to leave out what is being made ready

# After these, `connect_retries` further attempts are made.
_NOT_REACHED = frozenset({ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED, ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED})

M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)


class PeerState(StrEnum):
    NEW = "new"
    CONNECTED = "connected"
    INCOMPATIBLE = "incompatible"
    LOST = "lost"


class OpenMemory:
    """Memory of a peer's engine, opened for reads by `fetcher`. It is closed when it has been retired and no load reads
    it any more: a mapping keeps the memory of an engine that has ended, so a lost peer's is given up."""

    def __init__(self, memory: PeerMemory, fetcher: Fetcher, words: WordReader | None = None) -> None:
        """`words`: those of the peer's leases; None: it has to be asked about them."""
        self.memory = memory
        self.fetcher = fetcher
        self.words = words
        self._users = 0
        self._retired = False

    @property
    def usable(self) -> bool:
        return self.fetcher.usable(self.memory)

    def hold(self) -> None:
        self._users += 1

    def drop(self) -> None:
        self._users -= 1
        self._close_if_unused()

    def retire(self) -> None:
        if not self._retired:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._users:
            # It may take a driver milliseconds, and nobody waits for it.
            asyncio.get_running_loop().run_in_executor(None, _close, self.memory)
            if self.words is not None:
                self.words.close()
                self.words = None


def _close(memory: PeerMemory) -> None:
    try:
        memory.close()
    except Exception:
        _log.exception("cache store: the memory of a lost peer cannot be closed")


@dataclass(eq=False)
class Peer:
    """One address. What the handshake agreed holds for `engine_id` only, until the connection is lost."""

    address: str
    state: PeerState = PeerState.NEW
    engine_id: str = ""
    checksum: str = ""
    lease_seconds: float = 0.0
    transport: str = GRPC
    memory: OpenMemory | None = None  # with a one-sided transport
    data_port: int = 0  # with tcp
    block_sizes: Mapping[str, int] = field(default_factory=dict)  # tokens of its blocks, by cache group
    closed_to_us: set[str] = field(default_factory=set)  # transports that turned out not to work with `closed_engine`
    closed_engine: str = ""
    tcp_again_at: float = math.inf  # when a data port that could not be reached is tried again
    not_yet: set[str] = field(default_factory=set)  # transports that are being made ready here
    again_at: float = math.inf  # when another handshake may agree on a better transport
    lost_at: float = 0.0
    not_reached: BatonError | None = None  # what the last attempt to reach `not_reached_engine` ended with
    not_reached_engine: str = ""
    not_reached_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def forget_memory(self) -> None:
        if self.memory is not None:
            self.memory.retire()
        self.memory = None


def _breach(what: str) -> BatonError:
    return BatonError(
        ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
        "the prefill server's answer breaks the protocol",
        metadata={"contract_breach": "absent_field", "breach": what},
    )


def _parsed(kind: type[M], data: bytes) -> M:
    """An answer. Raises CACHE_STORE_LOAD_UNKNOWN_ERROR for bytes that are none."""
    try:
        answer: M = kind.FromString(data)
    except DecodeError:
        raise _breach("an answer that cannot be parsed") from None
    return answer


def request_metadata(request_key: str) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", split_request_key(request_key).request_id),)


class Peers:
    """All peers of an agent. Belongs to the agent's loop."""

    def __init__(
        self,
        identity: AgentIdentity,
        settings: AgentSettings,
        offer: Offer,
        fetchers: Mapping[str, Fetcher],
        observe: Observe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetchers`: one for each one-sided transport of the offer."""
        self._identity = identity
        self._settings = settings
        self._offer = offer
        self._absent = AbsentNotice(offer)
        self._fetchers = fetchers
        self._observe = observe
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._bulk = itertools.count()
        self.dialer = DataDialer(settings, clock)
        self._channels = ChannelPool(
            on_evict=lambda _, state: observe("channel_evictions_total", peer_role="cache_store", state=state)
        )

    def get(self, address: str) -> Peer:
        return self._peers.setdefault(address, Peer(address))

    def count(self, state: PeerState) -> int:
        return sum(1 for peer in list(self._peers.values()) if peer.state is state)

    async def bulk_connection(self, address: str) -> Connection:
        """The next of the peer's bulk channels, in turn, connected. Raises CACHE_STORE_LOAD_CONNECT_FAILED."""
        return await self._connected(address, next(self._bulk) % self._settings.bulk_channels)

    async def _connected(self, address: str, bulk_index: int | None = None) -> Connection:
        """A channel with a connection.

        gRPC gives one attempt to connect a second (`grpc.min_reconnect_backoff_ms`) and goes on trying here until
        `connect_timeout_s` is over.
        """
        try:
            return await self._channels.connected(address, bulk_index, timeout_s=self._settings.connect_timeout_s)
        except TimeoutError:
            self._channels.check(address)
            raise BatonError(
                ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
                "the cache store cannot be reached",
                metadata={"peer": address},
            ) from None

    async def ready(self, address: str, engine_id: str) -> Peer:
        """The peer with a handshake that holds for `engine_id`; makes one when there is none.

        Raises CACHE_STORE_LOAD_CONNECT_FAILED, CACHE_STORE_LOAD_RDMA_CONNECT_FAILED, CACHE_STORE_CALL_PREFILL_TIMEOUT,
        PEER_RESTARTED, INCOMPATIBLE_PEER, ASYMMETRIC_TP_FAILED.
        """
        peer = self.get(address)
        asked_at = self._clock()
        async with peer.lock:
            connected = peer.state is PeerState.CONNECTED and peer.engine_id == engine_id
            usable = peer.memory is None or peer.memory.usable
            if connected and usable and self._clock() < peer.again_at:
                return peer
            missed = peer.not_reached
            if missed is not None and peer.not_reached_engine == engine_id and peer.not_reached_at >= asked_at:
                raise again(missed)  # found out while this one waited: nobody waits for a time-out after another
            peer.not_yet.clear()
            attempts = 1 + self._settings.connect_retries
            while True:
                attempts -= 1
                try:
                    while not await self._shake_hands(peer, engine_id):
                        pass  # every time with one transport less
                    return peer
                except BatonError as error:
                    if error.code not in _NOT_REACHED:
                        raise
                    if attempts <= 0:
                        peer.not_reached, peer.not_reached_engine = error, engine_id
                        peer.not_reached_at = self._clock()
                        raise again(error) from None

    async def _shake_hands(self, peer: Peer, engine_id: str) -> bool:
        """False: the transport that was agreed upon does not work; the next attempt leaves it out."""
        began = self._clock()
        result = "failed"
        try:
            await fault_async("cache_store.handshake", side="decode", peer=peer.address, rank=self._identity.rank)
            if peer.closed_engine != engine_id:
                peer.closed_engine = engine_id
                peer.closed_to_us.clear()
                peer.tcp_again_at = math.inf
            tcp_told = self._clock() >= peer.tcp_again_at
            if tcp_told:
                peer.closed_to_us.discard(TCP)
            offer = self._offer.without(*peer.closed_to_us, *peer.not_yet)
            limit_s = self._settings.connect_timeout_s + (NIXL_START_S if offer.transports == (NIXL,) else 0.0)
            request = handshake.make_request(self._identity, engine_id, self._settings.checksum, offer)
            data = await self._call(peer.address, "Handshake", request.SerializeToString(), limit_s, ())
            response = _parsed(pb.HandshakeResponse, data)
            if response.engine_id != engine_id:
                raise handshake.restarted(engine_id, response.engine_id)
            if not response.checksum or response.transport not in offer.transports:
                raise _breach("handshake without its result")
            if not 0 < response.lease_seconds < math.inf:  # which a timer could not be set to
                raise _breach("handshake with a lease of no length")
            if response.transport == TCP and not 0 < response.data_port < 65536:
                raise _breach("handshake without a data port")
            block_sizes = self._check_groups(response)
            memory = None
            if response.transport in ONE_SIDED:
                memory = await self._open(peer, response)
                if memory is None:
                    result = "ok"
                    return False
            if response.transport == TCP and not await self._dial(peer, response, tcp_told):
                result = "ok"
                return False
            peer.forget_memory()
            peer.memory = memory
            peer.transport = response.transport
            peer.data_port = response.data_port
            peer.block_sizes = block_sizes
            peer.state = PeerState.CONNECTED
            soon = self._clock() + BETTER_SOON_S if response.better_soon or peer.not_yet else math.inf
            peer.again_at = min(soon, peer.tcp_again_at if TCP in peer.closed_to_us else math.inf)
            peer.engine_id = engine_id
            peer.checksum = response.checksum
            peer.lease_seconds = response.lease_seconds
            self._absent.connected(peer.address, peer.transport)
            result = "ok"
            return True
        except BatonError as error:
            result = handshake.result_of(error)
            if result == "restarted":
                self._observe("peer_restarts_total")
            self._mark(peer, PeerState.INCOMPATIBLE if result == "incompatible" else PeerState.LOST)
            raise error.with_context(peer=peer.address) from None
        finally:
            self._observe("handshakes_total", result=result)
            self._observe("handshake_seconds", self._clock() - began, result=result)

    def _check_groups(self, response: pb.HandshakeResponse) -> dict[str, int]:
        """The peer's block sizes. Raises CACHE_STORE_LOAD_UNKNOWN_ERROR for a peer that did not compare them."""
        sizes = {group.tag: group.block_size for group in response.groups}
        fit = all(block_sizes_fit(sizes.get(own.tag, 0), own.block_size) for own in self._identity.groups)
        if not fit:
            raise _breach("handshake without block sizes that fit")
        return sizes

    async def _open(self, peer: Peer, response: pb.HandshakeResponse) -> OpenMemory | None:
        """The peer's memory. None: it cannot be opened, which is said once, and another transport has to do.

        Raises CACHE_STORE_LOAD_RDMA_CONNECT_FAILED (nixl) or INCOMPATIBLE_PEER when no other is allowed.
        """
        transport, shared = response.transport, response.memory
        fetcher = self._fetchers[transport]
        try:
            self._check_shared(shared)
            memory = await fetcher.open(shared)
            return OpenMemory(memory, fetcher, fetcher.words(memory, shared) if shared.HasField("words") else None)
        except NotYet:
            peer.not_yet.add(transport)
            return None
        except MemoryUnavailable as error:
            if self._offer.without(transport, *peer.closed_to_us).transports:
                peer.closed_to_us.add(transport)
                if not isinstance(error, NixlUnavailable):  # which is counted where it is found
                    self._observe("kv_transport_fallbacks_total", transport=transport, reason="failed")
                _log.warning("peer=%s: transport %s is left out: %s", peer.address, transport, error)
                return None
            raise BatonError(
                # Its NIXL process may have been lost a moment ago; memory of this machine stays closed to this process.
                ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED if transport == NIXL else ErrorCode.INCOMPATIBLE_PEER,
                f"the prefill server's KV memory cannot be opened here by {transport}; use --kv-transport auto",
                metadata={"transports": str(error)[:256]},
            ) from None

    async def _dial(self, peer: Peer, response: pb.HandshakeResponse, told: bool) -> bool:
        """Whether the peer's data port can be reached. That it cannot is said once, and another transport has to do for
        a while: a firewall stays, but a port that had no room for another connection has some later.

        Raises CACHE_STORE_LOAD_CONNECT_FAILED when no other is allowed.
        """
        try:
            connection = await self.dialer.take(peer.address, response.data_port, response.engine_id)
        except BatonError as error:
            if not self._offer.without(TCP, *peer.closed_to_us).transports:
                raise
            peer.closed_to_us.add(TCP)
            peer.tcp_again_at = self._clock() + TCP_AGAIN_S
            self._observe("kv_transport_fallbacks_total", transport=TCP, reason="failed")
            _log.log(
                logging.DEBUG if told else logging.WARNING,
                "peer=%s: transport tcp is not possible, so it is left out: data port %d: %s",
                peer.address,
                response.data_port,
                error.metadata.get("error", error.message),
            )
            return False
        self.dialer.give(peer.address, response.engine_id, connection)  # for the first load
        return True

    def _check_shared(self, shared: pb.SharedPool) -> None:
        expected = {(group.tag, layer) for group in self._identity.groups for layer in range(group.num_layers)}
        sizes = {(layer.group, layer.layer): layer.bytes for layer in shared.layers}
        if sizes.keys() != expected or not all(sizes.values()):
            raise MemoryUnavailable("the peer shares other layers than the model has")

    def note_failure(self, address: str, error: BatonError) -> None:
        """After a failed call: what the peer agreed to no longer holds when it may be another, or gone."""
        if error.code is ErrorCode.PEER_RESTARTED:
            self._observe("peer_restarts_total")
        if error.code in (
            ErrorCode.PEER_RESTARTED,
            ErrorCode.CONNECTION_RESET_BY_PEER,
            ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
            ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED,
            # It fell silent in the middle. A reload that asks it first does not wait for a first block, which may take
            # `publish_timeout_s`, from somebody who is not there any more.
            ErrorCode.LOAD_CACHE_TIMEOUT,
        ):
            self._mark(self.get(address), PeerState.LOST)
        self._channels.check(address)

    def _mark(self, peer: Peer, state: PeerState) -> None:
        peer.forget_memory()
        self.dialer.drop(peer.address)
        peer.state = state
        peer.lost_at = self._clock()

    def look_after(self) -> None:
        """Gives up the memory of peers whose connection is gone, and drops peers that could not be used for
        FORGET_LOST_S: servers come back under other addresses. Closes data connections that nobody uses."""
        self.dialer.look_after()
        for peer in self._peers.values():
            if peer.memory is not None and not self._channels.is_ready(peer.address):
                self._mark(peer, PeerState.LOST)
        usable = (PeerState.NEW, PeerState.CONNECTED)
        for peer in list(self._peers.values()):
            old = peer.state not in usable and self._clock() - peer.lost_at >= FORGET_LOST_S
            if old and not peer.lock.locked():
                del self._peers[peer.address]
                self._channels.evict(peer.address)

    def next_look_in(self) -> float:
        """Seconds until `look_after` is due, because a mapping keeps the memory of an engine that has ended, and data
        connections that nobody uses have to go."""
        return MEMORY_LOOK_S if self._fetchers or TCP in self._offer.transports else math.inf

    async def renew(self, address: str, reference: pb.KvReference, reading: bool = False) -> float:
        """Seconds until the lease ends. Raises what the service raises, and transport failures.

        `reading`: blocks were read in the peer's memory; success says that they were the lease's until then.
        """
        request = pb.RenewLeaseRequest(reference=reference)
        if reading:
            request.reading = True
        metadata = request_metadata(reference.request_key)
        data = await self._call(
            address, "RenewLease", request.SerializeToString(), self._settings.call_timeout_s, metadata
        )
        return _parsed(pb.RenewLeaseResponse, data).remaining_seconds

    async def release(self, address: str, request: pb.ReleaseRequest) -> bool:
        metadata = request_metadata(request.reference.request_key)
        settings = self._settings
        # Giving up is told to every peer at once, and the lease ends by itself where it does not arrive.
        timeout_s = settings.call_timeout_s if request.complete else settings.cancel_timeout_s
        data = await self._call(address, "Release", request.SerializeToString(), timeout_s, metadata)
        return _parsed(pb.ReleaseResponse, data).found

    async def close(self) -> None:
        self.dialer.close()
        for peer in self._peers.values():
            peer.forget_memory()
        await self._channels.close()

    async def _call(
        self, address: str, method: str, data: bytes, timeout_s: float, metadata: tuple[tuple[str, str], ...]
    ) -> bytes:
        connection = await self._connected(address)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            answer: bytes = await call(data, timeout=timeout_s, metadata=metadata)
            return answer
        except grpc.RpcError as exc:
            error = from_rpc_error(exc, leg="cache_store", deadline_passed=False, was_ready=True)
            if error.code is ErrorCode.CANCELLED and "grpc_code" in error.metadata:  # by the peer, which stops
                text = "the prefill server ended the call"
                error = BatonError(ErrorCode.CONNECTION_RESET_BY_PEER, text, metadata=error.metadata)
            self._channels.check(address)
            raise error from None
