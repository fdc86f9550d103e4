"""The access log: one JSON line per request and process at its end, and one at its arrival when asked for.

Fields that every line has: `log_time`, `log` (`access` at the end, `arrival`), `role`, `request_id`; at the end `code`
(a name of the error table) and whatever the process knows of the request: attempt, path, servers, stages, token counts;
after a failure `exception` and `traceback`. Prompts and answers are written only with `content`. Of a private request
nothing is written but its failure, and of that the id and the code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

import msgspec

from rpc.async_log import AsyncLogHandler
from rpc.errors import BatonError, ErrorCode
from rpc.log_sinks import RotatingFile, Sink, Stream
from rpc.redaction import MASK, is_secret, redact_line
from rpc.timestamp import timestamp

CONTENT_FIELDS = frozenset(("prompt", "output"))
TRACEBACK_FRAMES = 20
TRACEBACK_CAUSES = 4

# Written as they are. Asking whether one of them is a mapping would take longer than writing it.
_ATOMS = frozenset((str, int, bool, type(None)))
_ROUNDED_BELOW = 1e9
_SUCCESS = ErrorCode.NONE_ERROR.name


@dataclass(frozen=True, kw_only=True)
class AccessLogSettings:
    """What the flags `--access-log-…` say. `path` None: stderr."""

    path: str | None = None
    enabled: bool = True
    content: bool = False
    arrival: bool = False
    queue_size: int = 100_000
    batch_size: int = 100
    flush_interval_s: float = 1.0
    max_bytes: int = 100_000_000
    backups: int = 10
    close_timeout_s: float = 5.0


class AccessLog:
    """Raises OSError when the file cannot be opened. `record` and `arrived` never block (rpc/async_log.py)."""

    def __init__(
        self,
        role: str,
        settings: AccessLogSettings | None = None,
        *,
        stream: TextIO | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        settings = settings if settings is not None else AccessLogSettings()
        self._role = role
        self._content = settings.content
        self._handler: AsyncLogHandler | None = None
        self.arrivals = settings.enabled and settings.arrival
        if not settings.enabled:
            return
        sink: Sink
        if settings.path is None:
            sink = Stream(stream or sys.stderr)
        else:
            sink = RotatingFile(settings.path, settings.max_bytes, settings.backups)
        self._handler = AsyncLogHandler(
            sink,
            queue_size=settings.queue_size,
            batch_size=settings.batch_size,
            flush_interval_s=settings.flush_interval_s,
            close_timeout_s=settings.close_timeout_s,
            on_drop=on_drop,
            name="access-log",
        )

    def arrived(self, *, request_id: str, private: bool = False, **fields: Any) -> None:
        """Writes the line of a request that has come, if such lines are wanted."""
        if self.arrivals and not private:
            self._write("arrival", request_id, None, fields)

    def record(
        self,
        *,
        request_id: str,
        code: str,
        private: bool = False,
        error: BaseException | None = None,
        **fields: Any,
    ) -> None:
        """Writes the line of a request that has ended with `code`; None among `fields` is left out."""
        if self._handler is None:
            return
        if private:
            if code != _SUCCESS:
                self._write("access", request_id, code, {})
            return
        if error is not None:
            fields["exception"] = exception_text(error, content=self._content)
            fields["traceback"] = traceback_text(error)
        self._write("access", request_id, code, fields)

    def _write(self, kind: str, request_id: str, code: str | None, fields: Mapping[str, Any]) -> None:
        handler = self._handler
        if handler is None:
            return
        line: dict[str, Any] = {
            "log_time": timestamp(time.time()),
            "log": kind,
            "role": self._role,
            "request_id": request_id,
        }
        if code is not None:
            line["code"] = code
        for key, value in fields.items():
            if value is None or (key in CONTENT_FIELDS and not self._content):
                continue
            line[key] = MASK if is_secret(key) else _plain(value)
        handler.write_line(redact_line(_encode(line)))

    def get_stats(self) -> dict[str, int]:
        return {} if self._handler is None else self._handler.get_stats()

    def flush(self) -> None:
        if self._handler is not None:
            self._handler.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """Writes what waits, within the close time-out or `timeout_s` if that is less."""
        if self._handler is not None:
            self._handler.close(timeout_s)


def _encode(line: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(line, enc_hook=str)
    except UnicodeEncodeError:  # half a surrogate pair in a text
        return json.dumps(line, default=str).encode()


def _plain(value: Any) -> Any:
    """What is written for a value: durations with a microsecond's precision, since more digits say nothing; secrets in
    mappings masked."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is float:
        # What `round` does to decimals takes three times as long, and there are some twenty in a line.
        return int(value * 1e6 + 0.5) / 1e6 if 0.0 <= value < _ROUNDED_BELOW else value
    if kind is dict or isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            name = key if type(key) is str else str(key)
            if is_secret(name):
                item = MASK
            elif type(item) is float and 0.0 <= item < _ROUNDED_BELOW:  # what most mappings are made of
                item = int(item * 1e6 + 0.5) / 1e6
            elif type(item) is not str:
                item = _plain(item)
            plain[name] = item
        return plain
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    return value


def exception_text(error: BaseException, *, content: bool = False) -> str:
    """Name and message of a typed error; of another one the type alone, unless content may be written: its text can
    quote what a client sent."""
    if isinstance(error, BatonError):
        return f"{error.code.name}: {error.message}"
    return f"{type(error).__name__}: {error}" if content else type(error).__name__


def traceback_text(error: BaseException) -> str | None:
    """Where an error came from, `file:line function`, innermost last, causes after `because of`; None for one that was
    never raised. Without source lines: reading them costs more than all the rest."""
    parts: list[str] = []
    seen: BaseException | None = error
    for _ in range(TRACEBACK_CAUSES):
        if seen is None:
            break
        frames = _frames(seen.__traceback__)
        if frames:
            if parts:
                parts.append(f"because of {type(seen).__name__}")
            parts.extend(frames[-TRACEBACK_FRAMES:])
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(parts) or None


def _frames(trace: TracebackType | None) -> list[str]:
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    return frames
