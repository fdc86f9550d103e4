"""A real model: greedy answers of SmolLM2 to chat prompts, identical to `transformers` token by token, in float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers

from tests.conformance.reference import Reference
from tests.extent import extent
from tests.integration.cluster import Cluster
from tests.integration.generation_client import Answer, GenerationClient

TOKENS = extent(32, 64)
ANSWER_LIMIT_S = 400.0
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "Give me three tips for a job interview.",
    "What is 17 plus 25?",
    "Who wrote Romeo and Juliet?",
    "Why is the sky blue?",
    "Name five animals that live in Africa.",
    "Write a Python function that reverses a string.",
    "What should I cook with rice, eggs and onions?",
    "Summarize the water cycle in two sentences.",
    "What is the difference between a crocodile and an alligator?",
    "Tell me a short story about a lost key.",
    "How do I boil an egg?",
    "What is gravity?",
    "List the planets of the solar system.",
    "Wer hat das Telefon erfunden?",
    "Write a polite email that declines an invitation.\nMention that I am travelling that week, and that I would like "
    "to come next time. Keep it short, friendly and formal enough for a colleague whom I do not know well.",
)
QUESTIONS = extent(QUESTIONS[:16:4] + QUESTIONS[-2:], QUESTIONS)


@pytest.fixture(scope="module")
def folder(smol: Cluster) -> Path:
    return Path(smol.model)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """The chats as `transformers` renders and encodes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for question in QUESTIONS
    ]


def ask(cluster: Cluster, prompts: list[list[int]]) -> list[Answer]:
    """What a cluster answers to the chats, all at once."""

    def steps() -> float:
        """Of a decode server, on average."""
        counts = [server.counted("baton_engine_batch_requests_count", kind="decode") for server in cluster.decode]
        return sum(counts) / len(counts)

    before = steps()
    with GenerationClient(cluster.router.grpc) as client:
        for question, prompt in zip(QUESTIONS[-2:], prompts[-2:], strict=True):
            body = {"messages": [{"role": "user", "content": question}]}
            page = httpx.post(f"http://{cluster.router.http}/tokenize", json=body, timeout=10).raise_for_status()
            assert page.json()["tokens"] == prompt
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        opened = [client.open(chat, TOKENS, timeout_s=ANSWER_LIMIT_S) for chat in chats]
        answers = [generation.answer(ANSWER_LIMIT_S) for generation in opened]
    assert steps() - before < TOKENS * len(QUESTIONS) / extent(2, 4), "requests were not decoded together"
    cluster.assert_clean_ledgers()
    assert cluster.errors_without_code() == []
    return answers


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_when_chats_are_answered_then_every_token_is_that_of_transformers(
    smol: Cluster, folder: Path, prompts: list[list[int]]
) -> None:
    model = Reference(folder)
    # Cluster and reference compute one thread each, at the same time.
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(model.greedy_batch, prompts, TOKENS)
        answers = ask(smol, prompts)
        expected = computed.result()
    for question, prompt, answer, tokens in zip(QUESTIONS, prompts, answers, expected, strict=True):
        assert answer.prompt_tokens == len(prompt)
        assert (answer.path, answer.attempts, answer.finish_reason) == ("pd", 1, "length")
        if answer.token_ids != tokens:
            # The padding of the batch can tip a near tie: what counts is the prompt in a row of its own.
            assert answer.token_ids == model.greedy(prompt, TOKENS), question
    # Text is that of the tokens, and one answer is known to be true.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for answer in answers:
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert "Paris" in answers[0].text
