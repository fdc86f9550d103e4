"""Every family through real processes: greedy tokens identical to `transformers`, however the cluster serves them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.known_answers import COUNT_S
from tests.conformance.reference import MIN_MARGIN, Reference, prompt_of, reference
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import GenerationClient
from tests.standstill import stand_still
from tests.unit.engine.tiny_models import TINY_MODELS, tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

BLOCK = 16
# Tokens of a step on either server. Longer prompts are computed in chunks, which end inside a block when several
# prompts share the step.
CHUNK = 40
TOKENS = 40
FEW_TOKENS = 8
# One token, around one block, whole blocks, around a chunk, several chunks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 47, 5 * BLOCK, 3 * CHUNK + 22)
FLAGS = ("--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16",
         "--num-kv-blocks", "256")  # fmt: skip


@dataclass
class Family:
    """A cluster of one model, with what `transformers` answers to each prompt."""

    name: str
    cluster: Cluster
    client: GenerationClient
    prompts: list[list[int]]
    expected: list[list[int]]

    def skipped_blocks(self) -> float:
        return self.cluster.decode[0].counted("baton_kv_blocks_skipped_total")

    def loads(self) -> float:
        """Those that are done. With one its skipped blocks are counted, too."""
        return self.cluster.decode[0].counted("baton_kv_transfer_seconds_count", outcome="ok")

    def prefill_steps(self) -> float:
        return self.cluster.prefill[0].counted("baton_engine_step_seconds_count", kind="prefill")

    @contextmanager
    def counting(self, requests: int, skipped: int) -> Iterator[None]:
        """So many requests that are handed over are answered within, for which the decode server loads all blocks but
        those `skipped`. Its figures come after its tokens."""
        loads, before = self.loads(), self.skipped_blocks()
        yield
        wait_for("the count of the loads", lambda: self.loads() == loads + requests, COUNT_S)
        assert self.skipped_blocks() - before == skipped

    def some(self) -> Iterator[tuple[list[int], list[int]]]:
        """Prompts without a full block, with one, with whole blocks and of several chunks; and the first tokens of
        their answers."""
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            if len(prompt) in (BLOCK - 1, BLOCK + 1, 5 * BLOCK, LENGTHS[-1]):
                yield prompt, expected[:FEW_TOKENS]


def clear_prompts(model: Reference) -> tuple[list[list[int]], list[list[int]]]:
    """A prompt of each length whose greedy answer has no near tie, and those answers.

    They come out of one padded batch of `generate`; each is then checked in a row of its own.
    """
    prompts = [prompt_of(length) for length in LENGTHS]
    for attempt in range(1, 20):
        answers = model.greedy_batch(prompts, TOKENS)
        tied = [i for i, prompt in enumerate(prompts) if model.margin(prompt, answers[i]) < MIN_MARGIN]
        if not tied:
            for prompt, answer in zip(prompts, answers, strict=True):
                assert model.forced(prompt, answer).argmax(dim=-1).tolist() == answer
            return prompts, answers
        for i in tied:
            prompts[i] = prompt_of(LENGTHS[i], salt=attempt)
    raise AssertionError("there is a near tie on the way of every answer that was tried")


# The rest in the long run: `tests/unit/engine` compares every family's numbers with those of transformers.
ALWAYS = ("qwen3",)
FAMILIES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.extended) for name in TINY_MODELS]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    folder: Path = tiny_model(request.param)
    prompts, expected = clear_prompts(reference(folder))
    with (
        Cluster(1, 1, model=folder, prefill_flags=FLAGS, decode_flags=FLAGS) as cluster,
        GenerationClient(cluster.router.grpc) as client,
    ):
        yield Family(request.param, cluster, client, prompts, expected)
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == []


def test_tokens_when_disaggregated_then_those_of_transformers(family: Family) -> None:
    steps, chunks = family.prefill_steps(), sum(-(-length // CHUNK) for length in LENGTHS)
    with family.counting(len(family.prompts), skipped=0):
        for prompt, expected in zip(family.prompts, family.expected, strict=True):
            answer = family.client.generate(prompt, TOKENS, salt="alone")
            assert answer.token_ids == expected, f"prompt of {len(prompt)}"
            assert (answer.path, answer.attempts, answer.cached_tokens) == ("pd", 1, 0)
            assert answer.finish_reason == "length"
    # Long prompts were computed in chunks.
    assert chunks > len(LENGTHS)
    wait_for(f"{chunks} steps", lambda: family.prefill_steps() - steps >= chunks, COUNT_S)


def test_tokens_when_the_prefix_is_cached_on_both_servers_then_those_of_transformers(family: Family) -> None:
    for prompt, expected in family.some():
        with family.counting(1, skipped=0):
            family.client.generate(prompt, 2, salt="both")
        with family.counting(1, skipped=len(prompt) // BLOCK):
            answer = family.client.generate(prompt, len(expected), salt="both")
        assert answer.token_ids == expected, f"prompt of {len(prompt)}"
        assert answer.path == "pd"
        # At least one token of the prompt is always computed, and only full blocks are cached.
        assert answer.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK


def test_tokens_when_the_prefix_is_cached_on_the_prefill_server_alone_then_those_of_transformers(
    family: Family,
) -> None:
    for prompt, expected in family.some():
        # A request for one token is served by the prefill server alone.
        first = family.client.generate(prompt, 1, salt="on-p")
        assert (first.token_ids, first.path) == (expected[:1], "colocated")
        with family.counting(1, skipped=0):
            answer = family.client.generate(prompt, len(expected), salt="on-p")
        assert answer.token_ids == expected, f"prompt of {len(prompt)}"
        assert (answer.path, answer.cached_tokens) == ("pd", (len(prompt) - 1) // BLOCK * BLOCK)


def test_tokens_when_colocated_and_then_with_that_prefix_on_the_decode_server_then_those_of_transformers(
    family: Family,
) -> None:
    for prompt, expected in family.some():
        # Two choices are served by the decode server alone.
        for choice in family.client.open(prompt, len(expected), salt="on-d", n=2).answers():
            assert choice.token_ids == expected, f"prompt of {len(prompt)}"
            assert choice.path == "colocated"
        with family.counting(1, skipped=len(prompt) // BLOCK):
            answer = family.client.generate(prompt, len(expected), salt="on-d")
        assert answer.token_ids == expected, f"prompt of {len(prompt)}"
        assert (answer.path, answer.cached_tokens) == ("pd", 0)


def test_tokens_when_eight_requests_run_at_once_then_those_of_transformers(family: Family) -> None:
    decode = family.cluster.decode[0]

    def large_batches() -> float:
        total = decode.metric("baton_engine_batch_requests_count", kind="decode") or 0.0
        return total - (decode.metric("baton_engine_batch_requests_bucket", kind="decode", le="4.0") or 0.0)

    before = large_batches()
    # On a busy machine some requests may be answered before the last load is over; then they are asked once more.
    for number in range(5):
        ask_eight_at_once(family, f"batch {number}")
        with suppress(TimeoutError):
            wait_for("a step that had more than four requests", lambda: large_batches() > before, COUNT_S)
            break
    assert large_batches() > before


def ask_eight_at_once(family: Family, salt: str) -> None:
    prefill, decode = family.cluster.prefill[0], family.cluster.decode[0]
    engines = prefill.engine_pid, decode.engine_pid
    try:
        # The prefill server finds all of them at once, with their loads open: their chunks share steps, and end inside
        # blocks that are being transferred.
        stand_still(engines[0])
        opened = [family.client.open(prompt, TOKENS, salt=salt) for prompt in family.prompts]
        wait_for("eight loads", lambda: decode.page("/debug/ledger")["ranks"][0]["loading_requests"] == 8, COUNT_S)
        # And the decode server goes on with all of them at once.
        stand_still(engines[1])
        ids = [generation.request_id for generation in opened]  # beside those whose KV is still held
        wait_for("eight requests on the prefill server", lambda: prefill.has_open(ids), COUNT_S)
        os.kill(engines[0], signal.SIGCONT)
        for generation in opened:
            generation.wait_tokens(1)
    finally:
        for engine in engines:
            os.kill(engine, signal.SIGCONT)
    for generation, prompt, expected in zip(opened, family.prompts, family.expected, strict=True):
        answer = generation.answer()
        assert answer.token_ids == expected, f"prompt of {len(prompt)}"
        assert (answer.path, answer.attempts) == ("pd", 1)
