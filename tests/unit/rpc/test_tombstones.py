from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.tombstones import Tombstones


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_hit_until_the_ttl_is_over() -> None:
    clock = Clock()
    stones = Tombstones(ttl_s=60, clock=clock)
    stones.add("k")
    clock.now = 59.9
    assert stones.hit("k")
    assert not stones.hit("other")
    clock.now = 60.0
    assert not stones.hit("k")
    assert len(stones) == 0


def test_add_again_renews() -> None:
    clock = Clock()
    stones = Tombstones(ttl_s=10, clock=clock)
    stones.add("a")
    clock.now = 5
    stones.add("b")
    stones.add("a")
    clock.now = 14
    assert stones.hit("a")
    assert stones.hit("b")
    clock.now = 15
    assert not stones.hit("a")
    assert not stones.hit("b")


def test_beyond_the_bound_the_oldest_is_dropped_and_counted() -> None:
    stones = Tombstones(max_entries=3, clock=Clock())
    for key in "abcde":
        stones.add(key)
    assert [stones.hit(key) for key in "abcde"] == [False, False, True, True, True]
    assert (len(stones), stones.dropped) == (3, 2)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 5)), max_size=40))
def test_matches_a_plain_model(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    stones = Tombstones(ttl_s=7, max_entries=100, clock=clock)
    model: dict[str, float] = {}
    for key, wait in steps:
        clock.now += wait
        stones.add(key)
        model[key] = clock.now + 7
        for other in "abcd":
            assert stones.hit(other) == (model.get(other, -1) > clock.now)


@pytest.mark.parametrize("kwargs", [{"ttl_s": 0}, {"max_entries": 0}])
def test_bounds_are_checked(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Tombstones(**kwargs)  # type: ignore[arg-type]
