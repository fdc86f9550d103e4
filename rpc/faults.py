"""Fault points: named hooks in product code that only a test can arm.

Armed by the environment variable `BATON_FAULTS`, read once when this module is imported, or by `arm()` in a
test that runs the code in its own process. Unarmed, a fault point costs one truth test of an empty
dictionary.

    BATON_FAULTS="name:action=value[,key=value];name:..."

Actions: `delay=SECONDS`, `raise=CODE_NAME` (or its number), `drop` (the caller leaves out what the point
stands for). `nth=N` lets only the N-th matching call through to the action (from 1), `every=N` each N-th one,
`times=N` at most N. Every other `key=value` must equal the label of that name, so
`engine.layer:delay=0.05,layer=3` slows layer 3 alone; a value that ends in `*` is the label's beginning, so
`request.admit:raise=MALLOC_FAILED,request_key=short*` fails the requests whose id begins with `short`.

Points: `router.stage` (stage, request_id; any but queue), `request.admit` (role, request_key), `engine.stage` (stage,
request_key), `engine.step` (kind, request_key of its first row, rank), `engine.layer` (group, layer, rank),
`engine.load`, `engine.rest` and `engine.stop` (rank), `engine.ordered` (kind; on rank 0, once the other ranks have the
step), `prefill.answer`, `decode.reserved` (request_key), `cache_store.load_start` (key, peer), `cache_store.load_open`,
`cache_store.publish` (key), `cache_store.send_piece` (key, group, layer, block), `cache_store.renew` (key, side), all
of them with the rank whose cache store it is, `prefill_graph.capture`, `prefill_graph.prepare`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass, field

from rpc.errors import BatonError, ErrorCode

VARIABLE = "BATON_FAULTS"


@dataclass
class _Fault:
    point: str
    action: str  # delay, raise, drop
    delay_s: float = 0.0
    code: ErrorCode = ErrorCode.UNKNOWN_ERROR
    nth: int = 0
    every: int = 0
    times: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    fired: int = 0

    def fires(self, labels: dict[str, object]) -> bool:
        if not all(_matches(value, labels.get(key)) for key, value in self.labels.items()):
            return False
        self.calls += 1
        if self.nth and self.calls != self.nth:
            return False
        if self.every and self.calls % self.every:
            return False
        if self.times and self.fired >= self.times:
            return False
        self.fired += 1
        return True


def _matches(wanted: str, label: object) -> bool:
    return str(label).startswith(wanted[:-1]) if wanted.endswith("*") else str(label) == wanted


_armed: dict[str, list[_Fault]] = {}
_lock = threading.Lock()


def _parse_code(text: str) -> ErrorCode:
    try:
        code = ErrorCode(int(text)) if text.isdigit() else ErrorCode[text]
    except (KeyError, ValueError):
        raise ValueError(f"{VARIABLE}: {text!r} is no code of the error table") from None
    if code is ErrorCode.NONE_ERROR:
        raise ValueError(f"{VARIABLE}: raise needs a code other than {text!r}")
    return code


def _parse_one(text: str) -> _Fault:
    point, colon, rest = text.partition(":")
    if not colon or not point.strip() or not rest.strip():
        raise ValueError(f"{VARIABLE}: {text!r} must have the form name:action=value[,key=value]")
    fault_ = _Fault(point.strip(), "")
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in ("delay", "raise", "drop"):
            if fault_.action:
                raise ValueError(f"{VARIABLE}: {text!r} has two actions, {fault_.action} and {key}")
            fault_.action = key
        elif not equals:
            raise ValueError(f"{VARIABLE}: {part!r} in {text!r} must be key=value")
        try:
            if key == "delay":
                fault_.delay_s = float(value)
            elif key == "raise":
                fault_.code = _parse_code(value)
            elif key in ("nth", "every", "times"):
                setattr(fault_, key, int(value))
            elif key != "drop":
                fault_.labels[key] = value
        except ValueError as error:
            if str(error).startswith(VARIABLE):
                raise
            raise ValueError(f"{VARIABLE}: {key}={value!r} in {text!r} is no number") from None
    if not fault_.action:
        raise ValueError(f"{VARIABLE}: {text!r} names no action (delay, raise, drop)")
    return fault_


def arm(spec: str) -> None:
    """Arms the faults of `spec` (the syntax of the variable) in addition to those already armed.

    Raises ValueError, and arms none, when it cannot be parsed.
    """
    faults = [_parse_one(part) for part in spec.split(";") if part.strip()]
    with _lock:
        for item in faults:
            _armed.setdefault(item.point, []).append(item)


def disarm() -> None:
    """Disarms every fault of this process."""
    with _lock:
        _armed.clear()


def armed() -> bool:
    """Whether any fault is armed, for code that would otherwise have to ask for every item of a batch."""
    return bool(_armed)


def fired(name: str) -> int:
    """How often the actions of fault point `name` have run."""
    with _lock:
        return sum(item.fired for item in _armed.get(name, ()))


def _due(name: str, labels: dict[str, object]) -> tuple[float, BatonError | None, bool]:
    """Delay in seconds, error to raise, and whether to drop, of this call."""
    delay_s, error, drop = 0.0, None, False
    with _lock:
        for item in _armed.get(name, ()):
            if not item.fires(labels):
                continue
            delay_s += item.delay_s
            drop = drop or item.action == "drop"
            if item.action == "raise" and error is None:
                error = BatonError(item.code, "raised by a fault point", metadata={"fault": name})
    return delay_s, error, drop


def fault(name: str, **labels: object) -> bool:
    """Fault point for synchronous code. True means: leave out the thing that the point stands for.

    Blocks for the armed delay; raises BatonError for an armed code. Unarmed: False at once.
    """
    if not _armed:
        return False
    delay_s, error, drop = _due(name, labels)
    if delay_s > 0:
        time.sleep(delay_s)
    if error is not None:
        raise error
    return drop


async def fault_async(name: str, **labels: object) -> bool:
    """Fault point for coroutines; like `fault`, but a delay suspends the caller alone and can be
    cancelled."""
    if not _armed:
        return False
    delay_s, error, drop = _due(name, labels)
    if delay_s > 0:
        await asyncio.sleep(delay_s)
    if error is not None:
        raise error
    return drop


if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])
