"""Hashes of prefix-cache blocks, as the engines store them and as the router looks for them.

The hash of a block names its tokens, everything before them, the tenant's salt and the block size:

    h(0) = BLAKE2b-128(key, "root" | block size | salt)
           BLAKE2b-128(key, "rows" | block size | digest, 32 bytes | salt) of a prompt with embeddings of its own
    h(i) = BLAKE2b-128(key, h(i - 1) | the block's token ids, 4 bytes each, little-endian)

BLAKE2b is keyed and collision-resistant, so nobody can make a prompt that finds the blocks of another one,
and it is the same in every process. Token ids enter whole: ids that agree modulo a power of two differ here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4
_KEY = b"baton.kv.block.v1"
# Has taken the key in; to copy it takes half the time of making one.
_KEYED = blake2b(digest_size=HASH_BYTES, key=_KEY)


def root_hash(block_size: int, salt: str = "", embeddings: bytes = b"") -> bytes:
    """The parent of a prompt's first block: 16 bytes. Different salts never share a block.

    embeddings: the digest of a prompt's own embeddings, 32 bytes. It is no part of the salt, which is the client's
    to choose: no salt leads to the blocks of a prompt with embeddings.
    """
    kind = b"rows" if embeddings else b"root"
    text = kind + struct.pack("<I", block_size) + embeddings + salt.encode()
    return blake2b(text, digest_size=HASH_BYTES, key=_KEY).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block after the block with hash `parent`. Token ids are in [0, 2^32)."""
    return packed_hash(parent, pack_tokens(token_ids))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The token ids as they enter the hash: TOKEN_BYTES each."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def packed_hash(parent: bytes, packed: bytes) -> bytes:
    """`block_hash` of a block whose tokens are packed already."""
    state = _KEYED.copy()
    state.update(parent + packed)
    return state.digest()


class HashChain:
    """Hashes of the full blocks of one growing sequence of tokens, each computed once."""

    __slots__ = ("block_size", "hashes", "root")

    def __init__(self, block_size: int, salt: str = "", embeddings: bytes = b"") -> None:
        """salt, embeddings: see `root_hash`."""
        self.block_size = block_size
        self.root = root_hash(block_size, salt, embeddings)
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int], num_blocks: int) -> list[bytes]:
        """The hashes of at least the first `num_blocks` blocks of `tokens`, which only ever grow at their
        end."""
        hashes, size = self.hashes, self.block_size
        for index in range(len(hashes), num_blocks):
            parent = hashes[index - 1] if index else self.root
            hashes.append(block_hash(parent, tokens[index * size : (index + 1) * size]))
        return hashes

    def parent(self, index: int) -> bytes:
        """Hash of the block before block `index`."""
        return self.hashes[index - 1] if index else self.root
