"""How long the texts of a grammar can be, from the form in which `xgrammar` writes grammars down."""

from __future__ import annotations

import json
from typing import Any

# Of the form that is read here. Another one is not looked at: nothing then has a bound.
_VERSION = "v18"
_MOST = 1 << 31  # what is longer has no bound that anybody asks for
# Kinds of expressions: bytes; a character of a class; nothing; a rule; one after the other; one of several; a rule so
# many times. What all others stand for (any number of characters, free text, tokens) has no bound.
_BYTES, _CLASS, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 0, 1, 3, 4, 5, 6, 8
# What follows name, body and look-ahead of a rule that means what its body says.
_PLAIN_RULE = [-1, -1, "", False, None]


class _NoBound(Exception):
    """There is no longest text, or it cannot be told."""


def longest_text(serialized: str) -> int | None:
    """Bytes of the longest text of a grammar, given as `Grammar.serialize_json` writes it; None: there is no longest
    one, or it cannot be told. Never less than the longest text has."""
    content = json.loads(serialized)
    if content.get("__VERSION__") != _VERSION or content["suffix_stop_infos"]:
        return None
    try:
        found = _Lengths(content).of_rule(content["root_rule_id"])
    except (_NoBound, RecursionError):
        return None
    return found if found < _MOST else None


class _Lengths:
    """The longest text of each expression, looked at once."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._rules = content["rules"]
        self._data: list[int] = content["grammar_expr_data"]
        self._begins: list[int] = content["grammar_expr_indptr"]
        self._known: dict[int, int] = {}  # by expression
        self._open: set[int] = set()  # rules that are being looked at

    def of_rule(self, rule: int) -> int:
        _, body, _, _, *rest = self._rules[rule]
        if rule in self._open or rest != _PLAIN_RULE:
            raise _NoBound
        self._open.add(rule)
        found = self._of(body)
        self._open.remove(rule)
        return found

    def _of(self, expression: int) -> int:
        found = self._known.get(expression)
        if found is None:
            found = self._known[expression] = self._look_at(expression)
        return found

    def _look_at(self, expression: int) -> int:
        begin = self._begins[expression]
        kind, count = self._data[begin : begin + 2]
        content = self._data[begin + 2 : begin + 2 + count]
        if kind == _BYTES:
            return count
        if kind == _CLASS:
            negated, *ends = content
            return 4 if negated else _utf8_bytes(max(ends, default=0))
        if kind == _EMPTY:
            return 0
        if kind == _RULE:
            return self.of_rule(content[0])
        if kind == _SEQUENCE:
            return sum(map(self._of, content))
        if kind == _CHOICES:
            return max(map(self._of, content), default=0)
        if kind == _REPEAT and content[2] >= 0:
            return content[2] * self.of_rule(content[0])
        raise _NoBound


def _utf8_bytes(character: int) -> int:
    return 1 + sum(character >= first for first in (0x80, 0x800, 0x10000))
