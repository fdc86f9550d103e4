"""Data sets of the load generator: reproducible from their seed, of the lengths asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.datasets import DatasetError, DatasetOptions, Prompt, load_tokenizer, make_prompts
from tests.unit.router.tokenizer_folders import byte_level

TOKENIZER = byte_level()
RANDOM = DatasetOptions(name="random", num_prompts=20, input_len=30, output_len=8)
GROUPS = DatasetOptions(
    name="prefix_repetition", num_prompts=12, input_len=5, prefix_len=40, num_prefixes=3, output_len=4
)


@pytest.mark.parametrize("options", [RANDOM, replace(RANDOM, range_ratio=0.5, prefix_len=7), GROUPS])
def test_prompts_when_made_twice_from_a_seed_then_equal_and_else_not(options: DatasetOptions) -> None:
    made = make_prompts(options, TOKENIZER)
    assert made == make_prompts(options, TOKENIZER)
    assert made != make_prompts(replace(options, seed=1), TOKENIZER)
    assert len(made) == options.num_prompts


def test_random_when_no_range_then_exact_lengths_of_ordinary_tokens() -> None:
    special = {i for i, token in TOKENIZER.get_added_tokens_decoder().items() if token.special}
    for prompt in make_prompts(RANDOM, TOKENIZER):
        assert len(prompt.token_ids) == 30
        assert prompt.output_tokens == 8
        assert not special & set(prompt.token_ids)
        assert max(prompt.token_ids) < TOKENIZER.get_vocab_size()
        assert prompt.text == TOKENIZER.decode(prompt.token_ids)


def test_random_when_a_range_is_given_then_lengths_stay_in_it_and_differ() -> None:
    prompts = make_prompts(replace(RANDOM, num_prompts=200, range_ratio=0.5), TOKENIZER)
    lengths = {len(p.token_ids) for p in prompts}
    assert min(lengths) >= 15
    assert max(lengths) <= 45
    assert len(lengths) > 10
    assert {p.output_tokens for p in prompts} == set(range(4, 13))


def test_random_when_a_prefix_is_given_then_all_share_it_and_nothing_more() -> None:
    prompts = make_prompts(replace(RANDOM, prefix_len=9), TOKENIZER)
    assert len({tuple(p.token_ids[:9]) for p in prompts}) == 1
    assert len({tuple(p.token_ids[9:]) for p in prompts}) == len(prompts)
    assert {len(p.token_ids) for p in prompts} == {39}


def test_prefix_repetition_then_each_group_has_its_prefix_and_the_groups_are_mixed() -> None:
    prompts = make_prompts(GROUPS, TOKENIZER)
    order = [tuple(p.token_ids[:40]) for p in prompts]
    assert {order.count(prefix) for prefix in order} == {4}
    assert len(set(order)) == 3
    assert order[:3] != order[3:6] or order[3:6] != order[6:9]


def test_custom_when_a_file_is_given_then_its_prompts_in_order_and_again_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "hello world", "output_tokens": 3}, {"prompt": "Grüße"}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    options = DatasetOptions(name="custom", num_prompts=3, output_len=9, path=str(file))
    hello = Prompt(TOKENIZER.encode("hello world").ids, "hello world", 3)
    assert make_prompts(options, TOKENIZER) == [hello, Prompt(TOKENIZER.encode("Grüße").ids, "Grüße", 9), hello]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"text": "x"}', '{"prompt": "x", "output_tokens": 0}'])
def test_custom_when_the_file_is_wrong_then_the_flag_and_file_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError, match=r"--dataset-path .*prompts\.jsonl"):
        make_prompts(DatasetOptions(name="custom", num_prompts=1, path=str(file)), TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts 0"),
        ({"input_len": 0}, "--random-input-len 0"),
        ({"output_len": 0}, "--random-output-len 0"),
        ({"prefix_len": -1}, "--random-prefix-len -1"),
        ({"range_ratio": 1.0}, "--random-range-ratio 1"),
        ({"name": "custom"}, "--dataset-path"),
        ({"name": "sonnets"}, "--dataset-name sonnets"),
    ],
)
def test_options_when_out_of_range_then_the_flag_is_named(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(DatasetError, match=flag):
        make_prompts(replace(RANDOM, **changes), TOKENIZER)  # type: ignore[arg-type]


def test_tokenizer_when_the_folder_has_none_then_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"--tokenizer .*tokenizer\.json does not exist"):
        load_tokenizer(str(tmp_path))
