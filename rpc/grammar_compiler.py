"""From a grammar's text to a compiled grammar of one model's vocabulary, with `xgrammar`.

The router's helper processes use it to admit requests, engines to keep to them: what one accepts the other does too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rpc.errors import BatonError, ErrorCode
from rpc.grammar import MAX_WHITESPACE, MOST_TIMES, GrammarKind, GrammarSpec, count_beyond, half_character
from rpc.grammar_length import longest_text
from rpc.json_schema_support import UnsupportedSchema, check_schema
from rpc.vocabulary import Vocabulary
from rpc.xgrammar_library import XgrammarUnavailable, load_xgrammar

# "[time] file:line: " before the library's messages.
_WHERE_IN_LIBRARY = re.compile(r"^(?:\[[0-9:.]+\]\s*)?(?:\S+\.(?:cc|h):\d+:\s*)")
_POSITION = re.compile(r"line (\d+), column (\d+)|position (\d+)")
_MAX_MESSAGE = 400
_MEASURED_CHARS = 1 << 14  # of grammars whose longest text is looked for, which takes up to some 50 ms


class GrammarCompiler:
    """Compiles for one vocabulary. `compile` may run on several threads at once; each takes one core."""

    def __init__(
        self, vocabulary: Vocabulary, *, vocab_size: int, stop_token_ids: Sequence[int], cache_bytes: int
    ) -> None:
        """vocab_size: of the model's logits, which may be more than the tokenizer's. stop_token_ids: the model's ends
        of sequence; none means that only the text is looked at. cache_bytes: of compiled grammars that are kept.

        Raises BatonError: INVALID_PARAMS naming the flag when the library cannot be used,
        GRAMMAR_VOCAB_EXCEEDS_MODEL_VOCAB and GRAMMAR_EOS_OUT_OF_VOCAB when the vocabulary does not fit.
        """
        try:
            library = load_xgrammar()
        except XgrammarUnavailable as error:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--grammar-backend: xgrammar cannot be used ({error}); repair it, or use --grammar-backend none",
                param="--grammar-backend",
            ) from None
        if len(vocabulary.pieces) > vocab_size:
            raise BatonError(
                ErrorCode.GRAMMAR_VOCAB_EXCEEDS_MODEL_VOCAB,
                f"the tokenizer has {len(vocabulary.pieces)} tokens, but the model has logits for {vocab_size}",
            )
        outside = [token for token in stop_token_ids if not 0 <= token < vocab_size]
        if outside:
            raise BatonError(
                ErrorCode.GRAMMAR_EOS_OUT_OF_VOCAB,
                f"the end-of-sequence token {outside[0]} is outside the model's vocabulary of {vocab_size}",
            )
        self.library = library
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stop_token_ids)
        try:
            tokens = library.TokenizerInfo(
                list(vocabulary.pieces),
                library.VocabType.RAW,
                vocab_size=vocab_size,
                stop_token_ids=list(stop_token_ids),
            )
            # One thread each: several grammars compile side by side, and the library's own threads wait busily.
            self._compiler = library.GrammarCompiler(tokens, max_threads=1, cache_limit_bytes=cache_bytes)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--grammar-backend: xgrammar does not take this model's vocabulary ({_cleaned(error)})",
                param="--grammar-backend",
            ) from error

    @classmethod
    def load(
        cls, folder: Path, *, vocab_size: int = 0, stop_token_ids: Sequence[int] = (), cache_bytes: int
    ) -> GrammarCompiler:
        """For the tokenizer of a model folder. vocab_size 0: the tokenizer's own."""
        vocabulary = Vocabulary.load(folder)
        return cls(
            vocabulary,
            vocab_size=vocab_size or len(vocabulary.pieces),
            stop_token_ids=stop_token_ids,
            cache_bytes=cache_bytes,
        )

    def compile(self, spec: GrammarSpec) -> Any:
        """The library's compiled grammar.

        Raises ERROR_GENERATE_CONFIG_FORMAT with the parser's position in message and metadata, or with the cause
        `memory` when there was not enough.
        """
        if spec.kind is GrammarKind.JSON_SCHEMA:
            _check(_json(spec), "")
        elif spec.kind is GrammarKind.STRUCTURAL_TAG:
            tag = _json(spec)
            for pointer, schema in _schemas_in(tag):
                _check(schema, pointer)
            for text, gbnf in _expressions_in(tag):
                _check_text(spec, text, gbnf)
        else:
            _check_text(spec, spec.text, spec.kind is GrammarKind.EBNF)
        try:
            return self._compile(spec)
        except MemoryError:
            raise _out_of_memory(spec) from None
        except RecursionError:
            raise _refused(spec, "it is nested too deeply") from None
        except (RuntimeError, ValueError, TypeError) as error:
            if "bad_alloc" in str(error):  # how the library reports that memory ran out
                raise _out_of_memory(spec) from None
            raise _refused(spec, _cleaned(error)) from error

    def check(self, spec: GrammarSpec) -> None:
        """Raises what `compile` does, and the same code for a grammar that no text fits."""
        import numpy as np  # with xgrammar only: a process that has no grammars does without

        matcher = self.library.GrammarMatcher(self.compile(spec))
        mask = np.zeros((1, -(-self.vocab_size // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask, 0)
        if not mask.any() and not matcher.is_completed():
            raise _error(spec.kind, "can be fulfilled by no text of this model's tokens", {})

    def most_bytes(self, spec: GrammarSpec) -> int | None:
        """Bytes of the longest text of a grammar that compiles, of which a token has one at least; None: there is no
        longest, or it cannot be told. JSON is not looked at."""
        grammar = self.library.Grammar
        read = {
            GrammarKind.REGEX: grammar.from_regex,
            GrammarKind.EBNF: grammar.from_ebnf,
            GrammarKind.STRUCTURAL_TAG: grammar.from_structural_tag,
        }.get(spec.kind)
        if read is None or len(spec.text) > _MEASURED_CHARS:
            return None
        return longest_text(read(spec.text).serialize_json())

    def _compile(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        match spec.kind:
            case GrammarKind.JSON_OBJECT:
                return compiler.compile_json_schema(
                    '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            case GrammarKind.JSON_SCHEMA:
                # Strict: what a schema does not name is not written, unless it says so (additionalProperties).
                return compiler.compile_json_schema(spec.text, strict_mode=True, max_whitespace_cnt=MAX_WHITESPACE)
            case GrammarKind.REGEX:
                return compiler.compile_regex(spec.text)
            case GrammarKind.EBNF:
                return compiler.compile_grammar(spec.text)
            case GrammarKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(spec.text)


def _json(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _error(
            spec.kind,
            f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            {"line": str(error.lineno), "column": str(error.colno)},
        ) from None
    except RecursionError:
        raise _error(spec.kind, "is nested too deeply", {}) from None
    except ValueError as error:  # a number of too many digits, or none
        raise _error(spec.kind, f"is not JSON: {_cleaned(error)}", {}) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check(schema: Any, place: str) -> None:
    """A JSON schema, which stands at the JSON pointer `place` of a structural tag, or alone."""
    try:
        check_schema(schema)
    except UnsupportedSchema as error:
        pointer = place + error.pointer if place else error.pointer
        raise _error(GrammarKind.JSON_SCHEMA, f"at {pointer}: {error}", {"pointer": pointer}) from None


def _schemas_in(value: Any) -> Iterator[tuple[str, Any]]:
    """The JSON schemas of a structural tag, by JSON pointer."""
    waiting = [("", value)]
    while waiting:
        at, item = waiting.pop()
        if isinstance(item, list):
            waiting += [(f"{at}/{index}", child) for index, child in enumerate(item)]
        elif isinstance(item, dict):
            for key, child in item.items():
                if key == "json_schema":
                    yield f"{at}/{key}", child
                else:
                    waiting.append((f"{at}/{key}", child))


def _expressions_in(value: Any) -> Iterator[tuple[str, bool]]:
    """The regular expressions and grammars of a structural tag, and whether each is a grammar."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            yield from (
                (item[key], key == "grammar") for key in ("pattern", "grammar") if isinstance(item.get(key), str)
            )
            waiting += (child for key, child in item.items() if key != "json_schema")


def _check_text(spec: GrammarSpec, text: str, gbnf: bool) -> None:
    position = half_character(text)
    if position is not None:
        problem = f"has half a character (a surrogate) at position {position}; write the character itself"
        raise _error(spec.kind, problem, {"position": str(position)})
    position = count_beyond(text, gbnf=gbnf)
    if position is not None:
        problem = f"has a count of repetitions above {MOST_TIMES} at position {position}"
        raise _error(spec.kind, problem, {"position": str(position)})


def _cleaned(error: Exception) -> str:
    # It says nothing of numbers that no floating-point number can hold.
    text = _WHERE_IN_LIBRARY.sub("", str(error)).strip() or "a number in it may be out of range"
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"


def _refused(spec: GrammarSpec, problem: str) -> BatonError:
    metadata = {}
    found = _POSITION.search(problem)
    if found:
        line, column, position = found.groups()
        metadata = {"position": position} if position else {"line": line, "column": column}
    return _error(spec.kind, f"does not compile: {problem}", metadata)


def _out_of_memory(spec: GrammarSpec) -> BatonError:
    return _error(
        spec.kind,
        "needs more memory to compile than it may take (--grammar-memory-mb); simplify it",
        {"cause": "memory"},
    )


def _error(kind: GrammarKind, problem: str, metadata: dict[str, str]) -> BatonError:
    return BatonError(
        ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
        f"{kind} {problem}",
        param=kind.value,
        metadata={"cause": "grammar", **metadata},
    )
