"""What a model answers according to `transformers`: the reference of every test of right tokens."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.messages import SamplingParams
from engine.sampling.row import SamplingRow
from engine.sampling.sampler import sample
from tests.unit.engine.tiny_models import VOCAB_SIZE

# Two float32 implementations of one model differ by about 1e-6 in these logits. Where the best two are closer than
# this, the greedy token says nothing about right or wrong.
MIN_MARGIN = 1e-4


class Reference:
    """A Hugging Face folder in float32, run by `transformers` on one thread."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        # The folder's own defaults of generation (sampling, penalties, lengths) are none of the reference's.
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self._answers: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[int]] = {}

    def greedy(self, prompt: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """The generated tokens; one of `eos_token_ids` ends them and is the last. Computed once."""
        asked = tuple(prompt), max_tokens, tuple(eos_token_ids)
        if asked not in self._answers:
            self._answers[asked] = self.greedy_batch([prompt], max_tokens, eos_token_ids)[0]
        return list(self._answers[asked])

    def greedy_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, eos_token_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """`generate` of all prompts at once, padded on the left. Cut after the first of `eos_token_ids`."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=list(eos_token_ids) or None,
            )
        rows = [row[longest:] for row in output.tolist()]
        ends = [next((i + 1 for i, token in enumerate(row) if token in eos_token_ids), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    def forced(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Logits [len(answer), vocab] from which each token of `answer` was chosen: one pass over one row.

        By induction an answer is the greedy one if and only if each of its tokens is the argmax of its row.
        """
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=ids, logits_to_keep=len(answer)).logits[0].float()
        return logits

    def margin(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """The smallest distance of the best two logits along the way."""
        best = self.forced(prompt, answer).topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())

    def sampled(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens that sampling with `params` draws from the reference's logits, of a request that is alone."""
        output: list[int] = []
        with torch.inference_mode():
            for index in range(params.max_tokens):
                ids = torch.tensor([[*prompt, *output]])
                logits = self.model(input_ids=ids, logits_to_keep=1).logits[0].float()
                row = SamplingRow(params, index, prompt, output, ())
                output.append(sample(logits, [row])[0].token_id)
        return output


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Token ids of the tiny models, none of them special."""
    return random.Random(1000 * salt + length).choices(range(2, VOCAB_SIZE), k=length)


def clear_prompt(model: Reference, length: int, max_tokens: int) -> list[int]:
    """A prompt of `length` tokens, no choice on whose greedy way is a near tie."""
    for salt in range(20):
        prompt = prompt_of(length, salt)
        if model.margin(prompt, model.greedy(prompt, max_tokens)) > MIN_MARGIN:
            return prompt
    raise AssertionError(f"every prompt of {length} tokens has a near tie on its way")


@functools.lru_cache(maxsize=2)
def reference(folder: Path) -> Reference:
    """The reference of a folder; the last two are kept."""
    return Reference(folder)
