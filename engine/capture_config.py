"""Sizes at which CUDA graphs are captured: the grammar of the flags that list them.

Three forms: a comma list `1,2,64`; a range `max:step`, which is every multiple of the step up to `max`, and `max`; or
the path of a file with one size a line. Torch-free, so that a server's front can check its flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

LARGEST_SIZE = 1 << 30
LARGEST_FILE_BYTES = 64 << 10

_INTEGER = re.compile(r"[+-]?[0-9]+")


class CaptureConfigError(ValueError):
    """A list of capture sizes that cannot be used; the text names the flag and the value."""


def parse_sizes(value: object, *, flag: str, most: int) -> list[int]:
    """The sizes of `value`, sorted and each once, at most `most`.

    `value` is the text of the flag or variable, or what a YAML file holds: a text, an integer, or a list of these.
    Raises CaptureConfigError. A range is counted before it is built.
    """
    if isinstance(value, list | tuple):
        parts = [_text(part, flag) for part in value]
        # Several parts are one comma list; a single one has any form.
        text = parts[0] if len(parts) == 1 else ",".join(parts)
    else:
        text = _text(value, flag)
    text = text.strip()
    if not text:
        raise CaptureConfigError(f"{flag} is empty; give sizes such as 1,2,64, a range max:step, or a file")
    words = [word.strip() for word in text.split(",")]
    if all(map(_INTEGER.fullmatch, words)):
        return _unique((_size(word, flag) for word in words), flag, most)
    top, colon, step = text.partition(":")
    if colon and _INTEGER.fullmatch(top.strip()) and _INTEGER.fullmatch(step.strip()):
        return _range(_size(top.strip(), flag), _size(step.strip(), flag), flag, most)
    return _file(text, flag, most)


def _text(part: object, flag: str) -> str:
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise CaptureConfigError(f"{flag}: {part!r} is neither a size nor a text")
    return str(part)


def _size(word: str, flag: str, where: str = "") -> int:
    if not _INTEGER.fullmatch(word):
        raise CaptureConfigError(f"{flag}: {word[:32]!r}{where} is no integer")
    # A word too long to be read is out of range whatever it says.
    size = int(word) if len(word) <= 20 else (-1 if word[0] == "-" else LARGEST_SIZE + 1)
    if not 1 <= size <= LARGEST_SIZE:
        raise CaptureConfigError(f"{flag}: {word}{where} must be in 1 to {LARGEST_SIZE}")
    return size


def _range(top: int, step: int, flag: str, most: int) -> list[int]:
    count = (top + step - 1) // step
    _check_count(count, flag, most)
    return [*range(step, top, step), top]


def _file(path: str, flag: str, most: int) -> list[int]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)  # no more: it may be a device, which never ends
        lines = content.decode().splitlines()
    except FileNotFoundError as error:
        raise CaptureConfigError(f"{flag} file not found: {path}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CaptureConfigError(f"{flag} file cannot be read: {path} ({reason})") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise CaptureConfigError(f"{flag} file is larger than {LARGEST_FILE_BYTES} bytes: {path}")
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CaptureConfigError(f"{flag} file is empty: {path}")
    return _unique((_size(word, flag, f" in line {number} of {path}") for number, word in numbered), flag, most)


def _unique(sizes: Iterable[int], flag: str, most: int) -> list[int]:
    found = sorted(set(sizes))
    _check_count(len(found), flag, most)
    return found


def _check_count(count: int, flag: str, most: int) -> None:
    if count > most:
        raise CaptureConfigError(f"{flag} names {count} sizes; at most {most} are allowed")


def geometric_sizes(last: int, ratio: tuple[int, int]) -> list[int]:
    """1, then max(previous + 1, floor(previous * ratio)) up to `last`, which is always there.

    With ratio (4, 3) a count that fills no size exactly is padded by at most a quarter of the size it goes into.
    """
    sizes = [1]
    while sizes[-1] < last:
        previous = sizes[-1]
        sizes.append(min(last, max(previous + 1, previous * ratio[0] // ratio[1])))
    return sizes


def largest_padding_ratio(sizes: Sequence[int]) -> float:
    """The worst share of padding of any count between two neighbours of `sizes`."""
    neighbours = zip([0, *sizes], sizes, strict=False)
    return max(((size - below - 1) / size for below, size in neighbours), default=0.0)
