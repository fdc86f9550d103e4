"""Schemas that are taken lead to grammars that accept nothing else; the others are refused at a place that is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rpc.grammar import GrammarKind, GrammarSpec
from rpc.grammar_compiler import GrammarCompiler
from rpc.json_schema_support import SchemaBudget, UnsupportedSchema, check_schema
from rpc.vocabulary import Vocabulary

jsonschema = pytest.importorskip("jsonschema", reason="a second opinion on what fits a schema")

REFUSED: list[tuple[Any, str]] = [
    ([], "/"),
    (False, "/"),
    ({"type": 3}, "/type"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
    ({"type": "array", "contains": {"const": 5}}, "/contains"),
    ({"type": "object", "properties": {"a/b": {"not": {"type": "string"}}}}, "/properties/a~1b/not"),
    ({"if": {"type": "integer"}, "then": {"minimum": 5}}, "/if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "/propertyNames"),
    ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
    ({"type": ["integer", "number"], "multipleOf": 2}, "/multipleOf"),
    ({"minimum": 5}, "/minimum"),
    ({"properties": {"a": {}}}, "/properties"),
    ({"allOf": [{"type": "integer"}, {"type": "integer"}]}, "/allOf"),
    ({"anyOf": []}, "/anyOf"),
    ({"type": "array", "items": {"oneOf": []}}, "/items/oneOf"),
    ({"anyOf": [{"type": "integer"}], "minimum": 3}, "/minimum"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {"type": "integer"}}}, "/minimum"),
    ({"$ref": "https://example.org/schema"}, "/$ref"),
    ({"const": 1, "enum": [1]}, "/enum"),
    ({"type": "string", "enum": ["a", 1]}, "/enum"),
    ({"type": "integer", "const": "a"}, "/const"),
    ({"type": "integer", "enum": [1, 2], "minimum": 2}, "/minimum"),
    ({"type": "string", "pattern": "^a", "minLength": 3}, "/pattern"),
    ({"type": "string", "format": "email", "maxLength": 3}, "/format"),
    ({"type": "string", "format": "weird"}, "/format"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "/required"),
    ({"type": "array", "items": [{"type": "string"}]}, "/items"),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, "/oneOf"),
    ({"$defs": {"x": {"type": "string", "format": "weird"}}, "$ref": "#/$defs/x"}, "/$defs/x/format"),
    (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {"type": "string"}}},
        "/patternProperties",
    ),
    ({"type": "object", "properties": {}, "required": [{}]}, "/required"),
    ({"type": "object", "required": [["a"]]}, "/required"),
    ({"type": "string", "format": {}}, "/format"),
    ({"type": ["string"] * 8}, "/type"),
    ({"type": "integer", "enum": [float("inf")]}, "/enum"),
    ({"type": "integer", "enum": [float("nan")]}, "/enum"),
]

_CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
_DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
_TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["next"],
}
# With values of which some fit.
TAKEN: list[tuple[Any, list[Any]]] = [
    (True, [1, "a", {"b": []}]),
    ({"title": "x", "description": "y", "type": "integer", "default": 3}, [3, "3", 3.5]),
    ({"type": "integer", "multipleOf": 3}, [3, 4]),
    ({"type": "integer", "minimum": 3, "maximum": 120}, [2, 3, 120, 121]),
    ({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 5}, [-3, -2, 4, 5]),
    ({"type": "number", "minimum": 0.5, "maximum": 2}, [0.25, 0.5, 1.75, 2.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "äöü", "abcd"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc", "abd", ""]),
    ({"type": "string", "format": "date"}, ["2026-01-31", "31.1.2026"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.1", "10.0.0"]),
    ({"type": ["string", "null"]}, ["a", None, 1]),
    ({"enum": ["a", 1, None, "é"]}, ["a", 1, None, "é", 2, "b"]),
    ({"type": "string", "enum": ["a", "b"]}, ["a", "c"]),
    ({"const": [1, "x"]}, [[1, "x"], [1]]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[], [1], [1, 2], [1, 2, 3], ["a"]],
    ),
    ({"type": "array", "uniqueItems": False, "items": {"type": "boolean"}}, [[True, True], [1]]),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        [[1], [1, "a"], [1, "a", 2]],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": "x"}, {"b": "x"}, {"a": "x"}],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"a": 1, "b": 2, "c": 3}],
    ),
    (
        {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False},
        [{"x1": 1}, {"y": 1}, {"x1": "a"}],
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True, "a"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a", None]),
    ({"oneOf": [_CAT, _DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "x"}, {"kind": "cow"}]),
    ({"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": _CAT, "d": _DOG}}, [{"kind": "cat"}, {}]),
    ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 2, 4]),
    ({"allOf": [{"type": "integer", "minimum": 3}]}, [3, 2]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}}, [{"next": None}, {"next": {"next": None}}, {"next": {}}]),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    vocabulary = Vocabulary((*(bytes([i]) for i in range(256)), b""), frozenset({256}))
    return GrammarCompiler(vocabulary, vocab_size=257, stop_token_ids=(256,), cache_bytes=1 << 24)


@pytest.mark.parametrize(("schema", "pointer"), REFUSED, ids=[json.dumps(schema)[:60] for schema, _ in REFUSED])
def test_schema_when_a_grammar_could_not_keep_to_it_then_is_refused_with_the_place(schema: Any, pointer: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        check_schema(schema)
    assert caught.value.pointer == pointer, str(caught.value)


@pytest.mark.parametrize(("schema", "values"), TAKEN, ids=[json.dumps(schema)[:60] for schema, _ in TAKEN])
def test_schema_when_it_is_taken_then_its_grammar_accepts_what_fits_and_nothing_else(
    compiler: GrammarCompiler, schema: Any, values: list[Any]
) -> None:
    grammar = compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    fits = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid
    for value in values:
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, indent=2)):
            matcher = compiler.library.GrammarMatcher(grammar)
            accepted = matcher.accept_string(text) and matcher.is_completed()
            if isinstance(schema, dict) and isinstance(schema.get("const"), list):
                assert fits(value) or not accepted, text  # such a constant can be written in one way only
            else:
                assert accepted == fits(value), text


def test_schema_when_it_is_nested_beyond_the_limit_then_is_refused() -> None:
    schema: Any = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UnsupportedSchema, match="levels deep"):
        check_schema(schema)


def _nested_constants(constant: int) -> Any:
    schema: Any = {"const": constant}
    for _ in range(450):
        schema = {"type": "object", "required": ["x"], "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"oneOf": [{"enum": list(range(400))}, {"enum": list(range(400, 800))}]}, "too many"),
        ({"oneOf": [{"const": number} for number in range(500)]}, "too many"),
        ({"oneOf": [{"$ref": "#/" + "a" * 10**6} for _ in range(2)]}, "too many"),
        ({"oneOf": [{"type": "object", "required": ["a"] * 10**5}] * 3}, "too many"),
        ({"oneOf": [_nested_constants(1), _nested_constants(2)]}, "exclude each other"),
        ({"type": "object", "properties": {str(number): {} for number in range(10_001)}}, "more than 10000 parts"),
        ({"type": "object", "properties": {"k" * 10**6: {"enum": [], "not": {}}}}, "'not'"),
        ({"type": "object", "required": ["k" * 10**6]}, "not among"),
    ],
    ids=["enums", "entries", "references", "names", "depth", "parts", "pointer", "name"],
)
def test_schema_when_looking_through_it_would_be_much_work_then_is_refused_after_little(
    schema: Any, problem: str
) -> None:
    with pytest.raises(UnsupportedSchema, match=problem) as caught:
        check_schema(schema)
    assert len(caught.value.pointer) + len(str(caught.value)) < 1000


def test_schemas_when_they_share_a_budget_then_it_bounds_them_all() -> None:
    budget = SchemaBudget(parts=3)
    check_schema({"type": "array", "items": {}}, budget)
    with pytest.raises(UnsupportedSchema, match="parts"):
        check_schema({"type": "array", "items": {}}, budget)
