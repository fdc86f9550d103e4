"""What structured output is asked for with, and whether this installation offers it. Imports no library."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from rpc.errors import BatonError, ErrorCode
from rpc.xgrammar_library import xgrammar_installed

GrammarBackend = Literal["auto", "xgrammar", "none"]

MAX_GRAMMAR_BYTES = 1 << 20
# Between the signs of a JSON text. Without a bound, a model can write spaces until it runs out of tokens.
MAX_WHITESPACE = 16


class GrammarKind(StrEnum):
    """How `GrammarSpec.text` is written."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"  # GBNF; the root rule is `root`
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's JSON form: free text with constrained parts


class GrammarSpec(msgspec.Struct, frozen=True):
    """One grammar that an answer must keep to, as it travels from the router to the engines."""

    kind: GrammarKind
    text: str = ""


def grammar_enabled(backend: GrammarBackend, folder: Path) -> bool:
    """Whether structured output is on for the model in `folder`; whether it then works is seen when the library is
    loaded. `auto` needs the package and a tokenizer, which servers can do without."""
    return backend == "xgrammar" or (
        backend == "auto" and (folder / "tokenizer.json").is_file() and xgrammar_installed()
    )


def not_offered(param: str | None = None) -> BatonError:
    """What a request with a grammar gets where structured output is off."""
    return BatonError(
        ErrorCode.INVALID_PARAMS,
        "structured output is not available here: it needs the package xgrammar and --grammar-backend auto or xgrammar",
        param=param,
    )


# An escape of a regular expression or of GBNF, as a whole: what follows an escaped backslash is none.
_ESCAPE = re.compile(r"\\(?:(?:u\{0*|u|U0000)(d[89a-f][0-9a-f]{2})|.)", re.DOTALL | re.IGNORECASE)


def half_character(text: str) -> int | None:
    """Where a regular expression or a GBNF grammar has the escape of a surrogate, which is no character and never comes
    up in an answer; None: nowhere."""
    return next((found.start() for found in _ESCAPE.finditer(text) if found[1]), None)


# A count of repetitions, and what braces are only characters in. What is open ends with the text, so that nothing is
# looked through twice.
_EXPRESSION = r"\\.|\[(?:\\.|[^\]\\])*\]?|\{([0-9\s,]*)\}"
_COUNTS = {
    False: re.compile(_EXPRESSION, re.DOTALL),
    True: re.compile(r'"(?:\\.|[^"\\])*"?|#[^\n]*|' + _EXPRESSION, re.DOTALL),
}
MOST_TIMES = (1 << 31) - 1


def count_beyond(text: str, *, gbnf: bool = False) -> int | None:
    """Where a regular expression or a GBNF grammar has a count of repetitions above MOST_TIMES, of which the library
    would keep the lowest 32 bits only; None: nowhere."""
    for found in _COUNTS[gbnf].finditer(text):
        for number in re.findall("[0-9]+", found[1] or ""):
            digits = number.lstrip("0")
            if len(digits) > 10 or int(digits or "0") > MOST_TIMES:
                return found.start()
    return None


def choice_grammar(choices: list[str]) -> str:
    """EBNF of exactly one of the strings."""
    return "root ::= " + " | ".join(_quoted(choice) for choice in choices)


def _quoted(text: str) -> str:
    escaped = []
    for char in text:
        if char in '"\\':
            escaped.append("\\" + char)
        elif char.isprintable():
            escaped.append(char)
        else:
            escaped.append(f"\\U{ord(char):08x}")
    return '"' + "".join(escaped) + '"'
