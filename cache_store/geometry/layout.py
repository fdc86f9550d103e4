"""Geometry of a cache group: how many bytes a block has, and which of them belong to a share of the heads."""

from __future__ import annotations

from dataclasses import dataclass

from protos import common_pb2

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class GroupLayout:
    """Layout of one cache group on one rank: per layer one tensor [num_blocks, 2, num_kv_heads, block_size, head_dim].

    `num_kv_heads` are the heads of this rank. `block_bytes` is the size of one block of one layer: K and V, contiguous.
    """

    tag: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # float32, bfloat16, float16
    block_bytes: int
    total_kv_heads: int = 0  # heads of the whole model; 0: one rank holds them all

    def __post_init__(self) -> None:
        if not self.total_kv_heads:
            object.__setattr__(self, "total_kv_heads", self.num_kv_heads)
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"cache group {self.tag!r}: {name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"cache group {self.tag!r}: dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}")
        if self.block_bytes != self._expected_bytes():
            raise ValueError(
                f"cache group {self.tag!r}: block_bytes {self.block_bytes} differs from "
                f"2 x heads x block_size x head_dim x {DTYPE_BYTES[self.dtype]} = {self._expected_bytes()}"
            )

    def _expected_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @classmethod
    def of(
        cls,
        tag: str,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        total_kv_heads: int = 0,
    ) -> GroupLayout:
        """A layout with its block_bytes computed."""
        block_bytes = 2 * num_kv_heads * block_size * head_dim * DTYPE_BYTES.get(dtype, 1)
        return cls(tag, num_layers, num_kv_heads, head_dim, block_size, dtype, block_bytes, total_kv_heads)

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def partition_ranges(self, count: int, index: int) -> tuple[tuple[int, int], ...]:
        """Byte ranges [start, stop) inside a block of share `index` of `count` equal shares of the heads.

        One range for all heads; otherwise one in K and one in V. Raises ValueError when the heads cannot be shared so.
        """
        if count < 1 or not 0 <= index < count:
            raise ValueError(f"partition {index} of {count} does not exist")
        if count == 1:
            return ((0, self.block_bytes),)
        if self.num_kv_heads % count:
            raise ValueError(f"{self.num_kv_heads} heads cannot be divided into {count} equal shares")
        half = self.block_bytes // 2
        share = half // count
        start = share * index
        return ((start, start + share), (half + start, half + start + share))

    def to_proto(self) -> common_pb2.KvGroup:
        """The layout on the wire, where heads are those of the whole model."""
        return common_pb2.KvGroup(
            tag=self.tag,
            num_layers=self.num_layers,
            num_kv_heads=self.total_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class AgentIdentity:
    """What an agent says about its engine in a handshake."""

    engine_id: str
    model_fingerprint: str
    kv_dtype: str
    groups: tuple[GroupLayout, ...]
    tp_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not self.engine_id:
            raise ValueError("engine_id must not be empty")
        if not self.groups or len({group.tag for group in self.groups}) != len(self.groups):
            raise ValueError("an engine needs at least one cache group, and each tag once")
        if not 0 <= self.rank < self.tp_size:
            raise ValueError(f"rank {self.rank} is outside [0, tp_size {self.tp_size})")

    @property
    def heads(self) -> dict[str, int]:
        """KV heads of the whole model, by cache group."""
        return {group.tag: group.total_kv_heads for group in self.groups}

    def group(self, tag: str) -> GroupLayout | None:
        return next((group for group in self.groups if group.tag == tag), None)
