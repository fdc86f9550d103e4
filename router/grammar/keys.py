"""Which grammar a request asks for: exactly one, under any of the names that clients know it by.

The common names are `json_schema`, `regex`, `choice`, `ebnf` and `structural_tag`; `guided_*` and
`structured_outputs` are other ways to write the same, and `response_format` is OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpc.errors import BatonError, ErrorCode
from rpc.grammar import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec, choice_grammar

MAX_CHOICES = 10_000
# Other names, and what they are called here.
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
_ENDS = frozenset(("json_object", "json_schema", "choice"))
# Of `response_format` and its `json_schema`, which have members that only explain.
_FORMAT_KEYS = frozenset(("type", "json_schema"))
_FORMAT_SCHEMA_KEYS = frozenset(("name", "description", "schema", "strict"))
KEYS = ("json_schema", "regex", "choice", "ebnf", "structural_tag", *_GUIDED)


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar, and the client's field that asks for it."""

    spec: GrammarSpec
    field: str
    ends: bool = False  # its texts end by themselves: once one is complete, nothing can follow


def read_grammar(body: Mapping[str, Any]) -> AskedGrammar | None:
    """The grammar that the fields of a request ask for; None: the answer is free.

    Raises ERROR_GENERATE_CONFIG_FORMAT for a field of a wrong type and for more than one grammar.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        names = " and ".join(grammar.field for grammar in asked)
        raise wrong(asked[1].field, f"{names} each ask for a grammar; give exactly one")
    return asked[0] if asked else None


def _asked(body: Mapping[str, Any]) -> Iterator[AskedGrammar]:
    for key in KEYS:
        value = body.get(key)
        if value is not None:
            yield asked_grammar(_GUIDED.get(key, key), value, key, key)
    nested = body.get("structured_outputs")
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise wrong("structured_outputs", "structured_outputs must be an object")
        for key, value in nested.items():
            if key in _STRUCTURED and value is not None and value is not False:
                name = f"structured_outputs.{key}"
                yield asked_grammar(_STRUCTURED[key], value, name, "structured_outputs")
    spec = response_format(body.get("response_format"))
    if spec is not None:
        yield AskedGrammar(spec, "response_format", spec.kind.value in _ENDS)


def asked_grammar(key: str, value: Any, name: str, field: str) -> AskedGrammar:
    """The grammar under one of the common names; see `grammar_of`."""
    return AskedGrammar(grammar_of(key, value, name), field, key in _ENDS)


def unknown_keys(body: Mapping[str, Any]) -> Iterator[str]:
    """Members of the objects that ask for a grammar which mean nothing here, as `field.member`."""
    for field, known in (("structured_outputs", _STRUCTURED.keys()), ("response_format", _FORMAT_KEYS)):
        value = body.get(field)
        # A structural tag is handed on as it is.
        if isinstance(value, Mapping) and (field, value.get("type")) != ("response_format", "structural_tag"):
            yield from (f"{field}.{key}" for key in value if key not in known)
            schema = value.get("json_schema")
            if field == "response_format" and isinstance(schema, Mapping):
                yield from (f"{field}.json_schema.{key}" for key in schema if key not in _FORMAT_SCHEMA_KEYS)


def grammar_of(key: str, value: Any, name: str) -> GrammarSpec:
    """The grammar under one of the common names. `name` is what the client calls it."""
    match key:
        case "json_object":
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case "json_schema":
            return _bounded(GrammarKind.JSON_SCHEMA, _json_text(value, name), name)
        case "structural_tag":
            return _bounded(GrammarKind.STRUCTURAL_TAG, _json_text(value, name), name)
        case "choice":
            return _bounded(GrammarKind.EBNF, choice_grammar(_choices(value, name)), name)
    if not isinstance(value, str) or not value:
        raise wrong(name, f"{name} must be a string that is not empty")
    return _bounded(GrammarKind(key), value, name)


def response_format(value: Any) -> GrammarSpec | None:
    """The grammar of OpenAI's `response_format`; None for text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case "json_schema":
            schema = value.get("json_schema")
            if not isinstance(schema, Mapping) or schema.get("schema") is None:
                raise wrong("response_format", "response_format.json_schema must be an object with a schema")
            return grammar_of("json_schema", schema["schema"], "response_format.json_schema.schema")
        case "structural_tag":
            return grammar_of("structural_tag", dict(value), "response_format")
    raise wrong(
        "response_format", "response_format must be an object of type text, json_object, json_schema or structural_tag"
    )


def wrong(field: str, message: str) -> BatonError:
    """ERROR_GENERATE_CONFIG_FORMAT about a client's field."""
    return BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, message, param=field.split(".", 1)[0])


def _json_text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | bool):
        try:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        except RecursionError:
            raise wrong(name, f"{name} is nested too deeply") from None
    raise wrong(name, f"{name} must be an object, or JSON text")


def _choices(value: Any, name: str) -> list[str]:
    strings = (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)
    )
    if not strings or not value or not all(value):
        raise wrong(name, f"{name} must be a list of strings, none of them empty")
    if len(value) > MAX_CHOICES:
        raise wrong(name, f"{name} has {len(value)} entries; at most {MAX_CHOICES} are allowed")
    for item in value:
        _whole(item, name)  # before they are written in a grammar, where only their numbers would be seen
    return list(value)


def _bounded(kind: GrammarKind, text: str, name: str) -> GrammarSpec:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise wrong(name, f"{name} is {size} bytes long; at most {MAX_GRAMMAR_BYTES} are allowed")
    _whole(text, name)
    return GrammarSpec(kind, text)


def _whole(text: str, name: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise wrong(name, f"{name} has half a character (a lone surrogate)")
