"""An engine of two ranks, as real processes, finds on disk what an earlier one of two ranks has left there, as far as
both ranks have it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.client import EngineClient, EngineConfig
from engine.messages import AddRequest, RunMode, SamplingParams
from tests.extent import extent
from tests.integration.mooncake_master import needs_mooncake, running_master
from tests.unit.engine.parallel.test_colocated_ranks import clean
from tests.unit.engine.tiny_models import tiny_model

START_S = 90.0
ANSWER_S = 60.0
BLOCK = 16
BLOCKS = 8
PROMPT = [5 + (i * 37 + i * i * 3) % 370 for i in range(BLOCKS * BLOCK + 5)]


class Engine:
    """An engine with tiers; `ask` gives tokens and how many of the prompt's were cached."""

    def __init__(self, ranks: int, **tiers: object) -> None:
        self._client = EngineClient(
            EngineConfig(
                role="decode",
                model=str(tiny_model("llama")),
                dtype="float32",
                device="cpu",
                threads=1,
                block_size=BLOCK,
                num_kv_blocks=18,
                max_model_len=256,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                tensor_parallel_size=ranks,
                tp_broadcast_timeout_seconds=30.0,
                kv_tier_min_tokens=BLOCK,
                kv_tier_timeout_ms=20_000,
                **tiers,  # type: ignore[arg-type]
            )
        )
        self._news = asyncio.Event()
        self._client.on_step = lambda step: self._news.set()
        self._asked = 0

    async def __aenter__(self) -> Engine:
        await self._client.start(START_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.stop(10.0)

    async def ask(self, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
        self._asked += 1
        request = AddRequest(
            f"r{self._asked}#0.00000001", RunMode.LOCAL, list(prompt),
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), arrival_ns=time.monotonic_ns(),
        )  # fmt: skip
        async with asyncio.timeout(ANSWER_S):
            outputs = [output async for output in self._client.submit(request)]
        assert outputs[-1].error is None
        (cached,) = [output.prefill.cached_tokens for output in outputs if output.prefill is not None]
        return [token.token_id for output in outputs for token in output.tokens], cached

    async def quiet(self) -> None:
        """No request and no fetch holds a block."""
        async with asyncio.timeout(ANSWER_S):
            while not clean(self._client):
                self._news.clear()
                await self._news.wait()


def files_of(folder: Path, rank: int, size: int = 2) -> list[Path]:
    """In the order in which they were last used, the beginning of the prompt last."""
    found = (folder / f"rank-{rank}-of-{size}" / "blocks").glob("*/*.kv")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


async def written(folder: Path, count: int, size: int = 2) -> None:
    limit = time.monotonic() + ANSWER_S
    while True:
        there = [len(files_of(folder, rank, size)) for rank in range(size)]
        if min(there) >= count:
            return
        assert time.monotonic() < limit, f"files of each rank: {there}, not {count}"
        await asyncio.sleep(0.02)  # files of other processes


async def test_engine_of_two_ranks_when_its_pool_has_lost_a_prompt_then_finds_what_both_ranks_have(
    tmp_path: Path,
) -> None:
    other = [3 + token for token in PROMPT] + [7] * 100  # takes all blocks of the pool
    async with Engine(2, kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 26) as engine:
        expected, cached = await engine.ask()
        assert cached == 0
        await written(tmp_path, BLOCKS)
        own = [files_of(tmp_path, rank) for rank in (0, 1)]
        assert not {path.name for path in own[0]} & {path.name for path in own[1]}  # each under its own names
        await engine.ask(other)
        assert await engine.ask() == (expected, BLOCKS * BLOCK)
        await engine.ask(other)
        for path in own[1][:3]:  # rank 1 alone
            path.unlink()
        tokens, cached = await engine.ask()
        assert tokens == expected and 0 <= cached < BLOCKS * BLOCK
        await engine.quiet()
        await written(tmp_path, BLOCKS)  # what was lost is there again
        await engine.ask(other)
        assert await engine.ask() == (expected, BLOCKS * BLOCK)
        await engine.quiet()


@pytest.mark.extended
async def test_engine_of_two_ranks_when_an_earlier_one_left_blocks_on_disk_then_finds_what_both_ranks_have(
    tmp_path: Path,
) -> None:
    async with Engine(2, kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 26) as first:
        expected, cached = await first.ask()
        assert cached == 0
        await written(tmp_path, BLOCKS)
    assert len(files_of(tmp_path, 0)) == len(files_of(tmp_path, 1)) == BLOCKS
    contents = [{path.name: path.read_bytes() for path in files_of(tmp_path, rank)} for rank in (0, 1)]
    assert not contents[0].keys() & contents[1].keys()  # each under its own names
    # Rank 1 alone loses one block, and a prompt that begins likewise ends before it on both.
    lost = {}
    for path in files_of(tmp_path, 1)[:3]:
        lost[path] = path.read_bytes()
        path.unlink()
    async with Engine(2, kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 26) as second:
        tokens, cached = await second.ask()
        assert tokens == expected
        assert 0 < cached < BLOCKS * BLOCK
        await second.quiet()
        await written(tmp_path, BLOCKS)  # it has got them again
        assert await second.ask() == (expected, BLOCKS * BLOCK)  # from the pool
    assert all(path.read_bytes() == content for path, content in lost.items())


@pytest.mark.extended
@pytest.mark.timeout(400)  # four or five engines are started one after the other, also on a busy machine
async def test_engine_of_ranks_when_one_has_a_damaged_block_then_it_is_a_miss_for_all(tmp_path: Path) -> None:
    tiers = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 1 << 26, "kv_host_bytes": 1 << 26}
    async with Engine(4, **tiers) as first:  # two ranks hold each head
        expected, _ = await first.ask()
        await written(tmp_path, BLOCKS, 4)
    for _ in range(extent(1, 2)):
        for path in files_of(tmp_path, 2, 4):
            record = bytearray(path.read_bytes())
            record[-1] ^= 1
            path.write_bytes(record)
        async with Engine(4, **tiers) as other:
            assert await other.ask() == (expected, 0)
            await other.quiet()
            await written(tmp_path, BLOCKS, 4)
    async with Engine(4, **tiers) as last:
        assert await last.ask() == (expected, BLOCKS * BLOCK)
        await last.quiet()
    async with Engine(2, **tiers) as fewer:  # whose shares are others
        assert await fewer.ask() == (expected, 0)


@needs_mooncake()
@pytest.mark.extended
async def test_engine_of_ranks_when_another_one_has_computed_a_prompt_then_it_comes_from_the_shared_store() -> None:
    with running_master() as master:
        address = f"{master.address}?segment_bytes={32 << 20}"
        async with Engine(2, kv_tier=address) as first, Engine(2, kv_tier=address) as second:
            async with asyncio.timeout(ANSWER_S):
                for number in range(100, 300):  # until both reach the store
                    prompt = [5 + (i * number) % 370 for i in range(BLOCKS * BLOCK + 5)]
                    expected, _ = await first.ask(prompt)
                    await asyncio.sleep(0.3)
                    tokens, cached = await second.ask(prompt)
                    assert tokens == expected
                    if cached == BLOCKS * BLOCK:
                        break
            assert cached == BLOCKS * BLOCK
