"""The ordinary log: lines on stderr, written by a thread of their own so that no request ever waits for a terminal or
a disk (rpc/async_log.py). The other log, a line per request, is rpc/access_log.py.

A line has time, level, process, role, rank, request id and message, as JSON or as text. Secrets are masked in both.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

from rpc.async_log import AsyncLogHandler, replace_handlers, request_id_var
from rpc.log_sinks import Stream
from rpc.redaction import redact, redact_line
from rpc.timestamp import timestamp

__all__ = ["Level", "close_logging", "log_stats", "request_id_var", "setup_logging"]

Level = Literal["debug", "info", "warning", "error"]

# Attributes that every LogRecord has; what else it carries came in by `extra=`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, role, rank, request_id, logger, message and the record's
    extras."""

    def __init__(self, role: str, rank: int | None = None, process: str = "") -> None:
        super().__init__()
        self._constant: dict[str, Any] = {"process": process or f"{role}:{os.getpid()}", "role": role}
        if rank is not None:
            self._constant["rank"] = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": timestamp(record.created), "level": record.levelname.lower()}
        line.update(self._constant)
        request_id = getattr(record, "request_id", "")
        if request_id:
            line["request_id"] = request_id
        line["logger"] = record.name
        line["message"] = record.getMessage()
        for key, value in vars(record).items():
            if key not in _STANDARD:
                line[key] = redact(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact_line(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """`time LEVEL role[rank] request_id logger: message key=value …` for people."""

    def __init__(self, role: str, rank: int | None = None) -> None:
        super().__init__()
        self._who = role if rank is None else f"{role}[{rank}]"

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        extras = [f"{k}={redact(k, v)}" for k, v in vars(record).items() if k not in _STANDARD]
        head = f"{timestamp(record.created)} {record.levelname:<7} {self._who}"
        head += f" {request_id}" if request_id else ""
        text = " ".join([f"{head} {record.name}: {record.getMessage()}", *extras])
        return redact_line(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


_handlers: list[AsyncLogHandler] = []


def setup_logging(
    role: str,
    level: Level = "info",
    format: Literal["json", "text"] = "json",
    *,
    rank: int | None = None,
    process: str = "",
    stream: TextIO | None = None,
    queue_size: int = 100_000,
    on_drop: Callable[[], None] | None = None,
) -> AsyncLogHandler:
    """Sends the root logger's records to stderr (or `stream`) in the given form; closes and replaces an earlier
    set-up. `on_drop` is called for each line that had no room, in the thread that logged it."""
    close_logging()
    formatter = JsonFormatter(role, rank, process) if format == "json" else TextFormatter(role, rank)

    def note_drops(count: int) -> bytes:
        message = f"{count} lines of this log were dropped, its queue was full"
        record = {"name": __name__, "msg": message, "levelno": logging.WARNING, "levelname": "WARNING"}
        return formatter.format(logging.makeLogRecord(record)).encode()

    # Whoever reads a log on a terminal sees each line at once.
    handler = AsyncLogHandler(
        Stream(stream or sys.stderr),
        queue_size=queue_size,
        wake_every=1,
        on_drop=on_drop,
        note_drops=note_drops,
        name="log",
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    replace_handlers(root, handler)
    root.setLevel(level.upper())
    # Their own chatter says nothing that Baton does not log itself.
    for name in ("asyncio", "httpx", "httpcore", "uvicorn", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    _handlers.append(handler)
    return handler


def log_stats() -> dict[str, int]:
    """Counts of the ordinary log, see `AsyncLogHandler.get_stats`; empty before its set-up."""
    return _handlers[-1].get_stats() if _handlers else {}


def close_logging() -> None:
    """Writes what waits and detaches the handlers of `setup_logging`. May be called again."""
    root = logging.getLogger()
    while _handlers:
        handler = _handlers.pop()
        root.removeHandler(handler)
        handler.close()


atexit.register(close_logging)
