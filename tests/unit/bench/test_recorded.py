"""Prompts made of recorded traffic: of the lengths, the times and the shared beginnings that the files have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.datasets import RECORDED, DatasetError, DatasetOptions, Prompt, make_prompts
from bench.recorded import SONNET_HEAD, fitting
from tests.unit.router.tokenizer_folders import byte_level

TOKENIZER = byte_level()
ROWS = [
    {"timestamp": 500, "input_length": 1300, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 4]},
    {"timestamp": 2500, "input_length": 1536, "output_length": 8, "hash_ids": [1, 2, 5]},
]


def tokens_of(text: str) -> int:
    return len(TOKENIZER.encode(text).ids)


def options_of(folder: Path, name: str, content: str, **fields: object) -> DatasetOptions:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return DatasetOptions(**{"name": name, "num_prompts": 3, "path": str(path), **fields})  # type: ignore[arg-type]


def trace(folder: Path, **fields: object) -> DatasetOptions:
    return options_of(folder, "timed_trace", "\n".join(map(json.dumps, ROWS)) + "\n", **fields)


def test_trace_when_it_is_read_then_lengths_and_times_are_its_own_and_equal_ids_are_equal_tokens(
    tmp_path: Path,
) -> None:
    first, second, third = made = make_prompts(trace(tmp_path), TOKENIZER)
    assert [(len(p.token_ids), p.output_tokens, p.at_s) for p in made] == [
        (600, 5, 0.0),
        (1300, 20, 0.5),
        (1536, 8, 2.5),
    ]
    assert first.token_ids[:512] == second.token_ids[:512] == third.token_ids[:512]
    assert second.token_ids[512:1024] == third.token_ids[512:1024] != first.token_ids[512:]
    assert second.token_ids[1024:] != third.token_ids[1024:1300]
    assert all(prompt.text == TOKENIZER.decode(prompt.token_ids) for prompt in made)
    assert made == make_prompts(trace(tmp_path), TOKENIZER)
    assert made[0].token_ids != make_prompts(trace(tmp_path, seed=1), TOKENIZER)[0].token_ids


def test_trace_when_it_is_scaled_then_what_is_shared_stays_shared(tmp_path: Path) -> None:
    scaled = trace(tmp_path, length_scale=0.1, seconds_per_unit=0.01, num_prompts=2)
    first, second = make_prompts(scaled, TOKENIZER)
    assert [(len(p.token_ids), p.output_tokens, p.at_s) for p in (first, second)] == [(60, 1, 0.0), (130, 2, 5.0)]
    assert first.token_ids[:51] == second.token_ids[:51]
    assert first.token_ids[51:] != second.token_ids[51:60]
    [short] = make_prompts(trace(tmp_path, chunk_tokens=600, num_prompts=1), TOKENIZER)
    assert len(short.token_ids) == 1300


def test_trace_when_requests_do_not_fit_then_they_are_left_out_and_the_rest_begins_at_once() -> None:
    prompts = [Prompt([1] * 9, "", 2, 1.0), Prompt([1] * 5, "", 5, 3.0), Prompt([1], "", 1, 4.5)]
    assert fitting(prompts, 10) == [Prompt([1] * 5, "", 5, 0.0), Prompt([1], "", 1, 1.5)]
    assert len(fitting(prompts, 0)) == 3
    assert fitting(prompts, 1) == []


def test_sharegpt_when_it_is_read_then_questions_of_usual_lengths_with_the_lengths_of_their_answers(
    tmp_path: Path,
) -> None:
    talks = [
        ["What is a ledger?", "A book of accounts."],
        ["x", "too short a question"],
        ["Hello there", ""],
        ["alone"],
    ]
    talks.append(["How long is this? " * 200, "Too long for anybody."])
    content = json.dumps([{"conversations": [{"from": "x", "value": value} for value in talk]} for talk in talks])
    made = make_prompts(options_of(tmp_path, "sharegpt", content), TOKENIZER)
    question, answer = talks[0]
    assert made == [Prompt(TOKENIZER.encode(question).ids, question, tokens_of(answer))] * 3


def test_burstgpt_when_it_is_read_then_lengths_of_answered_requests_of_its_large_model(tmp_path: Path) -> None:
    rows = ["5,ChatGPT,10,11,21,API log", "6,GPT-4,12,13,25,API log", "7,GPT-4,14,0,14,API log", "8,GPT-4,16,17,33,x"]
    content = "\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows])
    options = options_of(tmp_path, "burstgpt", content, num_prompts=2)
    made = make_prompts(options, TOKENIZER)
    assert sorted((len(p.token_ids), p.output_tokens) for p in made) == [(12, 13), (16, 17)]
    more = make_prompts(replace(options, num_prompts=20), TOKENIZER)
    assert {(len(p.token_ids), p.output_tokens) for p in more} == {(12, 13), (16, 17)}
    assert len({tuple(p.token_ids) for p in more}) == 20


def test_sonnet_when_it_is_read_then_prompts_are_full_and_begin_alike(tmp_path: Path) -> None:
    lines = [f"line {number} of a poem that nobody has written\n" for number in range(40)]
    options = options_of(tmp_path, "sonnet", "\n".join(lines), input_len=400, prefix_len=200, output_len=7)
    made = make_prompts(options, TOKENIZER)
    longest = max(map(tokens_of, lines))
    shared = 0
    while len({p.text[: len(SONNET_HEAD) + sum(map(len, lines[: shared + 1]))] for p in made}) == 1:
        shared += 1
    assert 200 - longest <= tokens_of(SONNET_HEAD + "".join(lines[:shared])) <= 200
    assert len({p.text for p in made}) == 3
    for prompt in made:
        assert prompt.token_ids == TOKENIZER.encode(prompt.text).ids
        assert 400 - longest <= len(prompt.token_ids) <= 400
        assert prompt.output_tokens == 7


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("content", [None, "", "[", "{}", "[[]]", "Model\n"])
def test_file_when_it_is_none_of_the_form_then_it_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    if name == "sonnet" and content:
        return  # any text will do
    options = options_of(tmp_path, name, content or "")
    if content is None:
        options = replace(options, path=str(tmp_path / "missing"))
    with pytest.raises(DatasetError, match="--dataset-path"):
        make_prompts(options, TOKENIZER)
    with pytest.raises(DatasetError, match="needs --dataset-path"):
        make_prompts(replace(options, path=""), TOKENIZER)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"chunk_tokens": 0}, "--timed-trace-chunk-hash-size 0"),
        ({"seconds_per_unit": -1.0}, "--timed-trace-sec-multiplier -1"),
        ({"length_scale": float("nan")}, "--trace-length-scale nan"),
    ],
)
def test_trace_when_a_flag_cannot_be_then_it_is_named(tmp_path: Path, fields: dict[str, object], flag: str) -> None:
    with pytest.raises(DatasetError, match=flag):
        make_prompts(trace(tmp_path, **fields), TOKENIZER)
