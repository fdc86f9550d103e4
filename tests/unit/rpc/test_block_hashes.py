"""Block hashes: full token ids, chained, salted, the same in every process."""

import subprocess
import sys

import pytest

from engine.kv_cache.cache import KvCache
from engine.messages import KvGroupInfo
from rpc.block_hashes import HASH_BYTES, HashChain, block_hash, root_hash

BLOCK = [5, 6, 7, 8]


def test_hash_when_ids_agree_modulo_a_power_of_two_then_it_differs():
    root = root_hash(4)
    seen = {block_hash(root, BLOCK)}
    for shift in (256, 65_536, 1 << 24):
        seen.add(block_hash(root, [token + shift for token in BLOCK]))
        seen.add(block_hash(root, [BLOCK[0] + shift, *BLOCK[1:]]))
    assert len(seen) == 7


def test_hash_when_parent_order_salt_or_block_size_differ_then_it_differs():
    hashes = [
        block_hash(root_hash(4), BLOCK),
        block_hash(root_hash(4), BLOCK[::-1]),
        block_hash(root_hash(4), [6, 5, 7, 8]),
        block_hash(root_hash(4, "tenant"), BLOCK),
        block_hash(root_hash(4, "tenant2"), BLOCK),
        block_hash(root_hash(4, "tenant", b"1" * 32), BLOCK),
        block_hash(root_hash(4, "tenant", b"2" * 32), BLOCK),
        block_hash(root_hash(4, "1" * 32 + "tenant"), BLOCK),
        block_hash(root_hash(4, "", b"1" * 32), BLOCK),
        block_hash(root_hash(8), BLOCK),
        block_hash(block_hash(root_hash(4), BLOCK), BLOCK),
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(value) for value in hashes} == {HASH_BYTES}


def test_chain_when_the_sequence_grows_then_earlier_hashes_stay():
    tokens = list(range(100, 122))
    chain = HashChain(4, "salt")
    early = list(chain.extend(tokens[:9], 2))
    late = chain.extend(tokens, 5)
    assert late[:2] == early
    parent = root_hash(4, "salt")
    for index, value in enumerate(late):
        assert chain.parent(index) == parent
        parent = block_hash(parent, tokens[4 * index : 4 * index + 4])
        assert value == parent


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hash_when_another_process_has_another_hash_seed_then_it_is_the_same(seed):
    code = "from rpc.block_hashes import *;print(block_hash(root_hash(4, 'salt'), [1, 2, 70000, 4]).hex())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == block_hash(root_hash(4, "salt"), [1, 2, 70000, 4]).hex()


@pytest.mark.parametrize(
    ("other", "salt"),
    [
        ([token + 256 for token in range(1, 13)], ""),
        ([token + 65_536 for token in range(1, 13)], ""),
        (list(range(12, 0, -1)), ""),
        ([9, *range(2, 13)], ""),
        (list(range(1, 13)), "another tenant"),
        (list(range(5, 13)), ""),  # the same blocks under another parent
    ],
)
def test_c1_lookup_when_the_prompt_is_another_one_then_it_misses(other, salt):
    cache = KvCache([KvGroupInfo("full", 1, 1, 8, 4, "float32")], 16)
    tokens = list(range(1, 13))
    allocation = cache.acquire(tokens, cache.chains(), max_hit=12)
    cache.commit(allocation, tokens, 12)
    cache.free(allocation)
    again = cache.acquire(other, cache.chains(salt), max_hit=len(other))
    assert again.cached_tokens == 0
    cache.free(again)
    assert cache.acquire(tokens, cache.chains(), max_hit=12).cached_tokens == 12
