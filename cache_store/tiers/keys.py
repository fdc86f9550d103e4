"""The name of a block in a tier: equal names mean equal content, whoever computed it.

    key = BLAKE2b-128("baton.kv.tier.v1", domain | hash of the block)

The hash of the block names its tokens, everything before them and the tenant's salt (`rpc.block_hashes`). The domain
names everything else on which the bytes depend: the weights, the form of a block, the rank's share of the heads, and
what computes. So servers that differ in any of it never find each other's blocks, even in one directory or one store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b

from cache_store.geometry.layout import GroupLayout
from cache_store.tiers.record import KEY_BYTES

_KEY = b"baton.kv.tier.v1"


class TierKeys:
    """Names of the blocks of one cache group of one rank."""

    def __init__(
        self, model: str, layout: GroupLayout, *, tp_rank: int = 0, tp_size: int = 1, numerics: str = ""
    ) -> None:
        """model: a name for weights and configuration. numerics: what computes, as far as it has a say in the last
        bits: device, attention backend, versions."""
        state = blake2b(digest_size=KEY_BYTES, key=_KEY)
        texts = (model, layout.dtype, layout.tag, numerics)
        for text in texts:  # each with its length, so that no two domains run together
            encoded = text.encode()
            state.update(struct.pack("<I", len(encoded)) + encoded)
        state.update(
            struct.pack(
                "<8Q",
                layout.num_layers,
                layout.num_kv_heads,
                layout.total_kv_heads,
                layout.head_dim,
                layout.block_size,
                layout.block_bytes,
                tp_rank,
                tp_size,
            )
        )
        self._domain = state  # has taken the domain in; copied for each key

    def key(self, block_hash: bytes) -> bytes:
        """KEY_BYTES bytes."""
        state = self._domain.copy()
        state.update(block_hash)
        return state.digest()

    def keys(self, block_hashes: Iterable[bytes]) -> list[bytes]:
        return [self.key(block_hash) for block_hash in block_hashes]
