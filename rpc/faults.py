"""Fault points: named hooks in product code, off unless somebody arms them.

Armed by the environment variable `BATON_FAULTS`, read once when this module is imported, or by `arm()` in a
test that runs the code in its own process. Unarmed, a fault point costs one truth test of an empty
dictionary.

    BATON_FAULTS="name:action[=value][,key=value];name:..."

Points, their labels and actions are those of `rpc.fault_points`. Actions: `delay=SECONDS`, `raise=CODE_NAME` (or its
number), `drop` (the caller leaves out what the point stands for), `duplicate` (it happens twice), `corrupt` (a byte of
a payload changes), `full` (a queue refuses), `jump=SECONDS` (a clock goes forward).

Which of the calls are hit: `nth=N` only the N-th (from 1), `every=N` each N-th one, `probability=P` each with that
chance, `times=N` at most N; with `while=FILE` only those while there is such a file are calls at all, and a delay ends
with the file. The draws of a fault are a function of `seed=N` (default 0), its point and its place in the variable, so
equal calls are hit alike in every run; each hit is a line of the log. Every other `key=value` must equal the label of
that name, so `engine.layer:delay=0.05,layer=3` slows layer 3 alone; a value that ends in `*` is the label's beginning,
so `request.admit:raise=MALLOC_FAILED,request_key=short*` fails the requests whose id begins with `short`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rpc import fault_points
from rpc.errors import BatonError, ErrorCode

VARIABLE = "BATON_FAULTS"
POINT_RAISED = "raised by a fault point"  # the message of errors that arise so
_log = logging.getLogger(__name__)
# What the caller of a point has to do, as the bits of one number.
DROP = 1
DUPLICATE = 2
CORRUPT = 4
FULL = 8
LOOK_S = 0.005  # between two looks for the file with which a delay ends
_EFFECTS = {"drop": DROP, "duplicate": DUPLICATE, "corrupt": CORRUPT, "full": FULL}
_COUNTS = ("nth", "every", "times", "seed")
_TIMED = {"delay": "delay_s", "jump": "jump_s"}


@dataclass
class _Fault:
    point: str
    action: str = ""
    delay_s: float = 0.0
    jump_s: float = 0.0
    code: ErrorCode = ErrorCode.UNKNOWN_ERROR
    nth: int = 0
    every: int = 0
    times: int = 0
    probability: float = 1.0
    seed: int = 0
    file: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    fired: int = 0
    draws: random.Random = field(default_factory=random.Random)

    def fires(self, labels: dict[str, object]) -> bool:
        if not all(_matches(value, labels.get(key)) for key, value in self.labels.items()):
            return False
        if self.file and not os.path.exists(self.file):
            return False
        self.calls += 1
        if self.nth and self.calls != self.nth:
            return False
        if self.every and self.calls % self.every:
            return False
        if self.times and self.fired >= self.times:
            return False
        if self.probability < 1.0:
            if self.draws.random() >= self.probability:
                return False
            # Nobody can tell which calls chance will hit; the others are as the variable says.
            _log.info("fault point hit", extra={"fault": self.point, "action": self.action})
        self.fired += 1
        return True


def _matches(wanted: str, label: object) -> bool:
    return str(label).startswith(wanted[:-1]) if wanted.endswith("*") else str(label) == wanted


_armed: dict[str, list[_Fault]] = {}
_lock = threading.Lock()
_mistake = ""


def _parse_code(text: str) -> ErrorCode:
    try:
        code = ErrorCode(int(text)) if text.isdigit() else ErrorCode[text]
    except (KeyError, ValueError):
        raise ValueError(f"{VARIABLE}: {text!r} is no code of the error table") from None
    if code is ErrorCode.NONE_ERROR:
        raise ValueError(f"{VARIABLE}: raise needs a code other than {text!r}")
    return code


def _parse_seconds(key: str, value: str) -> float:
    seconds = float(value)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


def _parse_chance(value: str) -> float:
    chance = float(value)
    if not 0 <= chance <= 1:
        raise ValueError
    return chance


def _parse_count(key: str, value: str) -> int:
    count = int(value)
    if key != "seed" and count < 1:  # it would hit nothing, and nobody would notice
        raise ValueError
    return count


def _parse_one(text: str, place: int) -> _Fault:
    name, colon, rest = text.partition(":")
    if not colon or not name.strip() or not rest.strip():
        raise ValueError(f"{VARIABLE}: {text!r} must have the form name:action[=value][,key=value]")
    point = fault_points.find(name.strip())
    if point is None:
        raise ValueError(f"{VARIABLE}: there is no fault point {name.strip()!r}; docs/chaos.md has them all")
    found = _Fault(point.name)
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in fault_points.ACTIONS:
            if found.action:
                raise ValueError(f"{VARIABLE}: {text!r} has two actions, {found.action} and {key}")
            if key not in point.actions:
                allowed = ", ".join(point.actions)
                raise ValueError(f"{VARIABLE}: {point.name} has no action {key}, but {allowed}")
            found.action = key
        elif not equals:
            raise ValueError(f"{VARIABLE}: {part!r} in {text!r} must be key=value")
        try:
            if key in _TIMED:
                setattr(found, _TIMED[key], _parse_seconds(key, value))
            elif key == "raise":
                found.code = _parse_code(value)
            elif key == "probability":
                found.probability = _parse_chance(value)
            elif key == "while":
                found.file = value
            elif key in _COUNTS:
                setattr(found, key, _parse_count(key, value))
            elif key in _EFFECTS:
                if equals:
                    raise ValueError(f"{VARIABLE}: {key} takes no value, and has {value!r}")
            elif key in point.labels:
                found.labels[key] = value
            else:
                known = ", ".join(point.labels)
                raise ValueError(f"{VARIABLE}: {point.name} has no label {key!r}, but {known}")
        except ValueError as error:
            if str(error).startswith(VARIABLE):
                raise
            raise ValueError(f"{VARIABLE}: {key}={value!r} in {text!r} is no number that it can be") from None
    if not found.action:
        raise ValueError(f"{VARIABLE}: {text!r} names no action; {point.name} has {', '.join(point.actions)}")
    found.draws.seed(f"{found.seed}:{found.point}:{place}")
    return found


def parse(spec: str) -> None:
    """Raises ValueError when `spec` names a point, label or action that does not exist, or cannot be read."""
    _parse_all(spec)


def _parse_all(spec: str) -> list[_Fault]:
    return [_parse_one(part, place) for place, part in enumerate(spec.split(";")) if part.strip()]


def arm(spec: str) -> None:
    """Arms the faults of `spec` (the syntax of the variable) in addition to those already armed.

    Raises ValueError, and arms none, when it cannot be parsed.
    """
    faults = _parse_all(spec)
    with _lock:
        for item in faults:
            _armed.setdefault(item.point, []).append(item)


def disarm() -> None:
    """Disarms every fault of this process. A clock that has jumped stays where it is."""
    with _lock:
        _armed.clear()


def armed() -> bool:
    """Whether any fault is armed, for code that would otherwise have to ask for every item of a batch."""
    return bool(_armed)


def mistake() -> str:
    """What was wrong with the variable when the process started; empty when nothing was. No process may go on then."""
    return _mistake


def fired(name: str) -> int:
    """How often the actions of fault point `name` have run."""
    with _lock:
        return sum(item.fired for item in _armed.get(name, ()))


def _due(name: str, labels: dict[str, object]) -> tuple[list[_Fault], BatonError | None, int]:
    """The faults that delay this call, the error to raise, and what the caller has to do."""
    delays: list[_Fault] = []
    error, effect = None, 0
    with _lock:
        for item in _armed.get(name, ()):
            if not item.fires(labels):
                continue
            if item.delay_s > 0:
                delays.append(item)
            effect |= _EFFECTS.get(item.action, 0)
            if item.action == "raise" and error is None:
                error = BatonError(item.code, POINT_RAISED, metadata={"fault": name})
    return delays, error, effect


def _waits(item: _Fault) -> Iterator[float]:
    """Seconds to sleep one after the other, until a delay is over."""
    until = time.monotonic() + item.delay_s
    while (left := until - time.monotonic()) > 0 and (not item.file or os.path.exists(item.file)):
        yield min(left, LOOK_S) if item.file else left


def fault(name: str, **labels: object) -> int:
    """Fault point for synchronous code. What the caller has to do: DROP, DUPLICATE, CORRUPT and FULL, or none (0).

    Blocks for the armed delay; raises BatonError for an armed code. Unarmed: 0 at once.
    """
    if not _armed:
        return 0
    delays, error, effect = _due(name, labels)
    for item in delays:
        for wait_s in _waits(item):
            time.sleep(wait_s)
    if error is not None:
        raise error
    return effect


async def fault_async(name: str, **labels: object) -> int:
    """Fault point for coroutines; like `fault`, but a delay suspends the caller alone and can be
    cancelled."""
    if not _armed:
        return 0
    delays, error, effect = _due(name, labels)
    for item in delays:
        for wait_s in _waits(item):
            await asyncio.sleep(wait_s)
    if error is not None:
        raise error
    return effect


def clock(name: str, reading: Callable[[], float], **labels: object) -> Callable[[], float]:
    """The clock of a component: `reading` itself, or, when a fault of the point is armed by now, one that jumps.

    Each reading is a call of the point.
    """
    if name not in _armed:
        return reading
    ahead_s = 0.0

    def jumping() -> float:
        nonlocal ahead_s
        with _lock:
            ahead_s += sum(item.jump_s for item in _armed.get(name, ()) if item.fires(labels))
        return reading() + ahead_s

    return jumping


if os.environ.get(VARIABLE):
    try:
        arm(os.environ[VARIABLE])
    except ValueError as error:
        _mistake = str(error)  # rpc.settings ends the process with it, as with any value that cannot be
