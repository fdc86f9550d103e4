"""Which JSON schemas a grammar can keep to in full.

`xgrammar` passes over what it cannot express, and an answer might then break its schema. A schema is therefore looked
through before it is compiled, and the first thing that would be passed over refuses it. The rules are those of
xgrammar 0.2; tests compare them with the `jsonschema` package on what the library accepts.

The router asks in its event loop about the schemas of tools, so the work is bounded whatever a client sends: by the
number of parts, by the comparisons that `oneOf` needs, and by the length of a pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpc.grammar import count_beyond, half_character

MAX_DEPTH = 128
MAX_PARTS = 10_000
MAX_COMPARISONS = 100_000
MOST_TYPES = 7  # there are no more
# Characters of a pointer, and of a client's text in a message; what is longer is cut.
MAX_POINTER = 512
MAX_QUOTED = 100

# Of no effect on what is valid.
_ANNOTATIONS = {
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "discriminator", "strict",
}  # fmt: skip
_NEVER = (
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "additionalItems", "$dynamicRef", "$recursiveRef",
    "contentSchema",
)  # fmt: skip
_OF_TYPE = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer",),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
    "prefixItems": ("array",),
    "unevaluatedItems": ("array",),
    "properties": ("object",),
    "required": ("object",),
    "additionalProperties": ("object",),
    "patternProperties": ("object",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
    "unevaluatedProperties": ("object",),
}
_FORMATS = {
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
_KNOWN = _ANNOTATIONS | set(_OF_TYPE) | set(_NEVER) | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}


class UnsupportedSchema(ValueError):
    """`pointer` is the place in the schema (RFC 6901), the message what is wrong there."""

    def __init__(self, pointer: str, problem: str) -> None:
        super().__init__(problem)
        self.pointer = pointer or "/"


@dataclass(slots=True)
class SchemaBudget:
    """What looking through schemas may still take; one budget may serve several."""

    parts: int = MAX_PARTS
    comparisons: int = MAX_COMPARISONS

    def compare(self, count: int) -> None:
        """Before `count` comparisons. Raises _TooMuchWork."""
        self.comparisons -= count
        if self.comparisons < 0:
            raise _TooMuchWork


class _TooMuchWork(Exception):
    """The entries of a `oneOf` are too many to compare."""


def check_schema(schema: Any, budget: SchemaBudget | None = None) -> None:
    """Raises UnsupportedSchema for the first part of a schema that a grammar could not keep to, and for one that has
    too many parts to be looked through."""
    _check(schema, "", schema, 0, SchemaBudget() if budget is None else budget)


def _check(schema: Any, at: str, root: Any, depth: int, budget: SchemaBudget) -> None:
    budget.parts -= 1
    if budget.parts < 0:
        raise UnsupportedSchema(at, f"has more than {MAX_PARTS} parts")
    if depth > MAX_DEPTH:
        raise UnsupportedSchema(at, f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(schema, bool):
        if not schema:
            raise UnsupportedSchema(at, "is false, which no value fits")
        return
    if not isinstance(schema, Mapping):
        raise UnsupportedSchema(at, "must be an object or true")
    for key in _NEVER:
        if key in schema and not (key == "uniqueItems" and schema[key] is False):
            problem = f"the keyword {key!r} cannot be kept to; write the schema without it"
            raise UnsupportedSchema(f"{at}/{key}", problem)
    _check_whole(schema, at, root, budget)
    types = _types(schema, at)
    _check_keywords(schema, types, at)
    for place, child in _children(schema, at):
        _check(child, place, root, depth + 1, budget)


def _check_whole(schema: Mapping[str, Any], at: str, root: Any, budget: SchemaBudget) -> None:
    """Keys that xgrammar takes as the whole of a schema: what stands beside them would be passed over."""
    asserting = [key for key in schema if key in _KNOWN and key not in _ANNOTATIONS]
    for key in ("$ref", "anyOf", "oneOf", "allOf"):
        if key in schema:
            beside = next((other for other in asserting if other != key), None)
            if beside is not None:
                raise UnsupportedSchema(f"{at}/{beside}", f"{beside} beside {key} cannot be kept to")
    if "const" in schema and "enum" in schema:
        raise UnsupportedSchema(f"{at}/enum", "enum beside const cannot be kept to")
    for key in ("anyOf", "oneOf"):
        if key in schema and not schema[key]:
            raise UnsupportedSchema(f"{at}/{key}", f"{key} has no entry, so no value fits it")
    if "allOf" in schema and (not isinstance(schema["allOf"], Sequence) or len(schema["allOf"]) != 1):
        raise UnsupportedSchema(f"{at}/allOf", "allOf can have one entry only; write its parts into one schema")
    try:
        exclusive = "oneOf" not in schema or _exclusive(schema["oneOf"], root, budget)
    except _TooMuchWork:
        problem = "oneOf has too many entries or values to tell whether they exclude each other; use anyOf"
        raise UnsupportedSchema(f"{at}/oneOf", problem) from None
    if not exclusive:
        raise UnsupportedSchema(
            f"{at}/oneOf",
            "oneOf needs entries that exclude each other: by type, or by a required property with another const; "
            "use anyOf",
        )
    if "$ref" in schema and not (isinstance(schema["$ref"], str) and schema["$ref"].startswith("#")):
        raise UnsupportedSchema(f"{at}/$ref", "$ref must point into the same schema (#/…)")


def _types(schema: Mapping[str, Any], at: str) -> tuple[str, ...]:
    given = schema.get("type")
    if given is None:
        return ()
    types = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
    if not 0 < len(types) <= MOST_TYPES or not all(isinstance(name, str) for name in types):
        raise UnsupportedSchema(f"{at}/type", "type must be a name or a list of names")
    return types


def _check_keywords(schema: Mapping[str, Any], types: tuple[str, ...], at: str) -> None:
    fixed = next((key for key in ("const", "enum") if key in schema), None)
    for key, of in _OF_TYPE.items():
        if key not in schema:
            continue
        if fixed is not None:
            raise UnsupportedSchema(f"{at}/{key}", f"{key} beside {fixed} cannot be kept to")
        if not types:
            raise UnsupportedSchema(f"{at}/{key}", f"{key} needs a type beside it ({' or '.join(of)})")
        if not any(name in of for name in types):
            if key == "multipleOf" and "number" in types:
                raise UnsupportedSchema(f"{at}/{key}", "multipleOf can be kept to by integers only")
            continue  # has no effect
        if len(types) > 1 and key == "multipleOf" and "number" in types:
            raise UnsupportedSchema(f"{at}/{key}", "multipleOf can be kept to by integers only")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and half_character(pattern) is not None:
        raise UnsupportedSchema(f"{at}/pattern", "pattern has half a character (a surrogate)")
    if isinstance(pattern, str) and count_beyond(pattern) is not None:
        raise UnsupportedSchema(f"{at}/pattern", "pattern has a count of repetitions above 2147483647")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema or "format" in schema):
        raise UnsupportedSchema(f"{at}/pattern", "pattern beside minLength, maxLength or format cannot be kept to")
    if "format" in schema and ("minLength" in schema or "maxLength" in schema):
        raise UnsupportedSchema(f"{at}/format", "format beside minLength or maxLength cannot be kept to")
    if "format" in schema and "string" in types and not _is_format(schema["format"]):
        raise UnsupportedSchema(f"{at}/format", f"format must be one of {', '.join(sorted(_FORMATS))}")
    if fixed is not None and types:
        values = [schema["const"]] if fixed == "const" else schema["enum"]
        for value in values if isinstance(values, list) else ():
            if not any(_is(value, name) for name in types):
                problem = f"{fixed} has a value that is of no type of {_quoted(list(types))}"
                raise UnsupportedSchema(f"{at}/{fixed}", problem)
    if "object" in types:
        _check_object(schema, at)


def _is_format(value: Any) -> bool:
    return isinstance(value, str) and value in _FORMATS


def _check_object(schema: Mapping[str, Any], at: str) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise UnsupportedSchema(at, "properties must be an object and required a list")
    if not all(isinstance(name, str) for name in required):
        raise UnsupportedSchema(f"{at}/required", "required must be a list of names")
    missing = next((name for name in required if name not in properties), None)
    if missing is not None:
        problem = f"required names {_quoted(missing)}, which is not among the properties"
        raise UnsupportedSchema(f"{at}/required", problem)
    if any(half_character(pattern) is not None for pattern in _mapping(schema.get("patternProperties"))):
        raise UnsupportedSchema(f"{at}/patternProperties", "a pattern has half a character (a surrogate)")
    if any(count_beyond(pattern) is not None for pattern in _mapping(schema.get("patternProperties"))):
        raise UnsupportedSchema(f"{at}/patternProperties", "a pattern has a count of repetitions above 2147483647")
    if "patternProperties" in schema and (properties or schema.get("additionalProperties") not in (None, False)):
        raise UnsupportedSchema(
            f"{at}/patternProperties", "patternProperties beside properties or additionalProperties cannot be kept to"
        )


def _children(schema: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        for name, child in _mapping(schema.get(key)).items():
            yield _below(at, f"{key}/{_escaped(name)}"), child
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        entries = schema.get(key, ())
        if not isinstance(entries, list | tuple):
            raise UnsupportedSchema(f"{at}/{key}", f"{key} must be a list")
        for index, child in enumerate(entries):
            yield _below(at, f"{key}/{index}"), child
    for key in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"):
        child = schema.get(key)
        if isinstance(child, list):
            raise UnsupportedSchema(f"{at}/{key}", f"{key} must be a schema; for a list use prefixItems")
        if child is not None and child is not False:
            yield _below(at, key), child


def _below(at: str, part: str) -> str:
    """A pointer one step on. A long one is cut: names may be as long as the schema, and each part has a pointer."""
    if at.endswith("…"):
        return at
    pointer = f"{at}/{part}"
    return pointer if len(pointer) <= MAX_POINTER else pointer[:MAX_POINTER] + "…"


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "…"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _escaped(name: object) -> str:
    return str(name)[: MAX_POINTER + 1].replace("~", "~0").replace("/", "~1")


def _is(value: Any, name: str) -> bool:
    match name:
        case "string":
            return isinstance(value, str)
        case "integer":
            return (isinstance(value, int) and not isinstance(value, bool)) or (
                isinstance(value, float) and value.is_integer()
            )
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return False


# -- oneOf ----------------------------------------------------------------------------------------------------------


def _exclusive(entries: Any, root: Any, budget: SchemaBudget) -> bool:
    if not isinstance(entries, list):
        return True  # refused as no list
    budget.compare(len(entries) * (len(entries) - 1) // 2)
    resolved = [_resolved(entry, root, budget) for entry in entries]
    return all(_disjoint(a, b, budget, 0) for i, a in enumerate(resolved) for b in resolved[i + 1 :])


def _resolved(schema: Any, root: Any, budget: SchemaBudget) -> Any:
    """The schema that a chain of local references leads to."""
    for _ in range(16):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            return schema
        budget.compare(1 + len(schema["$ref"]) // 16)
        target: Any = root
        for part in schema["$ref"].lstrip("#").split("/")[1:]:
            target = _mapping(target).get(part.replace("~1", "/").replace("~0", "~"))
        schema = target
    return schema


def _disjoint(a: Any, b: Any, budget: SchemaBudget, depth: int) -> bool:
    """Whether no value can fit both, as far as types, constants and required constant properties tell."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping) or depth > MAX_DEPTH:
        return False
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        budget.compare(len(values_a) * len(values_b))
        return not any(_same(x, y) for x in values_a for y in values_b)
    # Each of these lists is gone through once.
    lists = (values_a, values_b, a.get("type"), b.get("type"), a.get("required"), b.get("required"))
    budget.compare(sum(len(part) for part in lists if isinstance(part, list)))
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if kinds_a and kinds_b and not kinds_a & kinds_b:
        return True
    if kinds_a == kinds_b == {"object"}:
        shared = set(_names(a.get("required"))) & set(_names(b.get("required")))
        ours, theirs = _mapping(a.get("properties")), _mapping(b.get("properties"))
        return any(_disjoint(ours.get(name), theirs.get(name), budget, depth + 1) for name in shared)
    return False


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _same(x: Any, y: Any) -> bool:
    return bool(x == y) and isinstance(x, bool) == isinstance(y, bool)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    values = _values(schema)
    if values is not None:
        return {
            next((n for n in ("string", "boolean", "number", "null", "array", "object") if _is(v, n)), "?")
            for v in values
        }
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}
