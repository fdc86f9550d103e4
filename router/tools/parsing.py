"""Calls out of the text of an answer, as it comes: content, and pieces of calls.

What may still turn out to be a call is held back; what is given out is never taken back. Text that looks like a call
and is none (no JSON, no name) is content in the end.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from router.tools.formats import HERMES_BEGIN, HERMES_END, MISTRAL_BEGIN, PYTHON_TAG, ToolFormat

_SPACE = " \t\r\n"


@dataclass(slots=True)
class ToolCall:
    """One call. `arguments` is JSON text; it may end in the middle where the answer was cut off."""

    index: int
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class CallPiece:
    """News of one call: with `begins` its id and name are new, and `arguments` is what follows those before."""

    call: ToolCall
    begins: bool
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What some text has brought."""

    content: str = ""
    pieces: list[CallPiece] = field(default_factory=list)


class _ObjectScanner:
    """One JSON object with a name and arguments, character by character.

    `raw` is all of it. Once the name is known, the text of the arguments can be taken as it comes.
    """

    def __init__(self, arguments_keys: tuple[str, ...]) -> None:
        self._keys = arguments_keys
        self.raw = ""
        self.name: str | None = None
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string_begin = 0
        self._key: str | None = None  # of the outermost object, whose value comes next or is being read
        self._expects_value = False
        self._arguments_begin = -1
        self._arguments_end = -1
        self._taken = 0

    def feed(self, char: str) -> None:
        at = len(self.raw)
        self.raw += char
        if self._in_string:
            self._inside_string(char, at)
            return
        match char:
            case '"':
                self._begin_value(at)
                self._in_string, self._string_begin = True, at
            case "{" | "[":
                self._begin_value(at)
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                if self._depth == 1:
                    self._end_value(at + 1)
                elif self._depth <= 0:
                    self._end_value(at)
                    self.done = True
            case ":":
                if self._depth == 1:
                    self._expects_value = True
            case ",":
                if self._depth == 1:
                    self._end_value(at)
                    self._key = None
            case _:
                if char not in _SPACE:
                    self._begin_value(at)

    def _inside_string(self, char: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth != 1:
                return
            text = _read(self.raw[self._string_begin : at + 1])
            if self._key is None:
                self._key = text if isinstance(text, str) else ""
            elif self._key == "name" and isinstance(text, str):
                self.name = text
            self._end_value(at + 1, of_string=True)

    def _begin_value(self, at: int) -> None:
        if self._depth == 1 and self._expects_value:
            self._expects_value = False
            if self._key in self._keys and self._arguments_begin < 0:
                self._arguments_begin = at

    def _end_value(self, end: int, of_string: bool = False) -> None:
        if self._key in self._keys and self._arguments_begin >= 0 and self._arguments_end < 0:
            if of_string and self.raw[self._arguments_begin] != '"':
                return
            self._arguments_end = end

    def take_arguments(self) -> str:
        """The text of the arguments that has come since; none before the name is known."""
        if self.name is None or self._arguments_begin < 0:
            return ""
        end = self._arguments_end if self._arguments_end >= 0 else len(self.raw)
        piece = self.raw[self._arguments_begin + self._taken : end]
        self._taken += len(piece)
        return piece

    @property
    def has_arguments(self) -> bool:
        return self._arguments_begin >= 0


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class ToolCallParser:
    """The calls of one choice. `feed` all of its text, then `finish`; `calls` are those that were found."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._keys = ("arguments", "parameters")
        self.calls: list[ToolCall] = []
        self._held = ""  # not decided yet
        self._object: _ObjectScanner | None = None
        self._call: ToolCall | None = None  # of the object that is being read
        self._between = False  # behind a call: what is left out between calls is not content
        self._closing = False  # hermes: behind an object, its end is awaited
        self._in_list = False  # mistral: behind the marker
        self._opening = ""  # what stood before the object that is being read
        self._shown = False  # there was content that is not white space

    def feed(self, text: str) -> Parsed:
        """What this text brings, with what was held back before."""
        found = Parsed()
        self._held += text
        while self._held and self._step(found):
            pass
        self._take_arguments(found)
        return found

    def finish(self) -> Parsed:
        """The end of the answer: what was held back is content, unless it belongs to a call that has begun."""
        found = Parsed()
        if self._object is not None and self._call is None:
            found.content += self._opening + self._object.raw
        if self._object is None and not self._closing:
            self._give(found, "" if self._between and not self._held.strip(_SPACE + ";") else self._held)
        self._held, self._object = "", None
        return found

    @property
    def whole(self) -> bool:
        """Whether every call that began has ended."""
        return self._call is None

    # -- where the text stands ----------------------------------------------------------------------------------

    def _step(self, found: Parsed) -> bool:
        """Works on the beginning of what is held; False when more text is needed."""
        if self._object is not None:
            return self._read_object(found)
        if self._closing:
            return self._close()
        match self._form.name:
            case "hermes":
                return self._seek(found, HERMES_BEGIN)
            case "mistral":
                return self._next_in_list() if self._in_list else self._seek(found, MISTRAL_BEGIN)
        return self._seek_bare(found)

    def _read_object(self, found: Parsed) -> bool:
        scanner = self._object
        assert scanner is not None
        for count, char in enumerate(self._held, 1):
            scanner.feed(char)
            if scanner.done:
                self._held = self._held[count:]
                self._end_object(found)
                return True
        self._held = ""
        return False

    def _take_arguments(self, found: Parsed) -> None:
        """Pieces of the call that is being read, as far as it is known to be one."""
        scanner = self._object
        if scanner is None or scanner.name is None or not (scanner.has_arguments or scanner.done):
            return
        begins = self._call is None
        if begins:
            self._call = ToolCall(len(self.calls), f"call_{secrets.token_hex(12)}", scanner.name)
            self.calls.append(self._call)
        piece = scanner.take_arguments()
        assert self._call is not None
        if scanner.done and not self._call.arguments and not piece:
            piece = "{}"  # a call without arguments
        if begins or piece:
            self._call.arguments += piece
            found.pieces.append(CallPiece(self._call, begins, piece))

    def _end_object(self, found: Parsed) -> None:
        self._take_arguments(found)
        scanner = self._object
        assert scanner is not None
        self._object = None
        if self._call is None:  # an object without a name
            found.content += self._opening + scanner.raw
            self._shown, self._in_list = True, False
            return
        self._call = None
        self._between = True
        self._closing = self._form.name == "hermes"

    def _begin_object(self, opening: str) -> None:
        self._opening = opening
        self._object = _ObjectScanner(self._keys)

    def _seek(self, found: Parsed, marker: str) -> bool:
        """Content up to a marker, and the object behind it."""
        at = self._held.find(marker)
        if at < 0:
            keep = _overlap(self._held, marker)
            self._give(found, self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        if at:
            self._give(found, self._held[:at])
            self._held = self._held[at:]
        if marker == MISTRAL_BEGIN:
            self._held = self._held[len(marker) :]
            self._in_list, self._opening = True, marker
            return True
        behind = self._held[len(marker) :].lstrip(_SPACE)
        if not behind:
            return False
        if behind[0] != "{":
            self._give(found, marker)
            self._held = self._held[len(marker) :]
            return True
        self._begin_object(self._held[: len(self._held) - len(behind)])
        self._held = behind
        return True

    def _close(self) -> bool:
        """Hermes: leaves out the end of a call."""
        behind = self._held.lstrip(_SPACE)
        if behind.startswith(HERMES_END):
            self._held = behind[len(HERMES_END) :]
            self._closing = False
            return True
        if HERMES_END.startswith(behind):
            return False
        self._closing = False
        return True

    def _next_in_list(self) -> bool:
        """Mistral: the next object, whatever stands between."""
        for count, char in enumerate(self._held):
            if char == "{":
                self._begin_object(self._opening + self._held[:count] if not self.calls else "")
                self._held = self._held[count:]
                return True
            if char not in "[], \t\r\n":
                self._in_list = False
                if not self.calls:
                    self._held = self._opening + self._held
                    self._between = False
                    # The marker was none; it must not be found again.
                    self._form = _NO_CALLS
                return True
        if self.calls:
            self._held = ""
        return False

    def _seek_bare(self, found: Parsed) -> bool:
        """Llama: the answer is a call if an object is the first thing in it, behind a tag or not."""
        if self._form is _NO_CALLS or self._shown:
            self._give(found, self._held)
            self._held = ""
            return False
        separators = _SPACE + ";" if self._between else _SPACE
        behind = self._held.lstrip(separators)
        if PYTHON_TAG.startswith(behind[: len(PYTHON_TAG)]) and len(behind) < len(PYTHON_TAG):
            return False
        if behind.startswith(PYTHON_TAG):
            behind = behind[len(PYTHON_TAG) :].lstrip(_SPACE)
            if not behind:
                return False
        if not behind:
            return False
        if behind[0] != "{":
            self._give(found, self._held)
            self._held, self._shown = "", True
            return False
        self._begin_object(self._held[: len(self._held) - len(behind)])
        self._held = behind
        return True

    def _give(self, found: Parsed, text: str) -> None:
        if self._between:
            text = text.lstrip(_SPACE)
        if text.strip(_SPACE):
            self._between = False
            self._shown = True
        found.content += text


_NO_CALLS = ToolFormat("llama3_json", "")


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


def parse(text: str, form: ToolFormat) -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole answer."""
    parser = ToolCallParser(form)
    content = parser.feed(text).content + parser.finish().content
    return content, parser.calls
