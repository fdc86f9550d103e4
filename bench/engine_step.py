"""Time of one engine step beside one forward pass of transformers: same process, model, dtype and threads, interleaved.

    python -m bench.engine_step                          # random weights of SmolLM2-135M's shape
    python -m bench.engine_step --model FOLDER --dtype bfloat16 float32 --threads 2

Each case runs both sides in turns, round after round, so that a change of the machine's load meets both. Both sides
decode greedily (argmax included) with a KV cache; the engine's side is a whole ModelRunner.execute with its input
builder and sampler. Printed: median milliseconds per step of each side, tokens per second, and the ratio per round
(median, lowest, highest).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.messages import SamplingParams
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.model_runner import ModelRunner
from engine.sampling import SamplingRow

BLOCK_SIZE = 16
PREFILL_TOKENS = 512
STEPS_PER_ROUND = 4
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def random_folder(parent: Path) -> Path:
    """A folder with random weights of SmolLM2-135M's shape."""
    import transformers

    folder = parent / "smollm2-shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_SMOLLM2))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Case:
    name: str
    tokens: int  # per step
    prepare: Callable[[], None]  # once, before the rounds
    engine: Callable[[], None]  # one step
    reference: Callable[[], None]
    steps: int  # per round


class EngineRows:
    """Requests with their blocks, decoded or prefilled by a ModelRunner."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], room: int) -> None:
        """prompts: all of one length; room: tokens that will be decoded at the most."""
        self.runner = runner
        count, per_row = len(prompts), -(-(len(prompts[0]) + room) // BLOCK_SIZE)
        # Interleaved, as blocks of requests that grew side by side are
        self.tables = [[1 + i * count + row for i in range(per_row)] for row in range(count)]
        self.prompts = prompts
        self.next = [0] * count
        self.length = 0

    def _row(self, index: int, token_ids: list[int], start: int) -> BatchRow:
        sampling = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, (), (), ())
        return BatchRow(str(index), token_ids, start, self.tables[index], True, sampling)

    def prefill(self) -> None:
        for index, prompt in enumerate(self.prompts):
            result = self.runner.execute(StepBatch([self._row(index, prompt, 0)]))
            self.next[index] = result.rows[0].token_id or 0
        self.length = len(self.prompts[0])

    def decode(self) -> None:
        rows = [self._row(index, [token], self.length) for index, token in enumerate(self.next)]
        result = self.runner.execute(StepBatch(rows))
        self.next = [row.token_id or 0 for row in result.rows]
        self.length += 1


class ReferenceRows:
    """The same in transformers: one batch without padding, and its dynamic cache."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        self.model = model
        self.prompt = torch.tensor(prompts)
        self.cache: Any = None
        self.next = self.prompt[:, :1]

    @torch.inference_mode()
    def prefill(self) -> None:
        out = self.model(self.prompt, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        self.next = out.logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def decode(self) -> None:
        out = self.model(self.next, past_key_values=self.cache, use_cache=True)
        self.next = out.logits[:, -1].argmax(-1, keepdim=True)


def decode_case(runner: ModelRunner, model: Any, prompts: list[list[int]], room: int) -> Case:
    ours, theirs = EngineRows(runner, prompts, room), ReferenceRows(model, prompts)

    def prefill() -> None:
        ours.prefill()
        theirs.prefill()

    name = f"decode batch {len(prompts)} context {len(prompts[0])}"
    return Case(name, len(prompts), prefill, ours.decode, theirs.decode, STEPS_PER_ROUND)


def prefill_case(runner: ModelRunner, model: Any, prompt: list[int]) -> Case:
    ours, theirs = EngineRows(runner, [prompt], 0), ReferenceRows(model, [prompt])
    return Case(f"prefill {len(prompt)}", len(prompt), lambda: None, ours.prefill, theirs.prefill, 1)


def build_cases(runner: ModelRunner, model: Any, batches: list[int], contexts: list[int], room: int) -> list[Case]:
    generator = torch.Generator().manual_seed(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(0, runner.config.vocab_size, (count, length), generator=generator).tolist()

    cases = [decode_case(runner, model, prompts(b, c), room) for c in contexts for b in batches]
    return [*cases, prefill_case(runner, model, prompts(1, PREFILL_TOKENS)[0])]


def timed(step: Callable[[], None], count: int) -> float:
    """Seconds per step."""
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count


def run_case(case: Case, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds per step of (engine, reference), one entry per round."""
    case.prepare()
    timed(case.engine, 2)
    timed(case.reference, 2)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(timed(case.engine, case.steps))
        theirs.append(timed(case.reference, case.steps))
    return ours, theirs


def report(dtype: str, case: Case, ours: list[float], theirs: list[float]) -> str:
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    a, b = statistics.median(ours), statistics.median(theirs)
    return (
        f"{dtype:9} {case.name:28} engine {a * 1e3:8.2f} ms {case.tokens / a:8.1f} tok/s   "
        f"transformers {b * 1e3:8.2f} ms {case.tokens / b:8.1f} tok/s   "
        f"ratio {statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder; default: random weights of SmolLM2-135M's shape")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 512])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as parent:
        folder = arguments.model or random_folder(Path(parent))
        for dtype in arguments.dtype:
            runner = ModelRunner(folder, dtype, BLOCK_SIZE)
            room = STEPS_PER_ROUND * (arguments.rounds + 1)
            longest = max([PREFILL_TOKENS, *arguments.context]) + room
            runner.init_kv(1 + max(arguments.batch) * -(-longest // BLOCK_SIZE))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            model.eval()
            for case in build_cases(runner, model, arguments.batch, arguments.context, room):
                print(report(dtype, case, *run_case(case, arguments.rounds)), flush=True)
            del runner, model
            gc.collect()


if __name__ == "__main__":
    main()
