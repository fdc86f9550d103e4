"""Requests with their right answers, and what every pair of servers must make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import SamplingParams
from tests.conformance.live_cluster import frozen
from tests.conformance.reference import Reference, clear_prompt, prompt_of
from tests.integration.cluster import ServerProcess, wait_for
from tests.integration.generation_client import TIMEOUT_S, GenerationClient

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 5}
COUNT_S = 10.0  # figures may come after the answer that they are about
# Flags of a decode server whose requests wait for blocks, however many they are.
PATIENT = ("--decode-retry-times", "10000", "--decode-retry-timeout-ms", "30000")


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    options: dict[str, Any]
    expected: list[int]


def known(model: Reference, length: int, tokens: int, options: dict[str, Any]) -> Case:
    """A prompt of `length` tokens, and the next `tokens` according to the reference."""
    if options == GREEDY:
        prompt = clear_prompt(model, length, tokens)
        return Case(prompt, options, model.greedy(prompt, tokens))
    prompt = prompt_of(length)
    answer = model.sampled(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **options))
    return Case(prompt, options, answer)


def check_handovers(
    client: GenerationClient, decode: ServerProcess, cases: Sequence[Case], *, salt: str, block: int, transport: str
) -> None:
    """Each case alone, again with what is cached of it, and the last greedy one with a prefix that only the decode
    server has: its tokens are right and its KV came by `transport`. block: tokens, of the decode server's."""

    def skipped() -> float:
        return decode.counted("baton_kv_blocks_skipped_total")

    def loaded() -> float:
        return decode.counted("baton_kv_transfer_seconds_count", transport=transport, outcome="ok")

    loads = loaded()
    for case in cases:
        answer = client.generate(case.prompt, len(case.expected), salt=salt, **case.options)
        assert answer.token_ids == case.expected, f"prompt of {len(case.prompt)}"
        assert (answer.path, answer.attempts, answer.cached_tokens) == ("pd", 1, 0)
    for case in cases:  # what is whole of it is on both servers
        before = skipped()
        again = client.generate(case.prompt, len(case.expected), salt=salt, **case.options)
        assert (again.token_ids, again.path) == (case.expected, "pd"), f"prompt of {len(case.prompt)}, again"
        expected = before + len(case.prompt) // block
        wait_for("blocks that were not loaded", lambda expected=expected: skipped() == expected, COUNT_S)
    case = [each for each in cases if each.options == GREEDY][-1]
    for choice in client.open(case.prompt, 4, salt=f"{salt} on d", n=2, **case.options).answers():
        assert (choice.token_ids, choice.path) == (case.expected[:4], "colocated")
    alone = client.generate(case.prompt, len(case.expected), salt=f"{salt} on d", **case.options)
    assert (alone.token_ids, alone.path, alone.cached_tokens) == (case.expected, "pd", 0)
    wait_for(f"each load by {transport}", lambda: loaded() == loads + 2 * len(cases) + 1, COUNT_S)


def check_preemptions(client: GenerationClient, decode: ServerProcess, case: Case, count: int, *, salt: str) -> None:
    """So many requests that they lose their blocks on the decode server, and answer as if each were alone."""
    before = decode.counted("baton_preemptions_total", reason="blocks")
    with frozen(decode):  # begins when all requests are there, so that it has too many however fast they come
        opened = [
            client.open(case.prompt, len(case.expected), salt=f"{salt} {number}", **case.options)
            for number in range(count)
        ]
        ids = [generation.request_id for generation in opened]
        wait_for("the requests", lambda: decode.has_open(ids), TIMEOUT_S)
    for generation in opened:
        assert generation.answer().token_ids == case.expected
    wait_for("preemptions", lambda: decode.counted("baton_preemptions_total", reason="blocks") > before, COUNT_S)
