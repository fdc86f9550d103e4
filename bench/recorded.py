"""Prompts made of what was recorded elsewhere, in the forms in which such files are passed on.

* `sharegpt`: JSON, a list of `{"conversations": [{"value": question}, {"value": answer}, …]}`. The first question is
  the prompt, its answer's length that of the answer. Very short and very long ones are left out, as is usual.
* `burstgpt`: CSV with the columns `Model`, `Request tokens` and `Response tokens`. Lengths alone; the tokens are drawn.
* `sonnet`: a text whose lines are drawn until a prompt has its length; the first lines are the same for all.
* `timed_trace`: JSON lines of `{"timestamp", "input_length", "output_length", "hash_ids"}`, one hash id for each
  `chunk_tokens` tokens of the prompt. Equal ids give equal tokens, made from seed and id, so what prompts share there
  they share here.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from bench.prompts import DatasetError, DatasetOptions, Prompt, ordinary_ids

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048  # tokens of what is taken from sharegpt
BURSTGPT_MODEL = "GPT-4"
SONNET_HEAD = "Pick as many lines as you can from these poem lines:\n"

T = TypeVar("T")


def _read(options: DatasetOptions, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the file. Raises DatasetError naming it."""
    if not options.path:
        raise DatasetError(f"--dataset-name {options.name} needs --dataset-path FILE")
    try:
        return parse(Path(options.path).read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise DatasetError(f"--dataset-path {options.path}: {type(error).__name__}: {error}") from error


def _some(options: DatasetOptions, found: Sequence[T], what: str) -> Sequence[T]:
    if not found:
        raise DatasetError(f"--dataset-path {options.path}: holds no {what}")
    return found


def sharegpt(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    def parse(text: str) -> list[tuple[str, str]]:
        talks = [row["conversations"] for row in json.loads(text)]
        return [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]

    talks = _read(options, parse)
    random.Random(options.seed).shuffle(talks)
    found: list[Prompt] = []
    for question, answer in talks:
        ids, output = tokenizer.encode(question).ids, len(tokenizer.encode(answer).ids)
        if SHORTEST <= len(ids) <= LONGEST_PROMPT and output >= SHORTEST and len(ids) + output <= LONGEST:
            found.append(Prompt(ids, question, output))
            if len(found) == options.num_prompts:
                break
    _some(options, found, "conversation of a usual length")
    return [found[i % len(found)] for i in range(options.num_prompts)]


def burstgpt(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    def parse(text: str) -> list[tuple[int, int]]:
        rows = [row for row in csv.DictReader(text.splitlines()) if row["Model"] == BURSTGPT_MODEL]
        lengths = [(int(row["Request tokens"]), int(row["Response tokens"])) for row in rows]
        return [(input_len, output) for input_len, output in lengths if input_len > 0 and output > 0]

    lengths = _some(options, _read(options, parse), f"request of {BURSTGPT_MODEL} that was answered")
    rng, ids = random.Random(options.seed), ordinary_ids(tokenizer)
    enough = len(lengths) >= options.num_prompts
    chosen = rng.sample(lengths, options.num_prompts) if enough else rng.choices(lengths, k=options.num_prompts)
    prompts = []
    for input_len, output in chosen:
        tokens = rng.choices(ids, k=input_len)
        prompts.append(Prompt(tokens, tokenizer.decode(tokens), output))
    return prompts


def sonnet(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    def parse(text: str) -> list[str]:
        return [line + "\n" for line in text.splitlines() if line.strip()]

    lines = _some(options, _read(options, parse), "line")
    sizes = {line: len(tokenizer.encode(line, add_special_tokens=False).ids) for line in lines}
    head = len(tokenizer.encode(SONNET_HEAD).ids)
    if head + min(sizes.values()) > options.input_len:
        raise DatasetError(f"--random-input-len {options.input_len} has no room for {head} tokens and a line of it")

    def filled(text: str, size: int, limit: int, more: Iterable[str]) -> tuple[str, int]:
        for line in more:
            if size + sizes[line] > limit:
                break
            text, size = text + line, size + sizes[line]
        return text, size

    rng = random.Random(options.seed)
    shared = filled(SONNET_HEAD, head, min(options.prefix_len, options.input_len), lines)
    prompts = []
    for _ in range(options.num_prompts):
        text, _ = filled(*shared, options.input_len, iter(lambda: rng.choice(lines), None))
        prompts.append(Prompt(tokenizer.encode(text).ids, text, options.output_len))
    return prompts


def timed_trace(options: DatasetOptions, tokenizer: Tokenizer) -> list[Prompt]:
    """The first `num_prompts` requests of the trace, or all when there are fewer."""
    for flag, value in (
        ("--timed-trace-chunk-hash-size", options.chunk_tokens),
        ("--timed-trace-sec-multiplier", options.seconds_per_unit),
        ("--trace-length-scale", options.length_scale),
    ):
        if not (0 < value < math.inf):
            raise DatasetError(f"{flag} {value:g} must be above 0")

    def parse(text: str) -> list[tuple[float, int, int, list[Any]]]:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()][: options.num_prompts]
        return [
            (float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), list(row["hash_ids"]))
            for row in rows
        ]

    rows = _some(options, _read(options, parse), "request")
    ids = ordinary_ids(tokenizer)
    chunk = max(1, round(options.chunk_tokens * options.length_scale))
    first = min(at for at, *_ in rows)
    prompts = []
    for at, input_len, output_len, hash_ids in rows:
        size = max(1, round(input_len * options.length_scale))
        tokens: list[int] = []
        for hash_id in hash_ids[:-1]:
            tokens += _drawn(options.seed, hash_id, ids, min(chunk, size - len(tokens)))
        # Rounding may leave a little more, or less, than a chunk for the last one.
        tokens += _drawn(options.seed, hash_ids[-1] if hash_ids else f"row {len(prompts)}", ids, size - len(tokens))
        output = max(1, round(output_len * options.length_scale))
        at_s = (at - first) * options.seconds_per_unit
        prompts.append(Prompt(tokens, tokenizer.decode(tokens), output, at_s))
    return sorted(prompts, key=lambda prompt: prompt.at_s)


def _drawn(seed: int, hash_id: object, ids: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens for which the id stands; more of them begin with the same."""
    return random.Random(f"{seed}/{hash_id}").choices(ids, k=count) if count > 0 else []


def fitting(prompts: Iterable[Prompt], longest: int) -> list[Prompt]:
    """Those whose prompt and answer fit into `longest` tokens (0: unknown, all of them), with times that begin at 0."""
    fit = [p for p in prompts if not longest or len(p.token_ids) + p.output_tokens <= longest]
    return [replace(p, at_s=p.at_s - fit[0].at_s) for p in fit]
