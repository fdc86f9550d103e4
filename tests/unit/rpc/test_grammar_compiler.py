"""Grammars of every kind, compiled with the real library for the tokenizer of a real model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarKind, GrammarSpec, choice_grammar
from rpc.grammar_compiler import GrammarCompiler
from rpc.grammar_length import longest_text
from rpc.vocabulary import Vocabulary, load_backend
from tests.unit.engine.tiny_models import tiny_model

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<a>",
            "content": {"type": "json_schema", "json_schema": True},
            "end": "</a>",
        },
    }
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.load(tiny_model("llama"), cache_bytes=1 << 24)


@pytest.mark.invariant("RPC-21")
@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"x": [1, {"y": null}]}', "[1]"),
        ("json_schema", SCHEMA, '{"a": 3}', '{"b": 3}'),
        ("json_schema", SCHEMA, '{\n    "a": 3\n}', '{"a": 3, "b": 4}'),
        ("json_schema", SCHEMA, '{"a":3}', '{"a":' + 17 * " " + "3}"),
        ("regex", "[a-z]{2}[0-9]+", "ab12", "a1"),
        ("regex", "\\{4294967297\\}[{4294967297}]", "{4294967297}}", "{4294967297}a"),
        ("ebnf", 'root ::= "{4294967297}" # a{4294967297}', "{4294967297}", "{1}"),
        ("ebnf", 'root ::= "x" y*\ny ::= [0-9é]', "x1é2", "y"),
        (
            "ebnf",
            choice_grammar(['say "hi"\\', "tab\tand\nline", "Größe 🙂", "\x07"]),
            "tab\tand\nline",
            "tab and line",
        ),
        ("structural_tag", TAG, '<a>{"b": [2]}</a>', "<a>{</a>"),
    ],
)
def test_compile_when_the_grammar_is_good_then_it_accepts_and_rejects(
    compiler: GrammarCompiler, kind: str, text: str, good: str, bad: str
) -> None:
    grammar = compiler.compile(GrammarSpec(GrammarKind(kind), text))
    matcher = compiler.library.GrammarMatcher(grammar)
    assert matcher.accept_string(good) and matcher.is_completed()
    matcher = compiler.library.GrammarMatcher(grammar)
    assert not (matcher.accept_string(bad) and matcher.is_completed())


@pytest.mark.parametrize("text", ['say "hi"\\', "tab\tand\nline", "Größe 🙂", "\x07", "\U0001f6ff"])
def test_choice_when_it_has_any_characters_then_it_is_the_only_text(compiler: GrammarCompiler, text: str) -> None:
    matcher = compiler.library.GrammarMatcher(compiler.compile(GrammarSpec(GrammarKind.EBNF, choice_grammar([text]))))
    assert matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.invariant("RPC-21")
@pytest.mark.parametrize(
    ("kind", "text", "metadata"),
    [
        ("ebnf", 'root ::= "a"\n  | b', {"line": "2", "column": "5"}),
        ("ebnf", "root := 1", {"line": "1", "column": "6"}),
        ("regex", "(a", {"position": "3"}),
        ("regex", "\\p{L}", {"position": "1"}),
        ("regex", "a\\ud800", {"position": "1"}),
        ("regex", "[^\\uDFFF]", {"position": "2"}),
        ("regex", "\\u{00d83d}\\u{de00}", {"position": "0"}),
        ("ebnf", 'root ::= "\\ud83d\\ude00"', {"position": "10"}),
        ("ebnf", "root ::= [\\U0000d800-\\U0000dfff]", {"position": "10"}),
        ("json_schema", '{"type": "string", "pattern": "\\\\ud800"}', {"pointer": "/pattern"}),
        (
            "json_schema",
            '{"type": "object", "patternProperties": {"\\\\ud800": {"type": "null"}}}',
            {"pointer": "/patternProperties"},
        ),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "regex", "pattern": "\\\\ud800"}}',
            {"position": "0"},
        ),
        ("regex", "ba{4294967297}", {"position": "2"}),
        ("regex", "\\[a{1,02147483648}", {"position": "3"}),
        ("ebnf", 'root ::= "{" "a"{4294967297, }', {"position": "16"}),
        ("json_schema", '{"type": "string", "pattern": "a{4294967297}"}', {"pointer": "/pattern"}),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "regex", "pattern": "a{4294967297}"}}',
            {"position": "1"},
        ),
        ("json_schema", '{"type": "object",\n }', {"line": "2", "column": "2"}),
        ("json_schema", '{"type": "objec"}', {}),
        ("json_schema", '{"const": NaN}', {}),
        ("json_schema", '{"type": "number", "minimum": -1' + "0" * 400 + "}", {}),
        ("json_schema", '{"const": ' + "9" * 5000 + "}", {}),
        ("json_schema", '{"type": "array", "items": {"not": {}}}', {"pointer": "/items/not"}),
        ("structural_tag", '{"type": "structural_tag"}', {}),
        ("structural_tag", "{", {"line": "1", "column": "2"}),
        (
            "structural_tag",
            TAG.replace("true", '{"uniqueItems": true}'),
            {"pointer": "/format/content/json_schema/uniqueItems"},
        ),
    ],
)
def test_compile_when_the_grammar_is_bad_then_604_with_the_parsers_position(
    compiler: GrammarCompiler, kind: str, text: str, metadata: dict[str, str]
) -> None:
    with pytest.raises(BatonError) as caught:
        compiler.compile(GrammarSpec(GrammarKind(kind), text))
    error = caught.value
    assert error.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
    assert error.metadata == {"cause": "grammar", **metadata}
    assert all(position in error.message for position in metadata.values())
    assert not error.message.endswith("compile: ")
    assert ".cc:" not in error.message and "\n" not in error.message


@pytest.mark.parametrize("text", ["\\\\ud800", "\\ue000\\ud7ff", "\\u{1f600}", "ud800", "\\u0d80"])
def test_regex_when_it_has_no_half_character_then_it_compiles(compiler: GrammarCompiler, text: str) -> None:
    compiler.check(GrammarSpec(GrammarKind.REGEX, text))


@pytest.mark.parametrize("text", ["root ::= root", 'root ::= "a" root'])
def test_check_when_nothing_can_begin_or_something_can_then_only_the_first_is_refused(
    compiler: GrammarCompiler, text: str
) -> None:
    spec = GrammarSpec(GrammarKind.EBNF, text)
    compiler.compile(spec)
    if '"a"' in text:
        compiler.check(spec)
    else:
        with pytest.raises(BatonError, match="no text") as caught:
            compiler.check(spec)
        assert caught.value.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
    compiler.check(GrammarSpec(GrammarKind.EBNF, 'root ::= ""'))


@pytest.mark.parametrize(
    ("kind", "text", "most"),
    [
        ("regex", "[0-9]{3}", 3),
        ("regex", "(yes|no)", 3),
        ("regex", "a?b{2,5}", 6),
        ("regex", "[[a]b{2}", 3),
        ("regex", r"\d{4}-\w", 6),
        ("regex", ".{2}", 8),
        ("regex", "[^a]é", 6),
        ("regex", "[à-ü߿]", 2),
        ("regex", "[ࠀ-￿]{2}", 6),
        ("regex", "((a{1000}){1000}){1000}", 10**9),
        ("regex", "((a{1000}){1000}){3000}", None),
        ("regex", "a*", None),
        ("regex", "a{3,}", None),
        ("regex", "a" * (1 << 14) + "a", None),
        ("regex", "(" * 900 + "a" + ")" * 900, 1),
        ("ebnf", 'root ::= "ab" x{2,4} | ""\nx ::= [a-z] | "é"', 10),
        ("ebnf", 'root ::= x (= "a")\nx ::= [ab] y\ny ::= "c"?', 2),
        ("ebnf", 'root ::= "(" root ")" | ""', None),
        ("ebnf", "root ::= [a-z]*", None),
        ("structural_tag", TAG, None),
        ("structural_tag", TAG.replace("true", '{"enum": ["yes", "no"]}'), 12),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}', None),
        ("json_object", "", None),
        ("json_schema", '{"const": 1}', None),
    ],
)
def test_longest_text_when_a_grammar_has_one_then_its_bytes_are_known(
    compiler: GrammarCompiler, kind: str, text: str, most: int | None
) -> None:
    assert compiler.most_bytes(GrammarSpec(GrammarKind(kind), text)) == most


def test_longest_text_when_grammars_are_written_down_otherwise_then_none_has_a_bound(compiler: GrammarCompiler) -> None:
    written = json.loads(compiler.library.Grammar.from_regex("ab").serialize_json())
    assert longest_text(json.dumps(written)) == 2
    rule = written["rules"][0]
    for change in (
        {"__VERSION__": "v19"},
        {"suffix_stop_infos": [[0]]},
        {"rules": [[*rule[:4], 3, *rule[5:]]]},
        {"grammar_expr_data": [9, *written["grammar_expr_data"][1:]]},
    ):
        assert longest_text(json.dumps(written | change)) is None


def test_vocabulary_when_read_from_a_folder_then_specials_add_nothing_and_the_rest_its_bytes() -> None:
    vocabulary = Vocabulary.load(tiny_model("llama"))
    assert all(vocabulary.pieces[token] == b"" for token in vocabulary.special_ids)
    assert len(vocabulary.special_ids) == 2
    single = {piece for piece in vocabulary.pieces if len(piece) == 1}
    assert single == {bytes([value]) for value in range(256)}


def test_vocabulary_when_a_special_token_marks_tool_calls_then_it_is_text(tmp_path: Path) -> None:
    backend = load_backend(tiny_model("llama"))
    backend.add_special_tokens(["[TOOL_CALLS]", "<|other|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.load(tmp_path)
    pieces = {token: vocabulary.pieces[backend.token_to_id(token)] for token in ("[TOOL_CALLS]", "<|other|>")}
    assert pieces == {"[TOOL_CALLS]": b"[TOOL_CALLS]", "<|other|>": b""}
    assert backend.token_to_id("[TOOL_CALLS]") in vocabulary.special_ids
