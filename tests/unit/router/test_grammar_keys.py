"""Which grammar a request's fields ask for, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.grammar.keys import read_grammar, unknown_keys
from router.http.schemas import ChatBody, CompletionBody
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import MAX_GRAMMAR_BYTES, GrammarKind

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("body", "kind", "text", "field"),
    [
        ({"json_schema": SCHEMA}, "json_schema", TEXT, "json_schema"),
        ({"json_schema": '{"type": "string"}'}, "json_schema", '{"type": "string"}', "json_schema"),
        ({"json_schema": True}, "json_schema", "true", "json_schema"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x", "ebnf"),
        ({"choice": ["a", 'b"']}, "ebnf", 'root ::= "a" | "b\\""', "choice"),
        ({"structural_tag": "{}"}, "structural_tag", "{}", "structural_tag"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "ebnf", 'root ::= "a"', "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x", "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", "", "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "ebnf", "root ::= x", "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            TEXT,
            "response_format",
        ),
        ({"response_format": TAG}, "structural_tag", json.dumps(TAG, separators=(",", ":")), "response_format"),
    ],
)
def test_grammar_when_one_is_asked_for_then_it_is_read(body: dict[str, Any], kind: str, text: str, field: str) -> None:
    asked = read_grammar(body)
    assert asked is not None
    assert (asked.spec.kind, asked.spec.text, asked.field) == (GrammarKind(kind), text, field)


@pytest.mark.parametrize(
    "body", [{}, {"regex": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {"other": 1}}]
)
def test_grammar_when_none_is_asked_for_then_there_is_none(body: dict[str, Any]) -> None:
    assert read_grammar(body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "a", "ebnf": "root ::= x"}, "ebnf"),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"regex": 3}, "regex"),
        ({"regex": ""}, "regex"),
        ({"ebnf": ["x"]}, "ebnf"),
        ({"json_schema": 3}, "json_schema"),
        ({"choice": "abc"}, "choice"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a", 3]}, "choice"),
        ({"choice": ["x"] * 10_001}, "choice"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": ["ä", "\ud800"]}, "choice"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ],
)
def test_grammar_when_the_fields_are_wrong_then_604_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BatonError) as caught:
        read_grammar(body)
    assert caught.value.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
    assert caught.value.param == param


def test_members_when_they_mean_nothing_then_each_is_named_and_a_structural_tag_is_left_alone() -> None:
    body = {
        "structured_outputs": {"regex": "a", "disable_any_whitespace": True},
        "response_format": {"type": "json_schema", "x": 1, "json_schema": {"name": "n", "schema": {}, "y": 2}},
    }
    assert list(unknown_keys(body)) == [
        "structured_outputs.disable_any_whitespace",
        "response_format.x",
        "response_format.json_schema.y",
    ]
    assert list(unknown_keys({"response_format": TAG, "structured_outputs": 3})) == []


def test_members_when_they_mean_nothing_then_they_are_ignored_and_logged_once_for_each_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        body = {
            "prompt": "x", "stream": True, "stream_options": {"include_usage": True, "unknown_of_stream": 1},
            "structured_outputs": {"regex": "a", "unknown_of_grammar": 1},
        }  # fmt: skip
        params = CompletionBody.parse(body).params()
        assert params.grammar is not None and params.grammar.spec.text == "a"
    lines = [record.getMessage() for record in caplog.records if "unknown_of_" in record.getMessage()]
    assert [line.rpartition(" ")[2] for line in lines] == [
        "'stream_options.unknown_of_stream'",
        "'structured_outputs.unknown_of_grammar'",
    ]


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ({"choice": ["a"]}, True),
        ({"guided_choice": ["a"]}, True),
        ({"json_schema": SCHEMA}, True),
        ({"structured_outputs": {"json_object": True}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"regex": "a*"}, False),
        ({"ebnf": "root ::= x"}, False),
        ({"response_format": TAG}, False),
    ],
)
def test_texts_when_they_end_by_themselves_then_the_grammar_says_so(body: dict[str, Any], ends: bool) -> None:
    asked = read_grammar(body)
    assert asked is not None
    assert asked.ends is ends


@pytest.mark.parametrize("beams", [{"use_beam_search": True}, {"num_beams": 2}])
def test_grammar_when_beams_are_asked_for_too_then_605(beams: dict[str, Any]) -> None:
    with pytest.raises(BatonError) as caught:
        CompletionBody.parse({"prompt": "x", "regex": "a", **beams}).params()
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_PARAMS, "regex")
    assert CompletionBody.parse({"prompt": "x", **beams}).params().grammar is None
    messages = [{"role": "user", "content": "x"}]
    assert ChatBody.parse({"messages": messages, "regex": "a", "num_beams": 1}).params().grammar is not None
