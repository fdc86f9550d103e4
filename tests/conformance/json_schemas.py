"""Schemas for structured answers: nested, with enumerations, lists, numbers and all kinds of characters. Each one is
bounded, so that an answer ends before its tokens do."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most: int = 16, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def array(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


_POINT = obj(x=integer(-100, 100), y=integer(-100, 100))

# What is asked, and the schema of the answer.
CASES: tuple[tuple[str, Schema], ...] = (
    ("Describe a person.", obj(name=text(), age=integer(0, 120))),
    ("Name a colour.", obj(colour=enum("red", "green", "blue"))),
    ("Give three numbers.", array(integer(0, 1000), 3, 3)),
    ("Is water wet?", obj(answer={"type": "boolean"}, reason=text(30))),
    ("Describe a city in Germany.", obj(name=enum("München", "Köln", "Düsseldorf"), river=text(12))),
    ("Write a word in Japanese.", obj(word=enum("猫", "犬", "鳥"), meaning=enum("cat", "dog", "bird"))),
    ("Which emoji fits?", obj(emoji=enum("😀", "😢", "🚀"), mood=enum("glad", "sad", "bold"))),
    ("Describe a line between two points.", obj(begin=_POINT, end=_POINT)),
    ("Describe a book.", obj(title=text(20), author=obj(name=text(), born=integer(1500, 2000)), pages=integer(1, 999))),
    ("List tags for a photo.", obj(tags=array(enum("sea", "sky", "city", "wood"), 1, 3))),
    ("What is the temperature?", obj(celsius={"type": "integer", "minimum": -50, "maximum": 60}, unit=enum("C"))),
    ("Give a matrix.", obj(rows=array(array(integer(0, 9), 2, 2), 2, 2))),
    (
        "Describe a user.",
        obj(id=integer(1, 99999), email={"type": ["string", "null"], "maxLength": 12}, admin={"type": "boolean"}),
    ),
    ("Pick a date.", obj(date={"type": "string", "format": "date"})),
    ("Write a product code.", obj(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, stock=integer(0, 500))),
    ("A number or nothing?", obj(value={"anyOf": [integer(0, 99), {"type": "null"}]})),
    (
        "Describe a shape.",
        {
            "oneOf": [
                obj(kind={"const": "circle"}, radius=integer(1, 50)),
                obj(kind={"const": "square"}, side=integer(1, 50)),
            ]
        },
    ),
    ("Describe a family.", obj(name=text(12), children=array(obj(name=text(10), age=integer(0, 18)), 1, 2))),
    ("Give an even number.", obj(even={"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 100})),
    ("Describe a tree of three levels.", obj(root=obj(left=obj(leaf=enum("a", "b")), right=obj(leaf=enum("c", "d"))))),
)
