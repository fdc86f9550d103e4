"""A decode server's rank as a plain client of a prefill server's cache store: it reads KV blocks and checks each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import xxhash

from protos import cache_store_pb2, cache_store_pb2_grpc
from tests.integration.cluster import ServerProcess

LIMIT_S = 20.0
READER = cache_store_pb2.ReaderRank(rank=0, tp_size=1)

Piece = tuple[int, int]  # layer, block of the prompt


class RawReader:
    """Reads the KV of one request key. `pieces` has every block that came, as often as its checksum was right."""

    def __init__(self, server: ServerProcess, key: str, prompt_tokens: int, *, block_size: int, block_bytes: int,
                 layers: int) -> None:  # fmt: skip
        self.pieces: dict[Piece, bytes] = {}
        self.done = False
        self._server = server
        self._reference = cache_store_pb2.KvReference(engine_id=server.engine_id, request_key=key)
        wanted = cache_store_pb2.WantedBlocks(
            group="full", block_size=block_size, first_block=0, num_blocks=-(-prompt_tokens // block_size),
            block_bytes=block_bytes, num_layers=layers, partition_count=1, partition_id=0,
        )  # fmt: skip
        self._request = cache_store_pb2.LoadRequest(
            reference=self._reference, wanted=[wanted], prompt_tokens=prompt_tokens, checksum="all",
            chunk_bytes=1 << 20, reader=READER,
        )  # fmt: skip

    @contextmanager
    def _stub(self) -> Iterator[cache_store_pb2_grpc.CacheStoreStub]:
        with grpc.insecure_channel(self._server.cache_store[0]) as channel:
            yield cache_store_pb2_grpc.CacheStoreStub(channel)

    def read(self) -> Iterator[int]:
        """The number of blocks that have come, after each event with some. Raises grpc.RpcError as the stream does."""
        with self._stub() as stub:
            for event in stub.Load(self._request, timeout=LIMIT_S):
                self.done = self.done or event.HasField("done")
                header, size = event.pieces, event.pieces.block_bytes
                if header.blocks:
                    assert xxhash.xxh3_64_intdigest(event.data) == header.checksum, f"layer {header.layer}"
                for at, block in enumerate(header.blocks):
                    data = event.data[at * size : (at + 1) * size]
                    assert (header.layer, block) not in self.pieces
                    self.pieces[header.layer, block] = data
                if header.blocks:
                    yield len(self.pieces)

    def read_all(self) -> dict[Piece, bytes]:
        for _ in self.read():
            pass
        assert self.done
        return self.pieces

    def ended(self) -> bool:
        """Whether the request was aborted: its lease can be renewed no more."""
        with self._stub() as stub:
            try:
                stub.RenewLease(cache_store_pb2.RenewLeaseRequest(reference=self._reference), timeout=LIMIT_S)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.CANCELLED
        return False

    def release(self) -> None:
        with self._stub() as stub:
            request = cache_store_pb2.ReleaseRequest(reference=self._reference, complete=True, reader=READER)
            assert stub.Release(request, timeout=LIMIT_S).found
