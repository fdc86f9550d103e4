"""Prefix blocks on disk outlive a prefill server: real processes that are killed, started again, and given damaged or
slow files."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cache_store.geometry.layout import GroupLayout
from cache_store.tiers.keys import TierKeys
from engine.numerics import numerics_of
from protos import worker_pb2
from rpc.block_hashes import HashChain
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.wire_client import TIMEOUT_S, Pair, generate_input
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

MODEL = "tiny"
BLOCK = 16
BLOCKS = 6
PROMPT = [(7 * i * i + 13 * i) % (VOCAB_SIZE - 2) + 2 for i in range(BLOCKS * BLOCK + 5)]
SHORT = PROMPT[40:60]
NEW_TOKENS = 10


@dataclass
class Tiered:
    """A prefill server with blocks on disk and a decode server; what PROMPT led to when it was computed."""

    cluster: Cluster
    folder: Path
    flags: list[str]
    expected: list[int] = field(default_factory=list)
    asked: int = 0

    def generate(self, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt's were cached on the prefill server."""
        self.asked += 1
        request = generate_input(
            f"r{self.asked}", prompt, model=MODEL, max_tokens=NEW_TOKENS, ignore_eos=True, **options
        )
        with Pair(self.cluster.prefill[0], self.cluster.decode[0], MODEL) as pair:
            pair.d.worker.FlushCache(worker_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)  # it has to load everything
            result = pair.generate(request)
        assert result.prefill is not None
        return result.token_ids, result.prefill.result.cached_tokens

    def count(self, family: str, **labels: str) -> float:
        return self.cluster.prefill[0].metric(f"baton_kv_tier_{family}", **labels) or 0.0

    def start_anew(self, env: dict[str, str], *flags: str) -> ServerProcess:
        """Another prefill server on the same directory, in place of the present one, which has ended."""
        server = self.cluster.start_prefill([*self.flags, *flags], env).wait_ready()
        self.cluster.prefill[:] = [server]
        return server

    @property
    def files(self) -> list[Path]:
        return list((self.folder / "blocks").glob("*/*.kv"))

    def file_of(self, block: int) -> Path:
        """Where a block of PROMPT lies."""
        with Pair(self.cluster.prefill[0], self.cluster.decode[0], MODEL) as pair:
            info = pair.p.info()
        (group,) = info.groups
        layout = GroupLayout.of(
            group.tag, num_layers=group.num_layers, num_kv_heads=group.num_kv_heads, head_dim=group.head_dim,
            block_size=group.block_size, dtype=group.dtype,
        )  # fmt: skip
        keys = TierKeys(
            info.model_fingerprint, layout, numerics=numerics_of(torch.device("cpu"), info.attention_backend)
        )
        name = keys.key(HashChain(BLOCK).extend(PROMPT, BLOCKS)[block]).hex()
        return self.folder / "blocks" / name[:2] / f"{name}.kv"


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    folder = tmp_path_factory.mktemp("tiers") / "kv"
    names = ["--served-model-name", MODEL, "--block-size", str(BLOCK)]
    flags = [
        *names, "--kv-disk-path", str(folder), "--kv-disk-bytes", "64MiB", "--kv-tier-min-tokens", "16",
        "--kv-tier-timeout-ms", "20000",
    ]  # fmt: skip
    with Cluster(1, 1, model=tiny_model("llama"), router=False, prefill_flags=flags, decode_flags=names) as cluster:
        found = Tiered(cluster, folder, flags)
        found.expected, cached = found.generate()
        assert cached == 0
        wait_for("the blocks on disk", lambda: found.count("writes_total", outcome="stored") >= BLOCKS, 30.0)
        yield found
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == []


def test_prompt_when_its_server_was_killed_then_the_next_one_has_its_blocks_but_for_a_damaged_one(
    tiered: Tiered,
) -> None:
    cluster = tiered.cluster
    assert len(tiered.files) == BLOCKS
    assert {stat.S_IMODE(path.stat().st_mode) for path in tiered.files} == {0o600}
    assert stat.S_IMODE((tiered.folder / "blocks").stat().st_mode) == 0o700
    last = tiered.file_of(BLOCKS - 1)
    cluster.prefill[0].kill()
    record = bytearray(last.read_bytes())
    record[-3] ^= 8
    last.write_bytes(record)
    cluster.restart(cluster.prefill[0])
    tokens, cached = tiered.generate()
    assert (tokens, cached) == (tiered.expected, (BLOCKS - 1) * BLOCK)

    def counts() -> tuple[float, float, float]:
        return (
            tiered.count("hit_blocks_total", tier="disk"),
            tiered.count("missed_blocks_total", tier="disk", reason="damaged"),
            tiered.count("fetched_tokens_total"),
        )

    wait_for("the counts", lambda: counts() == (BLOCKS - 1, 1, cached), 30.0)
    wait_for("the damaged block anew", lambda: tiered.count("writes_total", outcome="stored") == 1, 30.0)
    assert len(tiered.files) == BLOCKS and last.read_bytes() != record
    # Log-probabilities of a prompt need its computation.
    assert tiered.generate(prompt_logprobs=0) == (tiered.expected, 0)
    cluster.assert_clean_ledgers()
    assert tiered.generate() == (tiered.expected, BLOCKS * BLOCK)  # from the pool


@pytest.mark.extended
def test_directory_when_a_second_server_is_given_it_then_that_one_does_not_start(tiered: Tiered) -> None:
    second = tiered.cluster.start_prefill(tiered.flags)
    tiered.cluster.prefill.remove(second)
    assert second.wait(60.0) != 0
    assert "--kv-disk-path" in second.log() and "another server uses it" in second.log()
    assert tiered.generate()[0] == tiered.expected


def test_prompt_when_the_disk_is_slow_then_it_is_computed_and_holds_no_blocks_for_it(
    tiered: Tiered, tmp_path: Path
) -> None:
    cluster = tiered.cluster
    assert cluster.prefill[0].terminate() == 0
    slow = tmp_path / "slow"  # as long as it is there
    slow.touch()
    fault = f"cache_store.tier:delay=60,tier=disk,operation=get,times=1,while={slow}"
    tiered.start_anew({"BATON_FAULTS": fault}, "--kv-tier-timeout-ms", "200")
    assert tiered.generate() == (tiered.expected, 0)
    wait_for("the count", lambda: tiered.count("fetches_total", outcome="timeout") == 1, 30.0)
    assert len(tiered.generate(SHORT)[0]) == NEW_TOKENS  # while the disk is still at it
    cluster.assert_clean_ledgers()
    slow.unlink()


def test_cache_when_it_is_flushed_then_neither_pool_nor_disk_has_the_prompt(tiered: Tiered) -> None:
    tiered.generate()
    # The decode server's last word is here: what a lease holds is not flushed.
    assert tiered.cluster.prefill[0].finished(f"r{tiered.asked}")["kv"]["outcome"] == "released"
    tiered.cluster.assert_clean_ledgers()
    with Pair(tiered.cluster.prefill[0], tiered.cluster.decode[0], MODEL) as pair:
        pair.p.worker.FlushCache(worker_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)
    wait_for("an empty directory", lambda: not tiered.files, 30.0)
    assert tiered.generate() == (tiered.expected, 0)
