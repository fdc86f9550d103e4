"""What an engine says of requests whose KV it stages: changes of their leases and of the loads that wait for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cache_store.events import AgentEvent, LeaseEnded
from cache_store.failures import abort_source
from cache_store.memory.pool import KvPool
from cache_store.observations import Observe
from cache_store.serving.lease import LeaseTable
from cache_store.serving.parking import ParkingTable
from cache_store.transports import Offer
from protos import common_pb2
from rpc import faults
from rpc.errors import BatonError, ErrorCode

_log = logging.getLogger(__name__)

_STORE_FAILED = {"code": ErrorCode.CACHE_STORE_STORE_FAILED.name}


class StagedRequests:
    """P's side of an agent, towards its engine. Belongs to the agent's loop; the methods are those of the agent, which
    says what they are for. `offer` gives what is said in handshakes now; `emit` passes on an event to the engine."""

    def __init__(
        self,
        pool: KvPool,
        table: LeaseTable,
        parking: ParkingTable,
        offer: Callable[[], Offer],
        observe: Observe,
        emit: Callable[[AgentEvent], None],
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
    ) -> None:
        self._pool = pool
        self._table = table
        self._parking = parking
        self._offer = offer
        self._observe = observe
        self._emit = emit
        self._clock = clock
        self._rank = rank

    def admit(
        self, key: str, generation: int, prompt_tokens: int, blocks: dict[str, list[int]], ready_tokens: int
    ) -> None:
        try:
            for tag, ids in blocks.items():
                if any(not 0 <= block < self._pool.num_blocks(tag) for block in ids):
                    raise ValueError(f"{key}: a block of group {tag!r} is outside the pool")
            lease = self._table.admit(key, generation, prompt_tokens, blocks, ready_tokens)
        except (ValueError, KeyError) as error:
            if self._table.get(key) is not None:
                raise
            _log.exception("cache store: admission failed", extra=_STORE_FAILED)
            failure = store_failed(error)
            self._table.fail(key, failure)
            self._parking.refuse(key, failure)
            self._emit(LeaseEnded(key, generation, "aborted", error=failure))
            return
        if lease is not None:
            self._parking.admit(key)

    def publish(self, key: str, group: str, layer: int, upto_block: int, called_at: float) -> None:
        try:
            effect = faults.fault("cache_store.publish", key=key, rank=self._rank)
            if effect & faults.DROP:
                return
            self._table.publish(key, group, layer, upto_block)
            if effect & faults.DUPLICATE:
                self._table.publish(key, group, layer, upto_block)
        except BatonError as error:
            self.fail(key, error)
            return
        except ValueError as error:
            _log.exception("cache store: publishing failed", extra=_STORE_FAILED)
            self.fail(key, store_failed(error))
            return
        self._observe("kv_publish_seconds", max(0.0, self._clock() - called_at), transport=self._offer().best)

    def computed(self, key: str, result: common_pb2.PrefillResult, hold: bool, called_at: float) -> None:
        try:
            self._table.computed(key, result, hold, called_at)
        except ValueError as error:
            _log.exception("cache store: publishing failed", extra=_STORE_FAILED)
            self.fail(key, store_failed(error))

    def fail(self, key: str, error: BatonError) -> None:
        if self._table.fail(key, error):
            self._observe("aborts_total", leg="cache_store", source=abort_source(error))
        self._parking.refuse(key, error)

    def tombstone(self, key: str) -> None:
        self._parking.refuse(key, self._table.tombstone(key))


def store_failed(error: BaseException) -> BatonError:
    return BatonError(
        ErrorCode.CACHE_STORE_STORE_FAILED,
        "publishing the prompt's KV failed",
        stage="publish",
        metadata={"error": str(error)},
    )
