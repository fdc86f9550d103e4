"""The reference implementation under the same work: `transformers` with the same model, dtype and threads.

Runs as a process of its own that answers each JSON line on its standard input with one, so that its rounds can
alternate with Baton's in one run. Prompts are lists of token ids, all of one length.

    {"op": "decode", "prompts": [[...], ...], "steps": 32}   ->   {"seconds": ..., "tokens": ..., "ids": [[...], ...]}
    {"op": "prefill", "prompts": [[...]]}                    ->   {"seconds": ..., "tokens": ...}
    {"op": "read"}                                           ->   {"seconds": ..., "bytes": ...}

Decoding is the plain greedy loop with a KV cache (forward, argmax, append); its prefill is not timed. `read` goes once
over as many bytes as the weights have, which is the least that a decode step can cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

READS = 3


class Reference:
    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # in evaluation mode already
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.words = torch.ones(self.weight_bytes // 4, dtype=torch.float32)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Greedy decode of `steps` tokens after the first one, for all prompts in one batch."""
        out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        tokens = [token]
        start = time.perf_counter()
        for _ in range(steps):
            out = self.model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": len(prompts) * steps, "ids": torch.cat(tokens, 1).tolist()}

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """One forward pass over the prompts with the logits of their last tokens."""
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        return {"seconds": time.perf_counter() - start, "tokens": ids.numel()}

    def read(self) -> dict[str, Any]:
        """The best of several ways and tries: a floor must not be one of the summation."""
        seconds = []
        for _ in range(READS):
            for look in (torch.sum, torch.amax, lambda words: torch.dot(words, words)):
                start = time.perf_counter()
                look(self.words).item()
                seconds.append(time.perf_counter() - start)
        return {"seconds": min(seconds), "bytes": self.words.numel() * 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reference = Reference(arguments.model, getattr(torch, arguments.dtype))
    print(json.dumps({"ready": True}), flush=True)
    operations: dict[str, Callable[..., dict[str, Any]]]
    operations = {"decode": reference.decode, "prefill": reference.prefill, "read": reference.read}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(operations[request.pop("op")](**request)), flush=True)


if __name__ == "__main__":
    main()
