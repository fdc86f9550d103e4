"""Figures and verdicts of `make bench`, on hand-made measurements."""

from __future__ import annotations

import random

import pytest

from bench.comparison import Case, Comparison, MeasurementFailed, decode_rate, random_prompt
from bench.process_starts import StartFailed, start_seconds
from bench.report import Page, case_row, show_comparison
from bench.results import RequestResult


def stream(*chunks: tuple[float, int]) -> RequestResult:
    made = RequestResult(0.0, 1)
    for at, tokens in chunks:
        made.chunk(at, tokens)
    return made


def test_decode_rate_when_streams_overlap_then_only_what_came_while_all_were_decoding_counts() -> None:
    # From 2.0 (the second one's first token) to 4.0 (the first one's end): two tokens of the one, three of the other.
    one = stream((0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1))
    other = stream((2.0, 1), (3.0, 2), (4.0, 1), (5.0, 1))
    assert decode_rate([one, other]) == 2.5


def test_decode_rate_when_one_stream_then_its_first_token_is_left_out() -> None:
    assert decode_rate([stream((1.0, 1), (1.5, 1), (2.0, 1), (3.0, 1))]) == 1.5


def test_decode_rate_when_streams_do_not_overlap_then_no_figure() -> None:
    with pytest.raises(MeasurementFailed, match="overlap"):
        decode_rate([stream((0.0, 1), (1.0, 1)), stream((1.0, 1), (2.0, 1))])


def test_random_prompt_when_made_from_the_same_seed_then_equal() -> None:
    assert random_prompt(9, 3, random.Random(4)) == random_prompt(9, 3, random.Random(4))
    assert len(random_prompt(9, 3, random.Random(4)).token_ids) == 9


def case(ours: list[float], theirs: list[float], kind: str = "decode", streams: int = 1, context: int = 64) -> Case:
    return Case(kind, streams, context, ours, theirs)


def test_case_when_rounds_differ_then_ratio_of_medians_and_of_each_round() -> None:
    measured = case([10.0, 30.0, 20.0], [10.0, 20.0, 8.0])
    assert measured.ratio == 2.0
    assert measured.ratios == [1.0, 1.5, 2.5]


@pytest.mark.parametrize(("ours", "verdict"), [(16.0, "met"), (15.9, "**missed**")])
def test_row_when_the_target_is_reached_or_not_then_it_says_so(ours: float, verdict: str) -> None:
    page = Page()
    row = case_row(page, "bfloat16", case([ours], [10.0]))
    assert row.startswith(f"| decode, 1 stream, context 64 | {ours:.1f} | 10.0 | ")
    assert row.endswith(f"| 1.6 | {verdict} |")
    assert page.missed == ([] if verdict == "met" else ["bfloat16 decode, 1 stream, context 64"])


def comparison(dtype: str, equal: int = 4, **changes: list[float]) -> Comparison:
    figures = {"token_added_ms": [1.0, 2.0], "first_added_ms": [4.0], "read_seconds": [0.02], **changes}
    return Comparison(
        dtype,
        [case([20.0], [10.0]), case([400.0], [100.0], "prefill", 1, 512)],
        resident_mb={"router": 100.0},
        weight_bytes=200_000_000,
        equal_prompts=equal,
        **figures,
    )


def test_comparison_when_shown_then_floor_overheads_and_equality(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page()
    show_comparison(page, comparison("bfloat16", equal=3))
    shown = capsys.readouterr().out
    assert "reads the weights (200 MB) once, which takes 20.0 ms here (10.0 GB/s)" in shown
    assert "cannot exceed 50 tokens/s" in shown
    assert "add to a token, 1 stream: 1.50 ms (1.00–2.00), at most 3 ms: met" in shown
    assert "| prefill of 512 tokens | 400.0 | 100.0 |" in shown
    assert "3 of 4: for information" in shown
    assert page.missed == []


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (comparison("float32", equal=3), "equal tokens"),
        (comparison("float32", token_added_ms=[3.1]), "router and RPC add to a token, 1 stream"),
        (comparison("float32", first_added_ms=[5.1]), "router and RPC add to the first token"),
    ],
)
def test_comparison_when_a_limit_is_passed_then_it_is_missed(found: Comparison, missed: str) -> None:
    page = Page()
    show_comparison(page, found)
    assert page.missed == [missed]


def test_start_when_the_process_ends_instead_then_no_figure() -> None:
    with pytest.raises(StartFailed, match="router ended with status 2"):
        start_seconds("router", "/no/such/folder")
