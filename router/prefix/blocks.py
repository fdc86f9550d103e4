"""The blocks of one prompt by their hashes, each computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rpc.block_hashes import TOKEN_BYTES, pack_tokens, packed_hash, root_hash

AHEAD = 4


class PromptBlocks:
    """The full blocks of `token_ids`, in order. Salt and digest as the servers take them (rpc/block_hashes.py)."""

    __slots__ = ("_bytes", "_hashes", "_packed", "_root", "count")

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "", embeddings: bytes = b"") -> None:
        self.count = len(token_ids) // block_size
        self._bytes = block_size * TOKEN_BYTES
        self._packed = pack_tokens(token_ids)
        self._root = root_hash(block_size, salt, embeddings)
        self._hashes: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        yield from self._hashes
        while len(self._hashes) < self.count:
            # A few at a time, which costs less than one by one.
            known = len(self._hashes)
            yield from self.first(known + AHEAD)[known:]

    def first(self, count: int) -> list[bytes]:
        """The hashes of the first `count` blocks, or of all when there are fewer."""
        hashes, packed, size = self._hashes, self._packed, self._bytes
        parent = hashes[-1] if hashes else self._root
        for start in range(len(hashes) * size, min(count, self.count) * size, size):
            parent = packed_hash(parent, packed[start : start + size])
            hashes.append(parent)
        return hashes[:count]
