"""Logging: lines on stderr, written by a thread of their own so that no request ever waits for a terminal or
a disk.

A line of the ordinary log has time, level, process, role, rank, request id and message, as JSON or as text.
The access log is one JSON line per request at its end. Both go through `AsyncLogHandler`, whose queue is
bounded: what does not fit is dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

request_id_var: ContextVar[str] = ContextVar("baton_request_id", default="")
"""Id of the request that the present task works for; it is added to every log record."""

Level = Literal["debug", "info", "warning", "error"]

# Attributes that every LogRecord has; what else it carries came in by `extra=`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}
_SECRET_KEYS = frozenset(("authorization", "api_key", "api-key", "apikey", "password", "secret", "token"))


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _redact(key: str, value: Any) -> Any:
    return "***" if key.lower() in _SECRET_KEYS else value


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, role, rank, request_id, logger, message and the record's
    extras."""

    def __init__(self, role: str, rank: int | None = None, process: str = "") -> None:
        super().__init__()
        self._constant: dict[str, Any] = {"process": process or f"{role}:{os.getpid()}", "role": role}
        if rank is not None:
            self._constant["rank"] = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _timestamp(record.created), "level": record.levelname.lower()}
        line.update(self._constant)
        request_id = getattr(record, "request_id", "")
        if request_id:
            line["request_id"] = request_id
        line["logger"] = record.name
        line["message"] = record.getMessage()
        for key, value in vars(record).items():
            if key not in _STANDARD:
                line[key] = _redact(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`time LEVEL role[rank] request_id logger: message key=value …` for people."""

    def __init__(self, role: str, rank: int | None = None) -> None:
        super().__init__()
        self._who = role if rank is None else f"{role}[{rank}]"

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        extras = [f"{k}={_redact(k, v)}" for k, v in vars(record).items() if k not in _STANDARD]
        head = f"{_timestamp(record.created)} {record.levelname:<7} {self._who}"
        head += f" {request_id}" if request_id else ""
        text = " ".join([f"{head} {record.name}: {record.getMessage()}", *extras])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class AsyncLogHandler(logging.Handler):
    """Hands records to one writer thread.

    `emit` never blocks: with `queue_size` records waiting a further one is dropped and counted (`on_drop` is
    called from the thread that logged). `close` stops the writer after it has written what waits, within
    `close_timeout_s`; what is left then is counted as dropped. Records after that are dropped as well. Write
    errors are counted and never reach the code that logs.
    """

    def __init__(
        self,
        target: logging.Handler,
        *,
        queue_size: int = 100_000,
        close_timeout_s: float = 5.0,
        on_drop: Callable[[], None] | None = None,
        name: str = "log-writer",
    ) -> None:
        super().__init__()
        self._target = target
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(queue_size)
        self._close_timeout_s = close_timeout_s
        self.on_drop = on_drop
        self._stopping = threading.Event()
        self._closed = False
        self._close_lock = threading.Lock()
        self._stats = dict.fromkeys(
            ("enqueued", "written", "dropped", "dropped_after_close", "write_errors", "max_queue_depth"), 0
        )
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._stopping.is_set():
            self._stats["dropped_after_close"] += 1
            return
        # The context variable belongs to the task that logs; the writer thread could not read it.
        if not hasattr(record, "request_id"):
            record.request_id = request_id_var.get()
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._stats["dropped"] += 1
            if self.on_drop is not None:
                self.on_drop()
            return
        self._stats["enqueued"] += 1

    def _write(self) -> None:
        while True:
            record = self._queue.get()
            if record is None:
                return
            self._stats["max_queue_depth"] = max(self._stats["max_queue_depth"], self._queue.qsize() + 1)
            self._write_one(record)

    def _write_one(self, record: logging.LogRecord) -> None:
        try:
            self._target.handle(record)
            self._stats["written"] += 1
        except Exception:  # a log line must not end the thread that writes the others
            self._stats["write_errors"] += 1

    def flush(self) -> None:
        """Waits, for the close time-out at the most, until what has been logged so far is written."""
        limit = time.monotonic() + self._close_timeout_s
        while not self._stopping.is_set() and self._pending() and time.monotonic() < limit:
            time.sleep(0.005)
        self._target.flush()

    def _pending(self) -> int:
        done = self._stats["written"] + self._stats["write_errors"]
        return self._stats["enqueued"] - done

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._stopping.set()
        try:
            limit = time.monotonic() + self._close_timeout_s
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=self._close_timeout_s)
            self._thread.join(max(0.0, limit - time.monotonic()))
            if self._thread.is_alive():
                self._stats["dropped"] += max(0, self._pending())
            else:
                self._target.flush()
                self._target.close()
        finally:
            super().close()

    def get_stats(self) -> dict[str, int]:
        return dict(self._stats)


class _CountingStreamHandler(logging.StreamHandler[TextIO]):
    """A stream handler that lets write errors out, to be counted by the handler in front of it."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this from within its except clause


class _CountingFileHandler(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this from within its except clause


_handlers: list[AsyncLogHandler] = []


def setup_logging(
    role: str,
    level: Level = "info",
    format: Literal["json", "text"] = "json",
    *,
    rank: int | None = None,
    process: str = "",
    stream: TextIO | None = None,
    on_drop: Callable[[], None] | None = None,
) -> AsyncLogHandler:
    """Sends the root logger's records to stderr (or `stream`) in the given form; replaces an earlier
    set-up."""
    close_logging()
    target = _CountingStreamHandler(stream or sys.stderr)
    target.setFormatter(JsonFormatter(role, rank, process) if format == "json" else TextFormatter(role, rank))
    handler = AsyncLogHandler(target, on_drop=on_drop)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Their own chatter says nothing that Baton does not log itself.
    for name in ("asyncio", "httpx", "httpcore", "uvicorn", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    _handlers.append(handler)
    return handler


def close_logging() -> None:
    """Writes what waits and detaches the handlers of `setup_logging`. May be called again."""
    root = logging.getLogger()
    while _handlers:
        handler = _handlers.pop()
        root.removeHandler(handler)
        handler.close()


atexit.register(close_logging)


class AccessLog:
    """One JSON line per request and process at its end, in a rotating file or on stderr.

    `content` says whether keys named `prompt` and `output` are written at all.
    """

    def __init__(
        self,
        role: str,
        path: str | None = None,
        *,
        enabled: bool = True,
        content: bool = False,
        queue_size: int = 100_000,
        max_bytes: int = 100_000_000,
        backups: int = 10,
        close_timeout_s: float = 5.0,
        stream: TextIO | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        self._role = role
        self._content = content
        self._handler: AsyncLogHandler | None = None
        if not enabled:
            return
        target: logging.Handler
        if path is None:
            target = _CountingStreamHandler(stream or sys.stderr)
        else:
            target = _CountingFileHandler(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8")
        target.setFormatter(logging.Formatter("%(message)s"))
        self._handler = AsyncLogHandler(
            target, queue_size=queue_size, close_timeout_s=close_timeout_s, on_drop=on_drop, name="access-log"
        )

    def record(self, *, request_id: str, code: str, **fields: Any) -> None:
        """Writes the line of a request: `code` is a name of the error table; stages, servers, counts in
        `fields`."""
        if self._handler is None:
            return
        line: dict[str, Any] = {"log_time": _timestamp(time.time()), "log": "access", "role": self._role}
        line.update(request_id=request_id, code=code)
        for key, value in fields.items():
            if value is None or (key in ("prompt", "output") and not self._content):
                continue
            line[key] = _rounded(_redact(key, value))
        text = json.dumps(line, ensure_ascii=False, default=str)
        self._handler.handle(logging.makeLogRecord({"msg": "%s", "args": (text,), "levelno": logging.INFO}))

    def get_stats(self) -> dict[str, int]:
        return {} if self._handler is None else self._handler.get_stats()

    def flush(self) -> None:
        if self._handler is not None:
            self._handler.flush()

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()


def _rounded(value: Any) -> Any:
    """Durations with a microsecond's precision: more digits say nothing."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(_redact(str(key), item)) for key, item in value.items()}
    return value
