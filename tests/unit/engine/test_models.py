"""Logits of every model family, beside transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from engine.layers.linear import LinearMaker
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.inputs import build_inputs
from engine.runner.model_runner import ModelRunner
from kernels.cpu import library
from tests.unit.engine.tiny_models import MAX_POSITIONS, TINY_MODELS, VOCAB_SIZE, tiny_model

BLOCK = 16
TOLERANCE = 1e-4


@functools.cache
def reference_model(name: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    return model.eval()


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(name: str, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab]."""
    return reference_model(name)(torch.tensor([token_ids])).logits[0].float()


@pytest.fixture(params=["kernels", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways to compute: with the C kernels (where the machine has them) and with PyTorch alone."""
    if request.param == "torch":
        monkeypatch.setattr(library, "load", lambda: None)
    elif library.load() is None:
        pytest.skip("this machine has no AVX-512 with AMX, or no C compiler")
    return request.param


@functools.cache
def runner_of(path: str, name: str, dtype: str = "float32") -> ModelRunner:
    """path: of the fixture above, which decides what is built here."""
    runner = ModelRunner(tiny_model(name), dtype, BLOCK)
    assert runner.attention_backend == ("native" if path == "kernels" else "torch")
    runner.init_kv(160)
    return runner


@torch.inference_mode()
def step_logits(runner: ModelRunner, rows: list[BatchRow]) -> list[torch.Tensor]:
    """Logits of every token of every row: [tokens of the row, vocab] each."""
    batch = StepBatch(rows)
    hidden = runner.forward(batch, build_inputs(batch, runner.device))
    return list(runner.model.logits(hidden).split([len(row.token_ids) for row in rows]))


def chunked_logits(runner: ModelRunner, token_ids: list[int], chunks: list[int], table: list[int]) -> torch.Tensor:
    """Logits of all tokens, computed chunk after chunk over one request's blocks."""
    assert sum(chunks) == len(token_ids)
    found, start = [], 0
    for length in chunks:
        row = BatchRow("r", token_ids[start : start + length], start, table, sample=False)
        found += step_logits(runner, [row])
        start += length
    return torch.cat(found)


CHUNKINGS = {
    "one token": [1],
    "one block less one": [BLOCK - 1],
    "one block": [BLOCK],
    "one block and one": [BLOCK + 1],
    "chunks that end inside blocks": [7, 20, 37, 16],
    "chunk on a prefix of whole blocks, then decode": [2 * BLOCK, 33, 1, 1, 1],
    "decode from the first token": [1] * 36,
}


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS.keys())
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_when_prompt_is_computed_in_chunks_then_equal_transformers(
    path: str, name: str, chunks: list[int]
) -> None:
    token_ids = random_prompt(sum(chunks), seed=len(chunks))
    table = [31, 7, 12, 5, 28, 3]
    found = chunked_logits(runner_of(path, name), token_ids, chunks, table)
    torch.testing.assert_close(found, reference_logits(name, token_ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama-rope-yarn", "mistral-window", "qwen2-window", "qwen3"])
def test_logits_when_prompt_fills_the_context_then_equal_transformers(path: str, name: str) -> None:
    token_ids = random_prompt(MAX_POSITIONS, seed=3)
    table = list(range(1, MAX_POSITIONS // BLOCK + 1))
    found = chunked_logits(runner_of(path, name), token_ids, [200, 250, 61, 1], table)
    torch.testing.assert_close(found, reference_logits(name, token_ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_logits_when_decode_and_prefill_rows_share_a_step_then_each_equals_transformers(path: str, name: str) -> None:
    runner = runner_of(path, name)
    # Very different lengths, so that decode rows fall into several groups; two chunks, one of them on a prefix
    lengths = [3, 400, 17, 64, 12]
    prompts = [random_prompt(length, seed=10 + i) for i, length in enumerate(lengths)]
    chunk_prompts = [random_prompt(50, seed=20), random_prompt(23, seed=21)]
    tables, free = [], 1
    for prompt in prompts + chunk_prompts:
        blocks = -(-len(prompt) // BLOCK)
        tables.append(list(range(free + blocks - 1, free - 1, -1)))
        free += blocks
    for prompt, table in zip(prompts, tables, strict=False):
        chunked_logits(runner, prompt[:-1], [len(prompt) - 1], table)
    chunked_logits(runner, chunk_prompts[0][:19], [19], tables[5])
    rows = [
        BatchRow(f"decode {i}", prompt[-1:], len(prompt) - 1, tables[i], sample=False)
        for i, prompt in enumerate(prompts)
    ]
    rows.append(BatchRow("chunk on a prefix", chunk_prompts[0][19:], 19, tables[5], sample=False))
    rows.append(BatchRow("whole prompt", chunk_prompts[1], 0, tables[6], sample=False))
    for found, prompt in zip(step_logits(runner, rows), prompts + chunk_prompts, strict=True):
        expected = reference_logits(name, prompt)[-len(found) :]
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_logits_when_other_rows_change_then_a_decode_row_keeps_its_own(path: str) -> None:
    runner = runner_of(path, "llama")
    prompt, table = random_prompt(40, seed=5), [50, 51, 52]
    chunked_logits(runner, prompt[:-1], [39], table)
    row = BatchRow("r", prompt[-1:], 39, table, sample=False)
    alone = step_logits(runner, [row])[0]
    others = []
    for i in range(7):
        other, blocks = random_prompt(60 * i + 2, seed=30 + i), list(range(60 + 12 * i, 60 + 12 * i + 24))
        chunked_logits(runner, other[:-1], [len(other) - 1], blocks)
        others.append(BatchRow(f"o{i}", other[-1:], len(other) - 1, blocks, sample=False))
        if i < 3:
            others[-1].block_table = others[-1].block_table[:12]
    for position in (0, 3, 7):
        rows = [*others[:position], row, *others[position:]]
        torch.testing.assert_close(step_logits(runner, rows)[position], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-tied", "llama-bias", "qwen2", "qwen3-untied"])
def test_logits_when_bfloat16_then_near_the_float32_model(path: str, name: str) -> None:
    token_ids = random_prompt(60, seed=8)
    found = chunked_logits(runner_of(path, name, "bfloat16"), token_ids, [40, 19, 1], [4, 2, 9, 8])
    expected = reference_logits(name, token_ids)
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert found.dtype == torch.float32
    assert error < 0.02
    # The same model in transformers, with its bfloat16 residual stream, is no nearer
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = rounded(torch.tensor([token_ids])).logits[0].float()
    their_error = (theirs - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 1.1 * their_error


def test_logits_when_bfloat16_and_the_leading_two_are_close_then_rank_by_the_exact_product(path: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 64, generator=generator).to(torch.bfloat16)
    hidden = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    weight[5] = hidden[0] * 4  # by far the largest logit of row 0
    weight[3] = weight[5]
    weight[3, int((hidden[0].abs() - 0.2).abs().argmin())] = 0  # a little less, by about 0.2 * 0.2 * 4
    exact = hidden.double() @ weight.double().T
    assert 0.05 < exact[0, 5] - exact[0, 3] < 0.3
    assert exact[0, 5].to(torch.bfloat16) == exact[0, 3].to(torch.bfloat16)  # and 3 comes before 5
    logits = LinearMaker(torch.bfloat16).linear(weight.clone()).exact(hidden)
    assert int(logits[0].argmax()) == 5
    torch.testing.assert_close(logits[0].double(), exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.double(), exact, rtol=2**-7, atol=1e-2)


def test_tiny_model_when_its_tokenizer_is_loaded_then_it_fits_the_model() -> None:
    folder = tiny_model("llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Paris 你好 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == VOCAB_SIZE
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert max(ids) < VOCAB_SIZE
