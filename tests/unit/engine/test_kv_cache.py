"""The KV cache against a plain dictionary model: ledger, prefix hits, eviction order, events."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache.block_pool import Hold
from engine.kv_cache.cache import KvCache, blocks_for
from engine.messages import KvGroupInfo
from rpc.block_hashes import block_hash, root_hash
from tests.extent import extent

SALTS = ("", "", "", "tenant")
BASES = ((0,) * 14, (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1), (1,) * 14)
# Prompts share long prefixes, so that hits and duplicates are common.
PROMPTS = st.builds(
    lambda base, length, tail: [*base[:length], *tail],
    st.sampled_from(BASES), st.sampled_from([2, 4, 5, 6, 8, 9, 12]), st.lists(st.integers(0, 2), max_size=2),
)  # fmt: skip


def extends(longer, prefix):
    return longer[0] == prefix[0] and longer[1][: len(prefix[1])] == prefix[1]


def group(tag="full", block_size=2):
    return KvGroupInfo(tag, 2, 1, 8, block_size, "float32")


class KvCacheMachine(RuleBasedStateMachine):
    """Random requests on a small pool. The model knows every block's content and the order of use by prefix."""

    @initialize(num_blocks=st.integers(5, 20), sizes=st.sampled_from([(2,), (2, 2), (2, 4)]))
    def start(self, num_blocks, sizes):
        self.cache = KvCache([group(f"g{i}", size) for i, size in enumerate(sizes)], num_blocks)
        self.num_blocks = num_blocks
        self.open = []  # [allocation, tokens, salt, state]
        self.content = {}  # (tag, block) -> (salt, tokens up to its end)
        self.nodes = {info.tag: {} for info in self.cache.groups}  # prefix -> [block, time of last use]
        self.tick = 0

    # -- model ----------------------------------------------------------------------------------------------

    def holders(self, tag):
        held = {}
        for allocation, _, _, state in self.open:
            blocks = allocation.groups[tag]
            for index, block in enumerate(blocks.blocks):
                arriving = blocks.receiving[0] <= index < blocks.receiving[1]
                if state == "quarantined" and not arriving:
                    continue
                held.setdefault(block, set()).add("receiving" if arriving and state == "running" else state)
        return held

    def state_of(self, tag, block, held):
        for state in ("quarantined", "receiving", "running", "staged"):
            if state in held.get(block, ()):
                return state
        return "cached" if any(node[0] == block for node in self.nodes[tag].values()) else "free"

    def evict_like_the_cache(self, tag, count, held_blocks):
        """Removes `count` nodes from the model in the one right order."""
        nodes = self.nodes[tag]
        for _ in range(count):
            leaves = [
                (last_use, prefix)
                for prefix, (block, last_use) in nodes.items()
                if block not in held_blocks and not any(extends(other, prefix) and other != prefix for other in nodes)
            ]
            del nodes[min(leaves)[1]]

    def let_go(self, tag, blocks, before):
        """Blocks that lose their last holder take the next times of use, from the last block to the first."""
        after = self.holders(tag)
        by_block = {node[0]: node for node in self.nodes[tag].values()}
        for block in reversed(blocks):
            if block in before and block not in after:
                self.tick += 1
                if block in by_block:
                    by_block[block][1] = self.tick

    def count_states(self, tag, held):
        counts = dict.fromkeys(("free", "running", "staged", "receiving", "quarantined", "cached"), 0)
        for block in range(1, self.num_blocks + 1):
            counts[self.state_of(tag, block, held)] += 1
        return counts

    def free_blocks(self, tag, held):
        return self.count_states(tag, held)["free"]

    def longest_hit(self, tokens, salt, limit):
        best = 0
        step = max(info.block_size for info in self.cache.groups)
        for hit in range(step, limit + 1, step):
            for info in self.cache.groups:
                for end in range(info.block_size, hit + 1, info.block_size):
                    if (salt, tuple(tokens[:end])) not in self.nodes[info.tag]:
                        return best
            best = hit
        return best

    # -- rules ----------------------------------------------------------------------------------------------

    @rule(
        tokens=PROMPTS,
        salt=st.sampled_from(SALTS),
        extra=st.integers(0, 3),
        receive=st.booleans(),
        hits=st.sampled_from(["all", "but the last token", "none"]),
        then=st.sampled_from(["serve", "serve", "compute", "wait"]),
    )
    def acquire(self, tokens, salt, extra, receive, hits, then):
        self.acquire_one(tokens, salt, extra, receive, hits, then)

    def acquire_one(self, tokens, salt, extra, receive, hits, then):
        max_hit = {"all": len(tokens), "but the last token": len(tokens) - 1, "none": 0}[hits]
        hit = self.longest_hit(tokens, salt, max_hit)
        held = {info.tag: self.holders(info.tag) for info in self.cache.groups}
        allocation = self.cache.acquire(tokens, self.cache.chains(salt), max_hit=max_hit, extra=extra, receive=receive)
        if allocation is None:
            # At least one group must really lack blocks.
            lacking = []
            for info in self.cache.groups:
                shared = {self.nodes[info.tag][(salt, tuple(tokens[:end]))][0]
                          for end in range(info.block_size, hit + 1, info.block_size)}  # fmt: skip
                pinned = set(held[info.tag]) | shared
                prefixes_in_use = {
                    (prefix[0], prefix[1][:end])
                    for prefix, node in self.nodes[info.tag].items() if node[0] in pinned
                    for end in range(1, len(prefix[1]) + 1)
                }  # fmt: skip
                evictable = sum(prefix not in prefixes_in_use for prefix in self.nodes[info.tag])
                available = self.free_blocks(info.tag, held[info.tag]) + evictable
                lacking.append(blocks_for(len(tokens) + extra, info.block_size) - len(shared) > available)
            assert any(lacking)
            return
        assert allocation.cached_tokens == hit
        for info in self.cache.groups:
            tag, size = info.tag, info.block_size
            blocks = allocation.table(tag)
            shared = hit // size
            assert len(blocks) == blocks_for(len(tokens) + extra, size)
            assert 0 not in blocks
            assert len(set(blocks)) == len(blocks)
            for index, block in enumerate(blocks[:shared]):
                assert self.content[(tag, block)] == (salt, tuple(tokens[: (index + 1) * size]))
            fresh = blocks[shared:]
            assert not set(fresh) & set(held[tag])
            free = self.free_blocks(tag, held[tag])
            pinned = set(held[tag]) | set(blocks[:shared])
            self.evict_like_the_cache(tag, max(0, len(fresh) - free), pinned)
            # What the model evicted is what the cache gave out.
            assert not set(fresh) & {node[0] for node in self.nodes[tag].values()}
            for block in fresh:
                self.content.pop((tag, block), None)
        self.open.append([allocation, list(tokens), salt, "running"])
        if then == "compute":
            if receive:
                self.cache.received(allocation)
            self.commit_tokens(self.open[-1], len(tokens))
        elif then == "serve":
            if receive:
                self.cache.received(allocation)
            self.commit_tokens(self.open[-1], len(tokens))
            self.free_entry(self.open[-1])

    @rule(tokens=PROMPTS, tails=st.lists(st.integers(3, 5), min_size=2, max_size=3, unique=True))
    def compute_side_by_side(self, tokens, tails):
        """Requests with equal beginnings that do not see each other's blocks; the first ends before the others."""
        at = len(self.open)
        for tail in tails:
            self.acquire_one([*tokens, tail, tail], "", 0, False, "none", "wait")
        entries = self.open[at:]
        for entry in entries:
            self.commit_tokens(entry, len(tokens))
        if entries:
            self.free_entry(entries[0])
        for entry in entries[1:]:
            self.commit_tokens(entry, len(entry[1]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, data, more):
        entry = data.draw(st.sampled_from(self.open))
        allocation, tokens, _, state = entry
        if state != "running" or any(g.receiving[1] > g.receiving[0] for g in allocation.groups.values()):
            return
        held = {info.tag: self.holders(info.tag) for info in self.cache.groups}
        before = {tag: list(blocks.blocks) for tag, blocks in allocation.groups.items()}
        capacity = min(len(before[info.tag]) * info.block_size for info in self.cache.groups)
        grown = self.cache.grow(allocation, len(tokens) + len(more))
        if not grown:
            assert {tag: blocks.blocks for tag, blocks in allocation.groups.items()} == before
            # A group that could grow gave its blocks back; what it evicted for them stays evicted.
            for info in self.cache.groups:
                index = self.cache._groups[info.tag].pool.index
                for prefix, node in list(self.nodes[info.tag].items()):
                    if index.hash_of(node[0]) is None:
                        del self.nodes[info.tag][prefix]
            return
        assert grown or len(tokens) + len(more) > capacity
        for info in self.cache.groups:
            tag = info.tag
            fresh = allocation.table(tag)[len(before[tag]) :]
            missing = max(0, len(fresh) - self.free_blocks(tag, held[tag]))
            self.evict_like_the_cache(tag, missing, set(held[tag]))
            for block in fresh:
                assert block not in held[tag]
                self.content.pop((tag, block), None)
        tokens.extend(more)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data):
        entry = data.draw(st.sampled_from(self.open))
        allocation, tokens, _, state = entry
        if state != "running" or any(g.receiving[1] > g.receiving[0] for g in allocation.groups.values()):
            return
        self.commit_tokens(entry, data.draw(st.sampled_from([len(tokens), len(tokens) // 2, len(tokens) - 1])))

    def commit_tokens(self, entry, done):
        allocation, tokens, salt, _ = entry
        for info in self.cache.groups:
            tag, size = info.tag, info.block_size
            blocks = allocation.groups[tag]
            for index in range(done // size):
                self.content[(tag, blocks.blocks[index])] = (salt, tuple(tokens[: (index + 1) * size]))
            if done // size > blocks.committed:
                for index in range(done // size):
                    prefix = (salt, tuple(tokens[: (index + 1) * size]))
                    self.nodes[tag].setdefault(prefix, [blocks.blocks[index], 0])
        self.cache.commit(allocation, tokens, done)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), to=st.sampled_from(["staged", "received", "quarantined"]))
    def change(self, data, to):
        entry = data.draw(st.sampled_from(self.open))
        allocation, _, _, state = entry
        arriving = any(g.receiving[1] > g.receiving[0] for g in allocation.groups.values())
        if state != "running":
            return
        if to == "staged" and not arriving:
            self.cache.stage(allocation)
            entry[3] = "staged"
        elif to == "received" and arriving:
            self.cache.received(allocation)
        elif to == "quarantined" and arriving:
            before = {info.tag: self.holders(info.tag) for info in self.cache.groups}
            tables = {tag: (list(g.blocks), g.receiving) for tag, g in allocation.groups.items()}
            self.cache.quarantine(allocation)
            entry[3] = "quarantined"
            for tag, (blocks, (first, last)) in tables.items():
                self.let_go(tag, blocks[:first] + blocks[last:], before[tag])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), twice=st.booleans())
    def free(self, data, twice):
        self.free_entry(data.draw(st.sampled_from(self.open)), twice)

    def free_entry(self, entry, twice=False):
        allocation = entry[0]
        before = {info.tag: self.holders(info.tag) for info in self.cache.groups}
        tables = {tag: list(blocks.blocks) for tag, blocks in allocation.groups.items()}
        self.cache.free(allocation)
        if twice:
            self.cache.free(allocation)
        self.open.remove(entry)
        for tag, blocks in tables.items():
            self.let_go(tag, blocks, before[tag])

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def flush(self, really):
        if not really:
            return
        for info in self.cache.groups:
            held = set(self.holders(info.tag))
            nodes = self.nodes[info.tag]
            needed = {prefix for prefix, node in nodes.items() if node[0] in held}
            for prefix in list(nodes):
                if not any(extends(other, prefix) for other in needed):
                    del nodes[prefix]
        self.cache.flush()

    # -- invariants -----------------------------------------------------------------------------------------

    @invariant()
    def ledger_and_index_match_the_model(self):
        if not hasattr(self, "cache"):
            return
        for info, ledger in zip(self.cache.groups, self.cache.ledgers(), strict=True):
            held = self.holders(info.tag)
            counts = self.count_states(info.tag, held)
            assert {name: getattr(ledger, name) for name in counts} == counts
            assert ledger.total == self.num_blocks == sum(counts.values())
            assert ledger.reserved == 1
            pool = self.cache._groups[info.tag].pool
            assert len(pool.index) == len(self.nodes[info.tag])
            for block in range(1, self.num_blocks + 1):
                assert (pool.holders(block) > 0) == (block in held)
                cached = any(node[0] == block for node in self.nodes[info.tag].values())
                assert (pool.index.hash_of(block) is not None) == cached
            pinned = {
                (prefix[0], prefix[1][:end])
                for prefix, node in self.nodes[info.tag].items() if node[0] in held
                for end in range(1, len(prefix[1]) + 1)
            }  # fmt: skip
            evictable = sum(prefix not in pinned for prefix in self.nodes[info.tag])
            assert pool.index.evictable == evictable
            above = {node[0] for prefix, node in self.nodes[info.tag].items() if prefix in pinned}
            assert evictable + len(set(held) | above) + counts["free"] == ledger.total

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for allocation, *_ in self.open:
            self.cache.free(allocation)
        for ledger in self.cache.ledgers():
            assert ledger.free + ledger.cached == ledger.total
        # The whole pool is usable again.
        tokens = list(range(10, 10 + self.num_blocks * 2))
        assert self.cache.acquire(tokens, self.cache.chains("new"), max_hit=0) is not None


KvCacheMachine.TestCase.settings = settings(
    max_examples=extent(120, 200),  # of 45 steps: 5,000 of them at least
    stateful_step_count=45,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_c2_kv_cache_against_a_plain_model = KvCacheMachine.TestCase


def make(num_blocks=8, block_size=4, **options):
    return KvCache([group("full", block_size)], num_blocks, **options)


def ledger(cache):
    return cache.ledgers()[0]


def run(cache, tokens, salt="", keep=False):
    allocation = cache.acquire(tokens, cache.chains(salt), max_hit=len(tokens) - 1)
    cache.commit(allocation, tokens, len(tokens))
    if not keep:
        cache.free(allocation)
    return allocation


def test_acquire_when_the_whole_prompt_is_cached_then_max_hit_leaves_tokens_to_compute():
    cache = make()
    tokens = list(range(8))
    run(cache, tokens)
    assert run(cache, tokens).cached_tokens == 4
    assert cache.acquire(tokens, cache.chains(), max_hit=8).cached_tokens == 8


def test_acquire_when_it_fails_then_nothing_changes():
    cache = make(num_blocks=4)
    held = run(cache, list(range(8)), keep=True)
    run(cache, [9, 9, 9, 9])
    before, releases = ledger(cache), cache.releases
    assert cache.acquire(list(range(16)), cache.chains(), max_hit=15, extra=9) is None
    assert ledger(cache) == before
    assert cache.releases == releases
    assert cache.acquire([9, 9, 9, 9, 1], cache.chains(), max_hit=4).cached_tokens == 4
    cache.free(held)


def test_receiving_blocks_when_the_request_is_cancelled_then_they_stay_until_freed():
    cache = make()
    run(cache, list(range(4)))
    allocation = cache.acquire(list(range(10)), cache.chains(), max_hit=10, extra=4, receive=True)
    assert (ledger(cache).receiving, ledger(cache).running) == (2, 2)
    cache.quarantine(allocation)
    assert (ledger(cache).quarantined, ledger(cache).running, ledger(cache).cached) == (2, 0, 1)
    cache.free(allocation)
    assert (ledger(cache).free, ledger(cache).cached) == (7, 1)


def test_duplicate_block_when_two_requests_compute_the_same_prompt_then_it_is_registered_once():
    cache = make()
    first = cache.acquire(list(range(4)), cache.chains(), max_hit=0)
    second = cache.acquire(list(range(8)), cache.chains(), max_hit=0)
    cache.commit(first, list(range(4)), 4)
    cache.commit(second, list(range(8)), 8)
    cache.free(first)
    # The first request's block is the parent of a block in use: it is cached, but not evictable.
    assert ledger(cache).cached == 1
    rest = cache.acquire([7] * 20, cache.chains(), max_hit=0)
    assert rest is not None
    assert cache.acquire([8], cache.chains(), max_hit=0) is None
    cache.free(second)
    # The duplicate has no hash, so it is free; the two registered blocks are cached.
    assert (ledger(cache).free, ledger(cache).cached, ledger(cache).running) == (1, 2, 5)


def test_commit_when_the_duplicated_parent_was_evicted_since_then_the_own_block_takes_its_place():
    cache = make(num_blocks=4)
    first = cache.acquire([1] * 4, cache.chains(), max_hit=0)
    second = cache.acquire([1] * 4 + [2] * 4, cache.chains(), max_hit=0)
    cache.commit(first, [1] * 4, 4)
    cache.commit(second, [1] * 4 + [2] * 4, 4)
    cache.free(first)
    other = cache.acquire([3] * 8, cache.chains(), max_hit=0)
    assert [event.removed for event in cache.take_events() if event.removed]
    cache.commit(second, [1] * 4 + [2] * 4, 8)
    cache.free(second)
    assert cache.acquire([1] * 4 + [2] * 4, cache.chains(), max_hit=8).cached_tokens == 8
    cache.free(other)


def test_eviction_when_blocks_are_needed_then_the_oldest_leaf_goes_before_its_parent():
    cache = make(num_blocks=5, block_size=2)
    run(cache, [1, 1, 2, 2])
    run(cache, [1, 1, 3, 3])
    run(cache, [4, 4])
    cache.take_events()
    root = block_hash(root_hash(2), [1, 1])
    order = []
    for _ in range(4):
        held = cache.acquire([0] * (2 * (ledger(cache).free + 1)), cache.chains(), max_hit=0)
        order += [name for event in cache.take_events() for name in event.removed]
        cache.free(held)
    assert order == [
        block_hash(root, [2, 2]).hex(),
        block_hash(root, [3, 3]).hex(),
        root.hex(),
        block_hash(root_hash(2), [4, 4]).hex(),
    ]


def test_eviction_when_a_leaf_was_used_again_then_its_earlier_use_does_not_count():
    cache = make(num_blocks=3, block_size=2)
    run(cache, [1, 1])
    run(cache, [2, 2])
    cache.free(cache.acquire([1, 1], cache.chains(), max_hit=2))
    cache.take_events()
    cache.free(cache.acquire([0] * 4, cache.chains(), max_hit=0))
    assert [event.removed for event in cache.take_events()] == [[block_hash(root_hash(2), [2, 2]).hex()]]


def test_evictable_when_two_requests_use_children_of_an_unheld_block_then_it_waits_for_both():
    cache = make(num_blocks=8, block_size=2)
    index = cache._groups["full"].pool.index
    first, *others = [cache.acquire([1, 1, tail, tail], cache.chains(), max_hit=0) for tail in (2, 3, 4)]
    cache.commit(first, [1, 1, 2, 2], 2)
    cache.free(first)
    assert index.evictable == 1
    for allocation, tail in zip(others, (3, 4), strict=True):
        cache.commit(allocation, [1, 1, tail, tail], 4)
    assert index.evictable == 0
    cache.free(others[0])
    assert index.evictable == 1
    cache.free(others[1])
    assert index.evictable == 3
    assert ledger(cache).cached == 3


def test_events_when_blocks_come_and_go_then_a_follower_knows_the_cache():
    cache = make(num_blocks=4, block_size=2)
    run(cache, [1, 1, 2, 2])
    (event,) = cache.take_events()
    first = block_hash(root_hash(2), [1, 1])
    assert event.stored == [first.hex(), block_hash(first, [2, 2]).hex()]
    assert event.parent == ""
    run(cache, [1, 1, 2, 2, 3, 3])
    (event,) = cache.take_events()
    assert event.parent == block_hash(first, [2, 2]).hex()
    held = cache.acquire([1, 1], cache.chains(), max_hit=2)
    cache.flush()
    assert [len(event.removed) for event in cache.take_events()] == [2]
    cache.free(held)
    cache.flush()
    assert [event.cleared for event in cache.take_events()] == [True]
    assert ledger(cache).free == 4


def test_prefix_caching_when_it_is_off_then_nothing_is_cached():
    cache = make(prefix_caching=False)
    run(cache, list(range(12)))
    assert run(cache, list(range(12))).cached_tokens == 0
    assert ledger(cache).free == 8
    assert cache.take_events() == []


def test_pool_when_a_block_is_released_twice_then_it_refuses():
    cache = make()
    pool = cache._groups["full"].pool
    blocks = pool.allocate(2, Hold.RUNNING)
    pool.release(blocks, Hold.RUNNING)
    with pytest.raises(ValueError, match="no holder"):
        pool.release(blocks, Hold.RUNNING)
    with pytest.raises(ValueError, match="is free"):
        pool.share(blocks, Hold.RUNNING)


def test_generation_when_blocks_are_given_out_again_then_it_rises():
    cache = make()
    generations = [run(cache, [1, 2, 3]).generation for _ in range(3)]
    assert generations == sorted(set(generations))
