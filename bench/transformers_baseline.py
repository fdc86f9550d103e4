"""The reference implementation under the same work: `transformers` with the same model, dtype and threads.

Runs as a process of its own that serves one JSON line per request line on its standard input, so that its rounds can
alternate with Baton's in one run:

    {"op": "decode", "batch": 8, "context": 64, "steps": 32, "seed": 3}   ->   {"seconds": ..., "tokens": ...}
    {"op": "prefill", "tokens": 512, "seed": 3}                           ->   {"seconds": ..., "tokens": ...}

Decoding is the plain greedy loop with a KV cache (forward, argmax, append); its prefill is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def decode(model: torch.nn.Module, batch: int, context: int, steps: int, seed: int) -> dict[str, float]:
    """Greedy decode of `steps` tokens for `batch` rows after `context` random tokens each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 40000, (batch, context), generator=generator)
    out = model(ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
    start = time.perf_counter()
    for _ in range(steps):
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    return {"seconds": time.perf_counter() - start, "tokens": batch * steps}


@torch.inference_mode()
def prefill(model: torch.nn.Module, tokens: int, seed: int) -> dict[str, float]:
    """One forward pass over `tokens` random tokens with the logits of the last one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 40000, (1, tokens), generator=generator)
    start = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model.eval()
    print(json.dumps({"ready": True}), flush=True)
    operations = {"decode": decode, "prefill": prefill}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(operations[request.pop("op")](model, **request)), flush=True)


if __name__ == "__main__":
    main()
