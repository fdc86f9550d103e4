"""What one rank holds of a model: pure arithmetic over the model's sizes.

Query heads, the inner features of the MLP and the rows of the vocabulary are cut into equal neighbouring parts, rank 0
first. Key and value heads are too, as long as there are enough of them; with more ranks than such heads, neighbouring
ranks hold copies of one (cache_store/geometry/tp_mapping.py, for transfers too). The vocabulary is padded to equal
parts: the last ranks may hold fewer rows than the others, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cache_store.geometry.tp_mapping import head_range
from engine.loader.errors import ModelLoadError
from engine.models.config import ModelConfig
from rpc.errors import BatonError

FLAG = "--tensor-parallel-size"
LARGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Indices [start, stop) of `total`."""

    total: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> Part:
        """The part of the elements, when each index stands for `width` neighbouring ones."""
        return Part(self.total * width, self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` holds."""

    rank: int
    size: int
    heads: Part  # query heads
    kv_heads: Part  # key and value heads; several ranks may hold the same one
    inner: Part  # features between the two products of the MLP
    vocabulary: Part  # rows of the embedding table and of the output head
    padded_rows: int  # rows of the vocabulary that every rank has room for

    def local(self, config: ModelConfig) -> ModelConfig:
        """The configuration with this rank's heads, for what computes with these alone."""
        return replace(config, num_heads=self.heads.count, num_kv_heads=self.kv_heads.count)


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """Raises ModelLoadError, which names --tensor-parallel-size, for a size that cannot share the model evenly."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is outside [0, {size})")
    problem = uneven(config, size)
    if problem:
        fitting = ", ".join(str(other) for other in fitting_sizes(config, range(1, LARGEST_SIZE + 1)))
        raise ModelLoadError(f"{FLAG} {size} {problem}; sizes that fit this model: {fitting}")
    rows = padded_rows(config.vocab_size, size)
    return Shard(
        rank,
        size,
        heads=even_part(config.num_heads, rank, size),
        kv_heads=Part(config.num_kv_heads, *head_range(config.num_kv_heads, size, rank)),
        inner=even_part(config.intermediate_size, rank, size),
        vocabulary=vocabulary_part(config.vocab_size, rank, size),
        padded_rows=rows,
    )


def even_part(total: int, rank: int, size: int) -> Part:
    """The rank's part of what `size` divides."""
    share, rest = divmod(total, size)
    if rest:
        raise ValueError(f"{total} cannot be cut into {size} equal parts")
    return Part(total, rank * share, (rank + 1) * share)


def padded_rows(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary per rank."""
    return -(-vocab_size // size)


def vocabulary_part(vocab_size: int, rank: int, size: int) -> Part:
    """The rows of `rank`, without padding."""
    rows = padded_rows(vocab_size, size)
    return Part(vocab_size, min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def uneven(config: ModelConfig, size: int) -> str:
    """Why `size` ranks cannot share the model; empty where they can."""
    checks: tuple[tuple[str, int, Callable[[int, int], bool]], ...] = (
        ("attention heads (num_attention_heads)", config.num_heads, _divides),
        ("key and value heads (num_key_value_heads)", config.num_kv_heads, _heads_divide),
        ("inner features of its MLP (intermediate_size)", config.intermediate_size, _divides),
    )
    for what, total, fits in checks:
        if not fits(total, size):
            return f"does not divide the model's {total} {what}"
    return ""


def fitting_sizes(config: ModelConfig, sizes: Iterable[int]) -> list[int]:
    """Those of `sizes` that can share the model."""
    return [size for size in sizes if not uneven(config, size)]


def _divides(total: int, size: int) -> bool:
    return total % size == 0


def _heads_divide(total: int, size: int) -> bool:
    try:
        head_range(total, size, 0)
    except BatonError:
        return False
    return True
