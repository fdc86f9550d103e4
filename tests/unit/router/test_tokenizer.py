"""The tokenizer of a model folder, against the library that models are made with."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from router.text.tokenizer import INLINE_CHARS, Tokenizer
from rpc.errors import BatonError, ErrorCode
from tests.unit.router import tokenizer_folders as folders

TEXTS = [
    "The capital of France is Paris.",
    " two  spaces\n\ttab",
    "<|im_start|>user\nhi<|im_end|>",
    "你好 😀 e\u0301",
    "two words and two words",
    "<s>inside</s>",
    "",
]


@pytest.fixture(params=["byte_level", "space_sign"])
def folder(request, tmp_path):
    if request.param == "byte_level":
        return folders.chat_folder(tmp_path)
    return folders.write_folder(
        tmp_path,
        folders.space_sign(),
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True},
        unk_token="<unk>",
        add_bos_token=False,
        tokenizer_class="PreTrainedTokenizerFast",
    )


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_and_text_when_compared_with_transformers_are_the_same(folder, add_special_tokens):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in TEXTS:
        ids = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert ours.encode(text, add_special_tokens=add_special_tokens) == ids
        for skip in (True, False):
            theirs = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == theirs
    assert set(reference.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(reference)
    assert (ours.bos_token, ours.eos_token) == (reference.bos_token, reference.eos_token)


def test_special_tokens_when_named_in_the_configuration_only_are_special(tmp_path):
    tokenizer = Tokenizer.load(
        folders.write_folder(tmp_path, folders.byte_level(), additional_special_tokens=["two words"], pad_token="[PAD]")
    )
    ids = tokenizer.encode("x two words")
    assert tokenizer.decode(ids) == "x "
    # A token that the vocabulary lacks is not added: it would get an id that the model does not have.
    assert tokenizer.encode("[PAD]") != [tokenizer.vocab_size]


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda folder: None, "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (
            lambda folder: (folders.chat_folder(folder) / "tokenizer_config.json").write_text("[]"),
            "tokenizer_config.json",
        ),
        (
            lambda folder: (folders.chat_folder(folder) / "tokenizer_config.json").write_text("{"),
            "tokenizer_config.json",
        ),
    ],
)
def test_load_when_a_file_is_missing_or_broken_names_it(tmp_path, write, named):
    write(tmp_path)
    with pytest.raises(BatonError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code is ErrorCode.INVALID_PARAMS
    assert named in caught.value.message


@pytest.mark.skipif("BATON_TESTS_DISTURBED" in os.environ, reason="it measures pauses of the loop, which are made then")
async def test_long_text_when_encoded_off_the_loop_leaves_the_loop_running(tmp_path):
    tokenizer = Tokenizer.load(folders.chat_folder(tmp_path))
    text = "The quick brown fox 你好 😀 " * 20_000
    loop = asyncio.get_running_loop()

    async def encoded() -> tuple[list[int], list[float], float]:
        """The ids, the pauses of the loop meanwhile, and the time that it took."""
        pauses: list[float] = []
        running = True

        async def watch() -> None:
            turn = began
            while running:
                await asyncio.sleep(0)
                pauses.append(loop.time() - turn)
                turn += pauses[-1]

        async with asyncio.TaskGroup() as group:
            began = loop.time()
            group.create_task(watch())
            ids = await tokenizer.encode_off_loop(text)
            took = loop.time() - began
            running = False
        return ids, pauses, took

    # An encoding that holds Python's lock is one pause of almost all the time that it takes, every time. So is one
    # during which the machine lets the loop stand, which says nothing: one in which the loop ran is proof enough.
    seen: list[str] = []
    for _ in range(10):
        ids, pauses, took = await encoded()
        if max(pauses) < took / 2 and len(pauses) > 20:
            break
        seen.append(f"{max(pauses):.3f} s of {took:.3f} s")
    else:
        pytest.fail(f"the loop stood for {seen}")
    assert ids == tokenizer.encode(text)
    tokenizer.close()


async def test_short_text_when_encoded_takes_no_thread(tmp_path):
    tokenizer = Tokenizer.load(folders.chat_folder(tmp_path))
    before = set(threading.enumerate())  # of which some of other tests may end meanwhile
    assert await tokenizer.encode_off_loop("hello " * (INLINE_CHARS // 6)) == tokenizer.encode(
        "hello " * (INLINE_CHARS // 6)
    )
    assert not set(threading.enumerate()) - before


async def test_text_that_cannot_fit_when_encoded_is_refused_before_any_work(tmp_path):
    tokenizer = Tokenizer.load(folders.chat_folder(tmp_path))
    with pytest.raises(BatonError) as caught:
        await tokenizer.encode_off_loop("x" * 10_000_000, max_tokens=512)
    assert caught.value.code is ErrorCode.LONG_PROMPT_ERROR
    assert "512" in caught.value.message
    assert len(await tokenizer.encode_off_loop("x" * 5000, max_tokens=512)) > 512


def test_token_text_when_a_token_is_part_of_a_character_shows_its_bytes():
    tokenizer = Tokenizer(folders.byte_level())
    part = tokenizer._backend.token_to_id("ð")
    assert tokenizer.token_text(part) == "bytes:\\xf0"
    assert tokenizer.piece(part) == b"\xf0"
    hello = tokenizer.encode(" hello")
    assert "".join(tokenizer.token_text(token_id) for token_id in hello) == " hello"
    assert tokenizer.token_text(tokenizer._backend.token_to_id("<|im_end|>")) == "<|im_end|>"
    assert tokenizer.token_text(10**6) == ""
