"""Prompts for the load generator, all made from a seed so that a run can be repeated. Those that are made of recorded
files are in bench/recorded.py."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from bench.prompts import DatasetError, DatasetOptions, Prompt, ordinary_ids
from bench.recorded import burstgpt, sharegpt, sonnet, timed_trace

__all__ = ["DATASETS", "RECORDED", "DatasetError", "DatasetOptions", "Prompt", "load_tokenizer", "make_prompts"]

RECORDED = {"sonnet": sonnet, "sharegpt": sharegpt, "burstgpt": burstgpt, "timed_trace": timed_trace}
DATASETS = ("random", "prefix_repetition", "custom", *RECORDED)


def load_tokenizer(folder: str) -> Tokenizer:
    """Tokenizer of a model folder. Raises DatasetError naming the missing file."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise DatasetError(f"--tokenizer {folder}: {file} does not exist")
    return Tokenizer.from_file(str(file))


def make_prompts(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts in the order in which they are sent. Raises DatasetError."""
    _check(options)
    if options.name == "random":
        return _random(options, tokenizer)
    if options.name == "prefix_repetition":
        return _prefix_repetition(options, tokenizer)
    if options.name == "custom":
        return _custom(options, tokenizer)
    if options.name in RECORDED:
        return RECORDED[options.name](options, tokenizer)
    raise DatasetError(f"--dataset-name {options.name}: known are {', '.join(DATASETS)}")


def _check(options: DatasetOptions) -> None:
    for flag, value, least in (
        ("--num-prompts", options.num_prompts, 1),
        ("--random-input-len", options.input_len, 1),
        ("--random-output-len", options.output_len, 1),
        ("--random-prefix-len", options.prefix_len, 0),
        ("--prefix-repetition-num-prefixes", options.num_prefixes, 1),
    ):
        if value < least:
            raise DatasetError(f"{flag} {value} must be at least {least}")
    if not 0 <= options.range_ratio < 1:
        raise DatasetError(f"--random-range-ratio {options.range_ratio:g} must be from 0 to below 1")


def _length(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _random(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    rng = random.Random(options.seed)
    ids = ordinary_ids(tokenizer)
    prefix = rng.choices(ids, k=options.prefix_len)
    prompts = []
    for _ in range(options.num_prompts):
        tokens = prefix + rng.choices(ids, k=_length(rng, options.input_len, options.range_ratio))
        output = _length(rng, options.output_len, options.range_ratio)
        prompts.append(Prompt(tokens, tokenizer.decode(tokens), output))
    return prompts


def _prefix_repetition(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    rng = random.Random(options.seed)
    ids = ordinary_ids(tokenizer)
    prefixes = [rng.choices(ids, k=options.prefix_len or options.input_len) for _ in range(options.num_prefixes)]
    prompts = []
    for i in range(options.num_prompts):
        tokens = prefixes[i % len(prefixes)] + rng.choices(ids, k=options.input_len)
        prompts.append(Prompt(tokens, tokenizer.decode(tokens), options.output_len))
    rng.shuffle(prompts)
    return prompts


def _custom(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    """JSON lines with `prompt` and, if wanted, `output_tokens`."""
    if not options.path:
        raise DatasetError("--dataset-name custom needs --dataset-path FILE.jsonl")
    try:
        lines = Path(options.path).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        texts = [(str(row["prompt"]), int(row.get("output_tokens", options.output_len))) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"--dataset-path {options.path}: {error}") from error
    if not texts:
        raise DatasetError(f"--dataset-path {options.path}: holds no prompt")
    if any(output < 1 for _, output in texts):
        raise DatasetError(f"--dataset-path {options.path}: output_tokens must be at least 1")
    chosen = [texts[i % len(texts)] for i in range(options.num_prompts)]
    return [Prompt(tokenizer.encode(text).ids, text, output) for text, output in chosen]
