"""Which part of a model each rank holds: properties over all sizes that fit, and what is said of those that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.loader.errors import ModelLoadError
from engine.models.config import ModelConfig, load_config
from engine.parallel.shards import (
    LARGEST_SIZE,
    Part,
    Shard,
    fitting_sizes,
    padded_rows,
    shard_of,
    uneven,
    vocabulary_part,
)
from tests.unit.engine.tiny_models import tiny_model


def config_of(**sizes: int) -> ModelConfig:
    return replace(load_config(tiny_model("llama")), **sizes)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """A model, and a number of ranks that can share it."""
    size = draw(st.integers(1, LARGEST_SIZE))
    kv_heads = draw(st.integers(1, 16).filter(lambda heads: heads % size == 0 or size % heads == 0))
    multiple = size if kv_heads % size else 1
    config = config_of(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * multiple * draw(st.integers(1, 4)),
        intermediate_size=size * draw(st.integers(1, 40)),
        vocab_size=draw(st.integers(1, 500)),
    )
    return config, size


@given(models())
def test_shards_when_a_size_fits_then_parts_follow_each_other_and_cover_everything(
    model: tuple[ModelConfig, int],
) -> None:
    config, size = model
    shards = [shard_of(config, rank, size) for rank in range(size)]
    for total, parts in (
        (config.num_heads, [shard.heads for shard in shards]),
        (config.intermediate_size, [shard.inner for shard in shards]),
        (config.vocab_size, [shard.vocabulary for shard in shards]),
    ):
        assert [index for part in parts for index in range(part.start, part.stop)] == list(range(total))
        assert all(part.total == total for part in parts)
    assert len({shard.heads.count for shard in shards}) == len({shard.inner.count for shard in shards}) == 1
    held = [index for shard in shards for index in range(shard.kv_heads.start, shard.kv_heads.stop)]
    copies = max(1, size // config.num_kv_heads)
    assert held == [head for head in range(config.num_kv_heads) for _ in range(copies)]


@given(models())
def test_shards_when_a_size_fits_then_each_query_head_finds_its_key_head_on_its_rank(
    model: tuple[ModelConfig, int],
) -> None:
    config, size = model
    group = config.num_heads // config.num_kv_heads
    for rank in range(size):
        shard = shard_of(config, rank, size)
        local = shard.local(config)
        assert (local.num_heads, local.num_kv_heads) == (shard.heads.count, shard.kv_heads.count)
        own_group = local.num_heads // local.num_kv_heads
        for own in range(local.num_heads):
            head = shard.heads.start + own
            assert shard.kv_heads.start + own // own_group == head // group


@given(st.integers(1, 2000), st.integers(1, LARGEST_SIZE))
def test_vocabulary_when_it_does_not_divide_then_the_gathered_rows_begin_with_all_of_it(vocab: int, size: int) -> None:
    rows = padded_rows(vocab, size)
    gathered = []
    for rank in range(size):
        part = vocabulary_part(vocab, rank, size)
        assert 0 <= part.count <= rows
        gathered += [*range(part.start, part.stop), *[-1] * (rows - part.count)]
    assert gathered[:vocab] == list(range(vocab))
    assert rows * size - vocab < size


def test_shard_when_there_is_one_rank_then_holds_everything() -> None:
    config = config_of()
    shard = shard_of(config, 0, 1)
    assert shard == Shard(0, 1, Part(4, 0, 4), Part(2, 0, 2), Part(96, 0, 96), Part(384, 0, 384), 384)
    assert shard.local(config) == config


@pytest.mark.parametrize(
    ("sizes", "size", "said"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, 4, "does not divide the model's 6 attention heads (num_attention_heads)"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "does not divide the model's 3 key and value heads"),
        ({"intermediate_size": 98}, 4, "does not divide the model's 98 inner features of its MLP (intermediate_size)"),
    ],
)
def test_shard_when_sizes_do_not_divide_then_the_error_names_the_flag_and_what_fits(
    sizes: dict[str, int], size: int, said: str
) -> None:
    config = config_of(**sizes)
    with pytest.raises(ModelLoadError) as raised:
        shard_of(config, 0, size)
    assert str(raised.value).startswith(f"--tensor-parallel-size {size} {said}")
    fitting = fitting_sizes(config, range(1, LARGEST_SIZE + 1))
    assert str(raised.value).endswith("sizes that fit this model: " + ", ".join(map(str, fitting)))
    assert size not in fitting and all(uneven(config, other) == "" for other in fitting)


@pytest.mark.parametrize("rank", [-1, 2])
def test_shard_when_the_rank_is_none_of_the_size_then_refuses(rank: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        shard_of(config_of(), rank, 2)


def test_part_when_each_index_stands_for_several_then_counts_these() -> None:
    assert Part(4, 1, 3).times(16) == Part(64, 16, 48)
    assert Part(64, 16, 48).count == 32
