"""The prefix index: its cap, what makes it smaller, and what it finds."""

from __future__ import annotations

import itertools
import random
import resource
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.prefix.blocks import PromptBlocks
from router.prefix.index import PrefixIndex
from rpc.block_hashes import HashChain
from tests.extent import extent

PAGE_BYTES = resource.getpagesize()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def prompts(count: int, rng: random.Random) -> Iterator[list[int]]:
    """Half of them begin like others do: one of 200 beginnings that change over time."""
    for number in range(count):
        own = [number, *rng.randbytes(31)]
        beginning = number // 2000 * 7 + rng.randrange(200)
        yield [beginning] * 32 + own if number % 2 else own + own


def test_r1_index_when_many_prompts_go_through_then_entries_stay_below_the_cap_and_memory_is_flat():
    cap, count = extent((4_000, 40_000), (20_000, 200_000))
    rng, clock = random.Random(5), Clock()
    index: PrefixIndex[str] = PrefixIndex(cap, clock=clock)
    servers = ["a", "b", "c", "d"]
    for server in servers:
        index.add(server)
    resident, found = [], 0
    for number, tokens in enumerate(prompts(count, rng)):
        blocks = PromptBlocks(tokens, 16)
        matches = index.matches(servers, blocks)
        assert len(index) <= cap
        found += max(matches)
        server = servers[matches.index(max(matches))]
        index.expect(server, blocks.first(blocks.count))
        assert len(index) <= cap
        if number % 4:
            index.store(server, blocks.first(blocks.count))
            assert len(index) <= cap
        if number % 100 == 0:
            index.drop(server, blocks.first(2))
        clock.now += 0.001
        if number % (count // 20) == 0 and number >= count // 2:
            resident.append(resident_bytes())
    assert len(index) == cap
    assert found > count // 2, "shared beginnings are found"
    assert max(resident) <= 1.05 * min(resident), resident
    assert len(index) * 80 < index.size_bytes() < len(index) * 400
    for left, server in zip((3, 2, 1, 0), servers, strict=True):
        index.remove(server)
        assert len(index.servers()) == left
    assert len(index) == 0


@pytest.mark.parametrize("way", ["expect", "store"])
def test_r1_index_when_one_prompt_exceeds_the_cap_then_its_first_blocks_stay(way):
    index: PrefixIndex[str] = PrefixIndex(10, clock=Clock())
    index.add("a")
    prompt = hashes(*range(25))
    getattr(index, way)("a", prompt)
    assert len(index) == 10
    assert index.matches(["a"], prompt) == [10]


def test_index_when_it_is_full_then_the_fullest_server_gives_up_what_was_used_least_recently():
    index: PrefixIndex[str] = PrefixIndex(4, clock=Clock())
    index.add("a")
    index.add("b")
    index.store("a", hashes(1, 2))
    index.store("a", hashes(3))
    index.store("b", hashes(1))
    index.expect("a", hashes(1))  # used again
    index.store("b", hashes(4))
    assert index.matches(["a", "b"], hashes(1, 2)) == [1, 1]
    assert index.matches(["a"], hashes(3)) == [1]
    assert len(index) == 4


def test_index_when_blocks_are_evicted_or_servers_emptied_or_removed_then_it_shrinks():
    index: PrefixIndex[str] = PrefixIndex(100, clock=Clock())
    for server in ("a", "b", "c"):
        index.add(server)
        index.store(server, hashes(1, 2, 3))
    index.drop("a", hashes(3, 9))
    assert (len(index), index.matches(["a", "b"], hashes(1, 2, 3))) == (8, [2, 3])
    index.clear("b")
    assert (len(index), index.entries_of("b")) == (5, 0)
    index.empty("c")
    assert (len(index), index.entries_of("c")) == (2, 0)
    index.remove("c")
    index.store("c", hashes(1))
    index.expect("c", hashes(1))
    index.empty("c")
    assert (len(index), index.matches(["c", "a"], hashes(1, 2, 3))) == (2, [0, 2])


def test_index_when_a_server_does_not_confirm_what_was_expected_then_it_is_forgotten():
    clock = Clock()
    index: PrefixIndex[str] = PrefixIndex(100, expected_s=30, clock=clock)
    index.add("a")
    index.expect("a", hashes(1, 2, 3))
    index.store("a", hashes(1, 2))
    assert (len(index), index.matches(["a"], hashes(1, 2, 3))) == (3, [3])
    clock.now = 31.0
    assert index.matches(["a"], hashes(1, 2, 3)) == [2]
    assert len(index) == 2


def test_index_when_hashes_are_looked_for_then_no_more_are_computed_than_are_found():
    index: PrefixIndex[str] = PrefixIndex(100, clock=Clock())
    index.add("a")
    taken = []

    def asked() -> Iterator[bytes]:
        for block_hash in hashes(*range(50)):
            taken.append(block_hash)
            yield block_hash

    assert index.matches([], asked()) == []
    assert index.matches(["b"], asked()) == [0]
    assert not taken
    index.store("a", hashes(0, 1))
    assert index.matches(["a", "b"], asked()) == [2, 0]
    assert len(taken) == 3


@pytest.mark.parametrize("cap", [0, -1])
def test_index_when_it_has_no_room_then_it_is_refused(cap):
    with pytest.raises(ValueError):
        PrefixIndex(cap)


@pytest.mark.parametrize(("salt", "embeddings"), [("", b""), ("tenant", b""), ("", b"d" * 32)])
def test_prompt_blocks_when_compared_with_the_engine_then_the_hashes_are_its_own(salt, embeddings):
    tokens = [7, 70_000, 8, 9, 1, 2, 3, 4, 5, 6, 2**32 - 1]
    chain = HashChain(4, salt, embeddings).extend(tokens, 2)
    blocks = PromptBlocks(tokens, 4, salt, embeddings)
    assert list(itertools.islice(blocks, 1)) == chain[:1]
    assert list(blocks) == blocks.first(9) == chain
    assert blocks.first(1) == chain[:1]


class IndexMachine(RuleBasedStateMachine):
    """Against plain sets, with room for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index: PrefixIndex[int] = PrefixIndex(10_000, expected_s=10, clock=self.clock)
        self.held: dict[int, set[bytes]] = {}
        self.expected: dict[int, dict[bytes, float]] = {}

    servers = st.integers(0, 2)
    chains = st.tuples(st.integers(0, 3), st.integers(1, 4)).map(lambda c: hashes(*range(c[0], c[0] + c[1])))

    @rule(server=servers)
    def add(self, server):
        self.index.add(server)
        self.held.setdefault(server, set())
        self.expected.setdefault(server, {})

    @rule(server=servers)
    def remove(self, server):
        self.index.remove(server)
        self.held.pop(server, None)
        self.expected.pop(server, None)

    @rule(server=servers, chain=chains)
    def store(self, server, chain):
        self.index.store(server, chain)
        if server in self.held:
            self.held[server] |= set(chain)
            for block in chain:
                self.expected[server].pop(block, None)

    @rule(server=servers, chain=chains)
    def drop(self, server, chain):
        self.index.drop(server, chain)
        if server in self.held:
            self.held[server] -= set(chain)

    @rule(server=servers, chain=chains)
    def expect(self, server, chain):
        self.index.expect(server, chain)
        if server in self.held:
            for block in set(chain) - self.held[server]:
                self.expected[server][block] = self.clock.now + 10

    @rule(server=servers)
    def clear(self, server):
        self.index.clear(server)
        if server in self.held:
            self.held[server], self.expected[server] = set(), {}

    @rule(server=servers)
    def empty(self, server):
        self.index.empty(server)
        if server in self.held:
            self.held[server] = set()

    @precondition(lambda self: self.held)
    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def same(self):
        for expected in self.expected.values():
            for block in [block for block, until in expected.items() if until <= self.clock.now]:
                del expected[block]
        for start in range(4):
            chain = hashes(*range(start, 8))
            counts = []
            for server in range(3):
                having = self.held.get(server, set()) | self.expected.get(server, {}).keys()
                counts.append(len(list(itertools.takewhile(having.__contains__, chain))))
            assert self.index.matches([0, 1, 2], chain) == counts
        assert len(self.index) == sum(map(len, self.held.values())) + sum(map(len, self.expected.values()))
        assert set(self.index.servers()) == self.held.keys()


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase
