from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES, Tuning, make_policy
from router.policies.cost import CONTEXT, LOAD, STEPS


@dataclass(frozen=True)
class Server:
    order: int
    load: int = 0
    queued_tokens: int = 0
    context_tokens: int = 0

    @property
    def address(self) -> str:
        return f"10.0.0.{self.order}:9101"


@dataclass
class Ask:
    """A prompt of 1,000 tokens of which each server has what `cached` says."""

    session: str = ""
    prompt_tokens: int = 1000
    computes: bool = True
    cached: dict[int, int] = field(default_factory=dict)
    looked: int = 0

    def cached_tokens(self, candidates: Sequence[Server]) -> list[int]:
        self.looked += 1
        return [self.cached.get(c.order, 0) for c in candidates]


def pick(policy, servers: Sequence[Server], ask: Ask | None = None) -> Server:
    return servers[policy.choose(servers, ask or Ask()).place]


candidates = st.lists(st.integers(0, 20), min_size=1, max_size=8).map(
    lambda loads: [Server(order, load) for order, load in enumerate(loads)]
)


@pytest.mark.parametrize("name", POLICIES)
@given(rounds=st.lists(candidates, min_size=1, max_size=10), seed=st.integers(0, 100))
def test_choose_when_asked_then_it_is_one_of_the_candidates(name, rounds, seed):
    policy = make_policy(name, random.Random(seed))
    assert policy.name == name
    for servers in rounds:
        assert 0 <= policy.choose(servers, Ask(session=str(seed))).place < len(servers)


def test_make_policy_when_the_name_is_unknown_then_the_names_are_listed():
    with pytest.raises(ValueError, match="round_robin"):
        make_policy("best", random.Random(1))


def test_make_policy_when_the_name_is_an_alias_then_it_means_the_same():
    assert make_policy("least_loaded", random.Random(1)).name == "least_load"


def test_round_robin_when_servers_come_and_go_then_it_goes_on_after_the_last_one():
    policy = make_policy("round_robin", random.Random(1))
    a, b, c = Server(0), Server(3), Server(7)
    chosen = [pick(policy, [a, b, c]) for _ in range(4)]
    assert chosen == [a, b, c, a]
    assert pick(policy, [a, c]) == c
    assert pick(policy, [a, b, c]) == a


@given(st.integers(1, 8), st.integers(1, 10))
def test_round_robin_when_nothing_changes_then_shares_are_equal(servers, rounds):
    policy = make_policy("round_robin", random.Random(1))
    pool = [Server(i) for i in range(servers)]
    counts = Counter(pick(policy, pool) for _ in range(servers * rounds))
    assert set(counts.values()) == {rounds}


@given(candidates)
def test_least_load_when_loads_differ_then_none_is_lower(servers):
    chosen = pick(make_policy("least_load", random.Random(1)), servers)
    assert chosen.load == min(s.load for s in servers)


def test_least_load_when_all_are_idle_then_they_take_turns():
    policy = make_policy("least_load", random.Random(1))
    assert [pick(policy, [Server(0), Server(1), Server(2)]).order for _ in range(4)] == [0, 1, 2, 0]


def test_power_of_two_when_one_server_is_loaded_then_it_is_chosen_only_against_itself():
    policy = make_policy("power_of_two", random.Random(1))
    servers = [Server(0, 9), Server(1, 0), Server(2, 0)]
    assert Counter(pick(policy, servers).order for _ in range(300))[0] == 0
    assert pick(policy, [Server(4)]).order == 4


def test_random_when_asked_often_then_every_server_gets_its_share():
    policy = make_policy("random", random.Random(1))
    counts = Counter(pick(policy, [Server(i) for i in range(4)]).order for _ in range(4000))
    assert all(850 < counts[i] < 1150 for i in range(4))


# -- session


def placed(servers: Sequence[Server], sessions: int = 400) -> dict[str, Server]:
    policy = make_policy("session", random.Random(1))
    return {f"s{i}": pick(policy, servers, Ask(session=f"s{i}")) for i in range(sessions)}


def test_session_when_other_servers_come_and_go_then_it_stays():
    servers = [Server(i) for i in range(5)]
    before = placed(servers)
    gone = servers[2]
    left = [s for s in servers if s is not gone]
    after = placed(left)
    moved = {session for session in before if after[session] != before[session]}
    assert moved == {session for session, server in before.items() if server == gone}
    assert {after[session] for session in moved} == set(left), "those of the one that went are spread over the rest"
    more = placed([*servers, Server(5)])
    assert {more[session] for session in before if more[session] != before[session]} == {Server(5)}
    assert placed(servers) == before, "the one that is back has its sessions again"


def test_session_when_there_are_many_then_every_server_has_its_share():
    counts = Counter(placed([Server(i) for i in range(4)], 2000).values())
    assert all(420 < counts[Server(i)] < 580 for i in range(4))


def test_session_when_load_or_order_of_registration_differ_then_the_server_is_the_same():
    policy = make_policy("session", random.Random(1))
    servers = [Server(i) for i in range(4)]
    chosen = pick(policy, servers, Ask(session="a"))
    busy = [Server(i, load=100 if i == chosen.order else 0) for i in range(4)]
    assert pick(policy, busy[::-1], Ask(session="a")).order == chosen.order


def test_session_when_a_request_has_none_then_the_load_decides_and_it_says_so():
    policy = make_policy("session", random.Random(1))
    servers = [Server(0, load=3), Server(1, load=1), Server(2, load=2)]
    chosen = policy.choose(servers, Ask())
    assert (servers[chosen.place].order, chosen.fallback) == (1, True)
    assert not policy.choose(servers, Ask(session="a")).fallback


# -- cache_aware


def cache_aware(**tuning: float):
    return make_policy("cache_aware", random.Random(1), Tuning(**tuning))


def test_cache_aware_when_a_server_has_the_prefix_then_it_is_chosen_although_it_has_more_to_do():
    servers = [Server(0, load=10), Server(1, load=30), Server(2, load=0)]
    assert pick(cache_aware(), servers, Ask(cached={0: 400, 1: 600})).order == 1
    assert pick(cache_aware(), servers, Ask(cached={0: 600, 1: 600})).order == 0, "of equals the least loaded"


@pytest.mark.parametrize(("cached", "order"), [(300, 0), (301, 1)])
def test_cache_aware_when_no_more_than_the_threshold_is_cached_then_the_load_decides(cached, order):
    servers = [Server(0, load=1), Server(1, load=2)]
    chosen = cache_aware().choose(servers, Ask(cached={1: cached}))
    assert (servers[chosen.place].order, chosen.fallback) == (order, False)


@pytest.mark.parametrize(
    ("loads", "uneven"),
    [
        ((64, 0), False),  # no more than 64 apart
        ((65, 0), True),
        ((195, 130), False),  # 65 apart, but only by a half
        ((196, 130), True),
    ],
)
def test_cache_aware_when_loads_are_apart_by_both_thresholds_then_it_falls_back_to_load(loads, uneven):
    servers = [Server(order, load) for order, load in enumerate(loads)]
    ask = Ask(cached={0: 999})
    chosen = cache_aware().choose(servers, ask)
    assert (chosen.place, chosen.fallback) == ((1, True) if uneven else (0, False))
    assert ask.looked == (0 if uneven else 1)


def test_cache_aware_when_nothing_is_cached_and_all_are_idle_then_they_take_turns():
    policy = cache_aware()
    servers = [Server(i) for i in range(3)]
    assert [pick(policy, servers).order for _ in range(4)] == [0, 1, 2, 0]


# -- cost


@pytest.mark.parametrize(
    ("generates", "computes", "costs"),
    [
        (False, True, [600 + 50, 1000 + 0]),
        (True, False, [LOAD * 600 + STEPS * (4 + 2048 / CONTEXT), LOAD * 1000 + STEPS * 1]),
        (True, True, [650 + STEPS * (4 + 2048 / CONTEXT), 1000 + STEPS * 1]),
    ],
)
def test_cost_when_asked_then_it_is_that_of_the_formula(generates, computes, costs):
    policy = make_policy("cost", random.Random(1), generates=generates)
    servers = [Server(0, load=4, queued_tokens=50, context_tokens=2048), Server(1, load=1)]
    ask = Ask(computes=computes, cached={0: 400})
    assert policy.costs(servers, ask) == costs
    assert policy.choose(servers, ask).place == costs.index(min(costs))


def test_cost_when_the_one_with_the_prefix_has_much_to_compute_then_another_is_cheaper():
    policy = make_policy("cost", random.Random(1))
    ask = Ask(cached={0: 800})
    assert pick(policy, [Server(0, queued_tokens=700), Server(1)], ask).order == 0
    assert pick(policy, [Server(0, queued_tokens=900), Server(1)], ask).order == 1
