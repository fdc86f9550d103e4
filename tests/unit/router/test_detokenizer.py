"""Incremental detokenization: certain text only, all of it, at a constant price."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from tests.extent import extent
from tests.unit.router import tokenizer_folders as folders

BYTE_LEVEL = Tokenizer(folders.byte_level(), {"eos_token": "<|im_end|>"})
SPACE_SIGN = Tokenizer(folders.space_sign(), {"bos_token": "<s>", "eos_token": "</s>"})
METASPACE = Tokenizer(folders.metaspace(), {"eos_token": "</s>"})
METASPACE_NEVER = Tokenizer(folders.metaspace(prepend_scheme="never"), {"eos_token": "</s>"})
WORD_PIECE = Tokenizer(folders.word_piece(), {"sep_token": "[SEP]"})
ALL = {
    "byte_level": BYTE_LEVEL,
    "space_sign": SPACE_SIGN,
    "metaspace": METASPACE,
    "metaspace_never": METASPACE_NEVER,
}
TEXTS = [
    "The capital of France is Paris.",
    " leading space and  two",
    "你好世界, 日本語 한국어",
    "😀😀 👩‍👩‍👧 family",
    "e\u0301 combining, naïve café",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "",
    "\n\n\t",
]


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.feed(token_id) for token_id in ids]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", TEXTS)
def test_deltas_when_fed_an_encoded_text_are_the_text_of_the_library(name, text):
    tokenizer = ALL[name]
    ids = tokenizer.encode(text)
    backend_text = tokenizer._backend.decode(ids)
    assert "".join(stream(tokenizer, ids)) == backend_text == tokenizer.decode(ids)


def unfinished(detokenizer: Detokenizer) -> str:
    """What is held back, as it reads when nothing follows: one sign for a character's beginning, two for the beginning
    of a surrogate (0xED 0xA0 to 0xBF), which Python waits for the end of although it is none."""
    held, _ = detokenizer._utf8.getstate()
    shown = held.decode(errors="replace")
    assert shown in ("", "\ufffd", "\ufffd\ufffd")
    assert (shown == "\ufffd\ufffd") == (len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0)
    return shown


@given(st.lists(st.integers(0, 600), max_size=60))
@example([172, 97])
@settings(max_examples=extent(100, 300), deadline=None)
def test_deltas_when_byte_level_tokens_are_random_are_the_librarys_decode_minus_an_unfinished_tail(ids):
    detokenizer = Detokenizer(BYTE_LEVEL)
    text = "".join(detokenizer.feed(token_id) for token_id in ids)
    assert BYTE_LEVEL._backend.decode(ids) == text + unfinished(detokenizer)
    assert detokenizer.held == bool(unfinished(detokenizer))


@given(st.lists(st.integers(0, 700), max_size=60), st.booleans())
@settings(max_examples=extent(100, 300), deadline=None)
def test_deltas_when_tokens_with_byte_fallback_are_random_are_the_decode_minus_an_unfinished_tail(ids, skip):
    detokenizer = Detokenizer(SPACE_SIGN, skip_special_tokens=skip)
    text = "".join(detokenizer.feed(token_id) for token_id in ids)
    full = SPACE_SIGN.decode(ids, skip_special_tokens=skip)
    assert full == text + unfinished(detokenizer)
    library = SPACE_SIGN._backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in library:
        assert full == library


@given(st.lists(st.integers(0, 410), max_size=60), st.sampled_from([METASPACE, METASPACE_NEVER]))
@settings(max_examples=extent(80, 200), deadline=None)
def test_deltas_when_metaspace_tokens_are_random_are_the_librarys_decode(ids, tokenizer):
    assert "".join(stream(tokenizer, ids)) == tokenizer._backend.decode(ids)


@given(st.lists(st.integers(0, 420), max_size=40))
@settings(max_examples=100, deadline=None)
def test_deltas_when_tokens_have_no_fixed_bytes_are_the_librarys_decode(ids):
    assert "".join(stream(WORD_PIECE, ids)) == WORD_PIECE._backend.decode(ids)


@given(st.text(max_size=80), st.sampled_from([BYTE_LEVEL, SPACE_SIGN]))
@settings(max_examples=extent(80, 200), deadline=None)
def test_no_delta_when_characters_span_tokens_holds_a_replacement_sign(text, tokenizer):
    if "\ufffd" in text:
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(tokenizer, ids)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == tokenizer.decode(ids)


def test_emoji_when_its_four_bytes_come_one_by_one_appears_with_the_last():
    emoji = "😀".encode()
    ids = [SPACE_SIGN._backend.token_to_id(f"<0x{byte:02X}>") for byte in emoji]
    assert stream(SPACE_SIGN, ids) == ["", "", "", "😀"]


def test_unfinished_character_when_the_sequence_ends_is_held_and_never_shown():
    ids = [BYTE_LEVEL._backend.token_to_id(char) for char in "ðŁĺ"]
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert [detokenizer.feed(token_id) for token_id in ids] == ["", "", ""]
    assert detokenizer.held


def test_special_tokens_when_not_skipped_appear_by_name():
    ids = BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>")
    assert "".join(stream(BYTE_LEVEL, ids)) == "hello"
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=False)) == "<|im_start|>hello<|im_end|>"


@pytest.mark.parametrize("name", ["space_sign", "metaspace"])
def test_first_space_when_a_prompt_stands_before_is_kept(name):
    tokenizer = ALL[name]
    prompt, answer = tokenizer.encode("hello"), tokenizer.encode(" world", add_special_tokens=False)
    alone, behind = Detokenizer(tokenizer), Detokenizer(tokenizer)
    behind.prime(prompt)
    text = "".join(alone.feed(token_id) for token_id in answer)
    continued = "".join(behind.feed(token_id) for token_id in answer)
    assert continued == " " + text.lstrip(" ") or continued == " " + text


def test_character_when_the_prompt_ends_in_its_middle_is_completed_by_the_answer():
    ids = [BYTE_LEVEL._backend.token_to_id(char) for char in "ðŁĺĢ"]
    detokenizer = Detokenizer(BYTE_LEVEL)
    detokenizer.prime([*BYTE_LEVEL.encode("hello "), *ids[:2]])
    assert [detokenizer.feed(token_id) for token_id in ids[2:]] == ["", "😀"]


@pytest.mark.parametrize(
    ("begun", "answer", "texts"),
    [
        ("ðŁ", "ab", ["a", "b"]),
        ("ðŁĺ", "a", ["a"]),
        ("ðŁ", "ĺa", ["", "\ufffda"]),  # a byte of the answer's own that is no character
        ("ðŁ", "ðŁĺĢ", ["", "", "", "😀"]),
        ("Ã", "Ã¼b", ["", "ü", "b"]),
        ("ï", "¿½b", ["", "\ufffd", "b"]),  # that very sign, completed
        ("hello", "Ãa", ["", "\ufffda"]),
    ],
)
def test_character_when_the_answer_does_not_complete_the_prompts_then_it_is_no_part_of_the_text(begun, answer, texts):
    begun, answer = ([BYTE_LEVEL._backend.token_to_id(char) for char in text] for text in (begun, answer))
    assert None not in begun + answer
    detokenizer = Detokenizer(BYTE_LEVEL)
    detokenizer.prime(begun)
    assert [detokenizer.feed(token_id) for token_id in answer] == texts


def test_ids_beyond_the_vocabulary_when_fed_add_nothing():
    assert stream(BYTE_LEVEL, [100_000, 100_001]) == ["", ""]


@pytest.mark.serial
def test_feed_when_the_sequence_is_long_costs_the_same_as_at_its_start():
    ids = BYTE_LEVEL.encode("The quick brown fox 你好 😀 ") * 4000
    detokenizer = Detokenizer(BYTE_LEVEL)
    tenth = len(ids) // 10

    def seconds(part: list[int]) -> float:
        began = time.thread_time()
        for token_id in part:
            detokenizer.feed(token_id)
        return time.thread_time() - began

    seconds(ids[:tenth])
    times = [seconds(ids[i * tenth : (i + 1) * tenth]) for i in range(1, 10)]
    # A cost that grew with the length would make the last tenth about nine times the first.
    assert min(times[-3:]) < 4 * min(times[:3])
