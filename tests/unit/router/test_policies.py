from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES, make_policy


@dataclass(frozen=True)
class Server:
    order: int
    load: int = 0


candidates = st.lists(st.integers(0, 20), min_size=1, max_size=8).map(
    lambda loads: [Server(order, load) for order, load in enumerate(loads)]
)


@pytest.mark.parametrize("name", POLICIES)
@given(rounds=st.lists(candidates, min_size=1, max_size=10), seed=st.integers(0, 100))
def test_choose_when_asked_then_it_is_one_of_the_candidates(name, rounds, seed):
    policy = make_policy(name, random.Random(seed))
    assert policy.name == name
    for servers in rounds:
        assert 0 <= policy.choose(servers) < len(servers)


def test_make_policy_when_the_name_is_unknown_then_the_names_are_listed():
    with pytest.raises(ValueError, match="round_robin"):
        make_policy("best", random.Random(1))


def test_make_policy_when_the_name_is_an_alias_then_it_means_the_same():
    assert make_policy("least_loaded", random.Random(1)).name == "least_load"


def test_round_robin_when_servers_come_and_go_then_it_goes_on_after_the_last_one():
    policy = make_policy("round_robin", random.Random(1))
    a, b, c = Server(0), Server(3), Server(7)
    chosen = [[a, b, c][policy.choose([a, b, c])] for _ in range(4)]
    assert chosen == [a, b, c, a]
    assert [a, c][policy.choose([a, c])] == c
    assert [a, b, c][policy.choose([a, b, c])] == a


@given(st.integers(1, 8), st.integers(1, 10))
def test_round_robin_when_nothing_changes_then_shares_are_equal(servers, rounds):
    policy = make_policy("round_robin", random.Random(1))
    pool = [Server(i) for i in range(servers)]
    counts = Counter(policy.choose(pool) for _ in range(servers * rounds))
    assert set(counts.values()) == {rounds}


@given(candidates)
def test_least_load_when_loads_differ_then_none_is_lower(servers):
    chosen = servers[make_policy("least_load", random.Random(1)).choose(servers)]
    assert chosen.load == min(s.load for s in servers)


def test_least_load_when_all_are_idle_then_they_take_turns():
    policy = make_policy("least_load", random.Random(1))
    assert [policy.choose([Server(0), Server(1), Server(2)]) for _ in range(4)] == [0, 1, 2, 0]


def test_power_of_two_when_one_server_is_loaded_then_it_is_chosen_only_against_itself():
    policy = make_policy("power_of_two", random.Random(1))
    servers = [Server(0, 9), Server(1, 0), Server(2, 0)]
    assert Counter(policy.choose(servers) for _ in range(300))[0] == 0
    assert policy.choose([Server(4)]) == 0


def test_random_when_asked_often_then_every_server_gets_its_share():
    policy = make_policy("random", random.Random(1))
    counts = Counter(policy.choose([Server(i) for i in range(4)]) for _ in range(4000))
    assert all(850 < counts[i] < 1150 for i in range(4))
