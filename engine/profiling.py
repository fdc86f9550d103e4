"""Traces of an engine's steps, recorded with torch's profiler when an operator asks for one.

What is recorded is the step loop: the operators of the model, and kernels and copies where there is a CUDA device. With
several ranks that of rank 0, which does what the others do.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.messages import ProfileNews, ProfileOrder
from engine.scheduler.news import engine_error
from rpc.errors import BatonError, ErrorCode

_log = logging.getLogger(__name__)


class Profile(Protocol):
    """The part of `torch.profiler.profile` that is used."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None: ...


def torch_profile() -> Profile:
    """A profile of this thread's operators, and of the device's work where there is CUDA."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


@dataclass(slots=True)
class _Trace:
    """A trace that has been recorded. `news` when it is in its file, or could not be written."""

    path: Path
    seconds: float
    by_limit: bool
    news: ProfileNews | None = None


class StepProfiler:
    """Records at most one trace at a time, for `max_s` seconds at the most, into a file of its own in `folder`.

    Belongs to the thread of the step loop. Writing a trace takes another thread, so that steps go on meanwhile; `wake`
    is called there when it is done. A trace that ended by its limit is told of by the stop that follows.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        max_s: float,
        wake: Callable[[], None],
        *,
        make: Callable[[], Profile] = torch_profile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._name = name
        self._max_s = max_s
        self._wake = wake
        self._make = make
        self._clock = clock
        self._numbers = itertools.count(1)
        self._recording: Profile | None = None
        self._began = 0.0
        self._trace: _Trace | None = None  # recorded, and nobody has been told of it
        self._waiting: int | None = None  # the order to stop that waits for its file
        self._news: list[ProfileNews] = []

    def prepare(self) -> None:
        """Records nothing. The first time takes seconds, in which no step could be computed; so it is before the first
        request."""
        try:
            recording = self._make()
            recording.start()
            recording.stop()
        except Exception as error:
            _failed("profiles cannot be recorded", error)

    def order(self, order: ProfileOrder) -> None:
        """Starts or stops; the answer comes with `turn`."""
        self._keep_limit()
        try:
            if order.start:
                self._start()
                self._news.append(ProfileNews(order.number))
            else:
                self._stop(order.number)
        except BatonError as error:
            self._news.append(ProfileNews(order.number, engine_error(error)))

    def turn(self) -> list[ProfileNews]:
        """Between two steps: ends a trace whose time is over, and gives what there is to tell."""
        self._keep_limit()
        trace = self._trace
        if self._waiting is not None and trace is not None and trace.news is not None:
            self._news.append(ProfileNews(self._waiting, *_parts(trace.news)))
            self._waiting = self._trace = None
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Ends a recording without a file. The engine stops."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()

    def _keep_limit(self) -> None:
        if self._recording is not None and self._clock() - self._began >= self._max_s:
            try:
                self._end(by_limit=True)
            except BatonError as error:
                _log.error("the profile was lost: %s", error, extra={"code": error.code.name})

    def _start(self) -> None:
        if self._recording is not None or self._waiting is not None:
            raise BatonError(
                ErrorCode.DUPLICATE_REQUEST, "a profile is being recorded; stop it with /stop_profile first"
            )
        if self._trace is not None and self._trace.news is None:
            raise BatonError(ErrorCode.DUPLICATE_REQUEST, "the last profile is being written; try again in a moment")
        self._trace = None
        try:
            recording = self._make()
            recording.start()
        except Exception as error:
            raise _failed("the profile could not be started; see the server's log", error) from error
        self._recording, self._began = recording, self._clock()

    def _stop(self, number: int) -> None:
        if self._recording is not None:
            self._end(by_limit=False)
        elif self._trace is None or self._waiting is not None:
            raise BatonError(
                ErrorCode.INVALID_PARAMS, "no profile is being recorded; start one with /start_profile first"
            )
        self._waiting = number

    def _end(self, *, by_limit: bool) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        seconds = self._clock() - self._began
        try:
            recording.stop()
        except Exception as error:
            raise _failed("the profile could not be ended; see the server's log", error) from error
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"baton-{self._name}-{stamp}-{next(self._numbers)}.json"
        trace = self._trace = _Trace(path, seconds, by_limit)
        threading.Thread(target=self._write, args=(recording, trace), name="profile-writer", daemon=True).start()

    def _write(self, recording: Profile, trace: _Trace) -> None:
        unfinished = trace.path.with_suffix(".part")
        try:
            recording.export_chrome_trace(str(unfinished))
            os.replace(unfinished, trace.path)
            size = trace.path.stat().st_size
        except Exception as error:
            for rest in trace.path.parent.glob(unfinished.name + "*"):  # torch writes beside it first
                with contextlib.suppress(OSError):  # a full disk is not to keep half a trace
                    rest.unlink()
            failure = _failed(f"the profile could not be written into {trace.path.parent}; see the server's log", error)
            trace.news = ProfileNews(0, engine_error(failure))
        else:
            trace.news = ProfileNews(0, None, str(trace.path), trace.seconds, size, trace.by_limit)
            _log.info("a profile was written", extra={"path": str(trace.path), "seconds": round(trace.seconds, 3)})
        self._wake()


def _parts(news: ProfileNews) -> tuple[object, ...]:
    return news.error, news.path, news.seconds, news.size_bytes, news.by_limit


def _failed(message: str, cause: Exception) -> BatonError:
    _log.warning("%s: %s", message, cause, exc_info=cause)
    return BatonError(ErrorCode.EXECUTION_EXCEPTION, message, metadata={"cause": type(cause).__name__})
