"""Stop strings over token borders."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings
from tests.extent import extent


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    """What each part and the end give out, and the match."""
    finder = StopStrings(stops)
    out = [finder.feed(part) for part in parts]
    out.append(finder.finish())
    return out, finder.matched


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    start, _, index = min(found)
    return text[:start], stops[index]


@pytest.mark.parametrize(
    ("stops", "parts", "out", "matched"),
    [
        (["END"], ["hello END more"], ["hello ", ""], "END"),
        (["END"], ["hello E", "N", "D more"], ["hello ", "", "", ""], "END"),
        (["END"], ["hello E", "N", "x"], ["hello ", "", "ENx", ""], None),
        (["END"], ["hello EN"], ["hello ", "EN"], None),
        (["aab"], ["aa", "a", "ab"], ["", "a", "a", ""], "aab"),
        (["b", "a"], ["xxab"], ["xx", ""], "a"),
        (["ab", "abc"], ["xabc"], ["x", ""], "ab"),
        (["\n\n"], ["one\n", "\ntwo"], ["one", "", ""], "\n\n"),
        (["你好"], ["说你", "好吗"], ["说", "", ""], "你好"),
        # "c" is complete first, but "bcd" began before it and still may come ...
        (["bcd", "c"], ["abc", "d"], ["a", "", ""], "bcd"),
        # ... and when it does not come, "c" it was.
        (["bcd", "c"], ["abc", "x"], ["a", "b", ""], "c"),
        (["bcd", "c"], ["abc"], ["a", "b"], "c"),
        (["x"], [], [""], None),
        (["x"], ["", ""], ["", "", ""], None),
    ],
)
def test_text_when_stop_strings_are_looked_for_ends_before_the_first(stops, parts, out, matched):
    assert run(stops, parts) == (out, matched)


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abcd", max_size=6), max_size=12),
)
@settings(max_examples=extent(500, 1500), deadline=None)
def test_text_when_cut_into_any_parts_is_that_of_the_whole_text(stops, parts):
    out, matched = run(stops, parts)
    assert ("".join(out), matched) == expected(stops, "".join(parts))


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
)
@settings(max_examples=extent(200, 500), deadline=None)
def test_text_when_no_match_comes_is_held_back_no_longer_than_a_stop_string(stops, parts):
    finder = StopStrings(stops)
    seen = ""
    given_out = ""
    for part in parts:
        seen += part
        given_out += finder.feed(part)
        if finder.matched is not None:
            return
        assert seen.startswith(given_out)
        assert len(seen) - len(given_out) < max(map(len, stops)) + len(part)


def test_text_that_is_passed_through_is_not_searched_and_separates():
    finder = StopStrings(["END"])
    assert finder.pass_through("END E") == "END E"
    assert finder.feed("ND x") == "ND x"
    assert finder.feed("E") == ""
    assert finder.pass_through("ND") == "END"
    assert finder.feed("END") == ""
    assert finder.matched == "END"


def test_empty_stop_string_when_given_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_feed_when_stop_strings_nearly_match_everywhere_stays_linear():
    finder = StopStrings(["a" * 1000 + "b"] * 16)
    text = "a" * 20_000
    began = time.thread_time()
    finder.feed(text)
    # 320,000 automaton steps; comparing the strings anew at each place would take a thousand times as many.
    assert time.thread_time() - began < 5
