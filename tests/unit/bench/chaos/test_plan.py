"""What a campaign asks and which faults it has: a function of the seed, and valid."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.chaos.cluster import Layout
from bench.chaos.faults import BLOWS, Kind, armament, blows
from bench.chaos.memory import MIB, Life
from bench.chaos.workload import Asks, Manner, make_cases
from cache_store.transports import TRANSPORTS
from rpc import fault_points, faults

SERVERS = {"prefill": 2, "decode": 2}
ALL = frozenset(Kind)
FILE = Path("/no/such/file")


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_armament_then_every_fault_of_it_exists_in_that_process(role: str) -> None:
    spec = armament(role, ALL, 7, FILE, intensity=1000.0)
    faults.parse(spec)
    letter = role[0].upper()
    for part in spec.split(";"):
        point = fault_points.find(part.partition(":")[0])
        assert point is not None and letter in point.of.split(), part


def test_armament_when_kinds_are_left_out_then_none_of_their_faults_is_armed() -> None:
    assert armament("prefill", frozenset({Kind.KILL, Kind.LEAVE}), 1, FILE) == ""
    assert re.findall(r":(\w+)", armament("prefill", frozenset({Kind.CORRUPT}), 1, FILE)) == ["corrupt"] * 2


def test_points_then_a_campaign_arms_every_kind_somewhere() -> None:
    armed = ";".join(armament(role, ALL, 1, FILE) for role in ("router", "prefill", "decode"))
    assert set(re.findall(r"[\w.]+:(\w+)", armed)) == {"delay", "raise", "drop", "duplicate", "corrupt", "full", "jump"}


def test_points_when_prefill_servers_start_again_and_again_then_each_time_one_of_two_has_none() -> None:
    layout = Layout("model", FILE, FILE, "run", 1, ALL)
    for starts in (1, 2, 3):
        assert [layout.has_points("prefill", index, starts) for index in (0, 1)] == [starts % 2 == 1, starts % 2 == 0]
        assert all(layout.has_points(role, index, starts) for role in ("decode", "router") for index in (0, 1))


def test_blows_then_the_seed_says_which_and_every_server_and_part_has_its_turn() -> None:
    first = list(itertools.islice(blows(3, ALL, SERVERS, 2.0), 400))
    assert first == list(itertools.islice(blows(3, ALL, SERVERS, 2.0), 400))
    assert first != list(itertools.islice(blows(4, ALL, SERVERS, 2.0), 400))
    assert {blow.kind for blow in first} == set(BLOWS)
    assert {(blow.role, blow.index) for blow in first} == set(itertools.product(("prefill", "decode"), (0, 1)))
    assert {blow.part for blow in first if blow.kind is Kind.KILL} == {"front", "engine"}
    assert 1.5 < sum(blow.after_s for blow in first) / len(first) < 2.5


def test_blows_when_none_is_wanted_then_there_is_none() -> None:
    assert list(blows(3, frozenset({Kind.DROP}), SERVERS, 2.0)) == []


@pytest.mark.parametrize("decode_servers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("kinds", [ALL, {Kind.KILL}, {Kind.RESTART, Kind.PAUSE}])
def test_first_blows_when_transports_are_mixed_then_each_decode_server_starts_again_until_all_were_had(
    kinds: frozenset[Kind], decode_servers: int
) -> None:
    layout = Layout(
        "model", FILE, FILE, "run", 1, frozenset(kinds), decode_servers=decode_servers, transports=TRANSPORTS
    )
    schedule = blows(1, kinds, {"prefill": 2, "decode": decode_servers}, 2.0, layout.turns)
    first = list(itertools.takewhile(lambda blow: blow.waits, schedule))
    assert {blow.turn for blow in first if blow.kind is not Kind.PAUSE} == set(range(1, layout.turns + 1))
    pauses = [blow for blow in first if blow.kind is Kind.PAUSE]
    assert len(pauses) == (Kind.PAUSE in kinds)
    starts = Counter(dict.fromkeys(range(decode_servers), 1))
    had = {layout.transport_of(index, 1) for index in starts}
    for blow in first:
        if blow.kind is not Kind.PAUSE:
            assert blow.role == "decode"
            assert blow.turn == starts[blow.index]
            starts[blow.index] += 1
            had.add(layout.transport_of(blow.index, starts[blow.index]))
    assert had == set(TRANSPORTS)
    if decode_servers == 2:
        assert {blow.kind for blow in first} == set(kinds) & set(BLOWS)


def test_asks_then_the_seed_says_what_is_asked_and_how_clients_behave() -> None:
    cases = make_cases(5, 32, 384, 300)
    assert cases == make_cases(5, 32, 384, 300)
    assert {case.seed is None for case in cases} == {True, False}
    assert {case.max_tokens == 1 for case in cases} == {True, False}
    manners = [manner for manner in Manner if manner is not Manner.STAYS]
    first, again = Asks(5, cases, manners, 0.2), Asks(5, cases, manners, 0.2)
    asked = [first.next() for _ in range(500)]
    assert asked == [again.next() for _ in range(500)]
    assert {ask.manner for ask in asked} == set(Manner)
    assert {ask.door for ask in asked} == {"grpc", "http"}
    assert 60 < sum(ask.manner is not Manner.STAYS for ask in asked) < 140
    assert max(Counter(ask.request_id for ask in asked).values()) == 1


@pytest.mark.parametrize(("mib_per_minute", "wrong"), [(0.0, False), (4.0, False), (60.0, True)])
def test_memory_when_a_process_grows_after_its_warm_up_then_it_is_named(mib_per_minute: float, wrong: bool) -> None:
    warm_up = [100, 180, 190, 195]  # of the first seconds: no growth
    sizes = warm_up + [200 + mib_per_minute * second / 60 for second in range(8, 300, 2)]
    life = Life("decode-0", [(2.0 * index, int(size * MIB)) for index, size in enumerate(sizes)])
    assert life.growth()[1] == pytest.approx(mib_per_minute, abs=0.5)
    assert bool(life.too_much()) == wrong


def test_memory_when_a_process_is_young_then_nothing_is_said() -> None:
    assert Life("decode-0", [(float(second), second * 100 * MIB) for second in range(1, 20)]).too_much() == ""


def test_documentation_then_its_table_has_every_point_with_its_actions() -> None:
    text = (Path(__file__).resolve().parents[4] / "docs" / "chaos.md").read_text()
    rows = {row[0]: row for row in re.findall(r"^\| `([\w.]+)` \| ([RPD ]+) \| (.*?) \| (.*?) \| (.*) \|$", text, re.M)}
    found = [
        (name, of, tuple(re.findall(r"\w+", labels)), tuple(re.findall(r"\w+", actions)), what)
        for name, of, labels, actions, what in rows.values()
    ]
    product = [point for point in fault_points.points() if point.of]  # tests add points of their own
    assert found == [(point.name, point.of, point.labels, point.actions, point.what) for point in product]
