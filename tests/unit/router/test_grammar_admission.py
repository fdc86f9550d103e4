"""Admission of grammars, with real helper processes: verdicts, bounds, deaths, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from router.grammar.admission import GrammarAdmission, GrammarSettings
from router.grammar.helper import HelperConfig
from router.grammar.helper_process import HelperDied, HelperProcess, HelperTemplate
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarKind, GrammarSpec
from rpc.metrics import Registry
from tests.integration.cluster import process_exists
from tests.standstill import stand_still
from tests.unit.engine.tiny_models import tiny_model
from tests.unit.rpc.waiting import until

GOOD = GrammarSpec(GrammarKind.REGEX, "[a-c]+x")
LIMIT_S = 110.0
# A rule for each of some thousand words: more memory than the least that may be allowed.
LARGE = GrammarSpec(
    GrammarKind.EBNF,
    "root ::= " + " | ".join(f"r{i}" for i in range(20_000)) + "\n"
    + "\n".join(f'r{i} ::= "a{i}" [a-z]{{1,90}} | "b" r{(i + 1) % 20_000}' for i in range(20_000)),
)  # fmt: skip


def slow(number: int) -> GrammarSpec:
    """One of many that take far longer than any test."""
    return GrammarSpec(LARGE.kind, f'{LARGE.text}\nunused{number} ::= "x"')


def figure(metrics: Registry, name: str) -> float:
    return metrics.value(f"{name}_count" if name.endswith("_seconds") else name) or 0.0


@asynccontextmanager
async def admitting(**settings: object) -> AsyncIterator[tuple[GrammarAdmission, Registry]]:
    metrics = Registry("router")
    options = {"enabled": True, "folder": str(tiny_model("llama")), "helpers": 1, **settings}
    async with asyncio.timeout(LIMIT_S), GrammarAdmission(GrammarSettings(**options), metrics) as admission:  # type: ignore[arg-type]
        yield admission, metrics


async def refused(admission: GrammarAdmission, spec: GrammarSpec, param: str = "regex") -> BatonError:
    with pytest.raises(BatonError) as caught:
        await admission.admit(spec, param)
    return caught.value


async def test_admission_when_grammars_come_then_verdicts_positions_bounds_and_deaths_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One helper, through everything that can happen to it."""
    monkeypatch.setattr("router.grammar.admission.QUICK_S", LIMIT_S)  # none is slow, whatever else runs
    async with admitting(memory_bytes=64 << 20, result_cache=3) as (admission, metrics):
        [helper] = admission.helpers
        assert figure(metrics, "baton_grammar_validator_available") == 1
        assert await admission.admit(GOOD, "regex") is None
        assert figure(metrics, "baton_grammar_compile_seconds") == 1
        await asyncio.gather(*(admission.admit(GOOD, "regex") for _ in range(5)))
        assert figure(metrics, "baton_grammar_compile_seconds") == 1  # remembered

        for _ in range(2):
            error = await refused(admission, GrammarSpec(GrammarKind.REGEX, "(a"), "guided_regex")
            assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "guided_regex")
            assert error.metadata == {"cause": "grammar", "position": "3"} and "position 3" in error.message
        assert figure(metrics, "baton_grammar_compile_seconds") == 2

        # Equal grammars that come together are one question.
        spec = GrammarSpec(GrammarKind.REGEX, "b{2,9}")
        assert set(await asyncio.gather(*(admission.admit(spec, "regex") for _ in range(10)))) == {9}
        assert figure(metrics, "baton_grammar_compile_seconds") == 3

        # A request that leaves stops waiting at once, and those that ask the same do not.
        pid = helper.pid
        assert pid is not None
        stand_still(pid)
        spec = GrammarSpec(GrammarKind.REGEX, "e+")
        leaving, staying = (asyncio.create_task(admission.admit(spec, "regex")) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        os.kill(pid, signal.SIGCONT)
        await staying

        error = await refused(admission, LARGE, "ebnf")
        assert error.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
        assert error.metadata["cause"] == "memory" and "--grammar-memory-mb" in error.message
        assert helper.pid == pid  # it survives that

        # A helper that dies while it compiles fails that request, and is replaced.
        stand_still(pid)
        asking = asyncio.create_task(refused(admission, GrammarSpec(GrammarKind.REGEX, "c+")))
        for _ in range(10):
            await asyncio.sleep(0)
        assert admission._jobs and not admission._queue.qsize()  # it is the helper's turn
        os.kill(pid, signal.SIGKILL)
        error = await asking
        assert error.code is ErrorCode.EXECUTION_EXCEPTION and error.metadata["cause"] == "helper_died"
        await admission.admit(GrammarSpec(GrammarKind.REGEX, "c+"), "regex")
        assert helper.starts == 2 and helper.pid != pid
        assert figure(metrics, "baton_grammar_validator_available") == 1

        # One that dies with nothing to do costs nobody a request.
        pid = helper.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert helper._reader is not None
        assert await helper._reader.read() == b""
        await admission.admit(GrammarSpec(GrammarKind.REGEX, "d+"), "regex")
        assert helper.starts == 3

        # The process that helpers are forked from takes them along, and is loaded again.
        template, pid = admission.template.pid, helper.pid
        assert template is not None and pid is not None and admission.template.starts == 1
        assert len(os.listdir(f"/proc/{template}/task")) == 1  # with more threads it could not be forked
        os.kill(template, signal.SIGKILL)
        assert helper._reader is not None
        assert await helper._reader.read() == b""
        await admission.admit(GrammarSpec(GrammarKind.REGEX, "f+"), "regex")
        assert admission.template.starts == 2 and not process_exists(pid)

        # While it hangs, a grammar whose helper dies is not called slow, and what waits for a new one has its limit.
        admission.settings = replace(admission.settings, compile_timeout_s=5.0, queue_timeout_s=0.3)
        for idle in (False, True):
            template, pid = admission.template.pid, helper.pid
            assert template is not None and pid is not None and helper._reader is not None
            stand_still(template)
            stand_still(pid)
            if not idle:
                asking = asyncio.create_task(refused(admission, GrammarSpec(GrammarKind.REGEX, "g+")))
                for _ in range(10):
                    await asyncio.sleep(0)
                assert admission._jobs and not admission._queue.qsize()
            os.kill(pid, signal.SIGKILL)
            if not idle:
                error = await asking
                assert error.code is ErrorCode.EXECUTION_EXCEPTION and error.metadata["cause"] == "helper_died"
            else:
                assert await helper._reader.read() == b""
            error = await refused(admission, GrammarSpec(GrammarKind.REGEX, "h+"))
            assert error.code is ErrorCode.ROUTER_QUEUE_TIMEOUT
            os.kill(template, signal.SIGCONT)
            await until(lambda: helper.alive, 20.0)
            assert admission.template.starts == 2
        last = helper.pid
    assert last is not None and not process_exists(last)


async def test_admission_when_a_helper_takes_too_long_then_it_is_killed_and_what_waits_behind_it_times_out() -> None:
    async with admitting(compile_timeout_s=0.5, queue_timeout_s=0.2) as (admission, _):
        [helper] = admission.helpers
        pid = helper.pid
        assert pid is not None
        stand_still(pid)
        began = time.monotonic()
        first = asyncio.create_task(refused(admission, GOOD))
        second = asyncio.create_task(refused(admission, GrammarSpec(GrammarKind.REGEX, "z")))
        error = await second
        assert error.code is ErrorCode.ROUTER_QUEUE_TIMEOUT and "--grammar-queue-timeout-seconds" in error.message
        error = await first
        assert error.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT and error.metadata == {"cause": "timeout"}
        assert time.monotonic() - began < 10 and not process_exists(pid)
        assert not admission._verdicts  # neither is final


@pytest.mark.extended
async def test_admission_when_slow_grammars_keep_coming_then_others_are_answered_and_no_library_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.grammar.admission.QUICK_S", 0.2)
    async with admitting(compile_timeout_s=1.0, queue_timeout_s=LIMIT_S) as (admission, metrics):
        template, first = admission.template.pid, admission.helpers[0].pid
        asking = [asyncio.create_task(refused(admission, slow(number), "ebnf")) for number in range(4)]
        await asyncio.sleep(0)
        await admission.admit(GOOD, "regex")  # behind all of them
        # Each of the slow ones has cost it a fifth of a second, and the last one's turn is still to come.
        assert not asking[-1].done()
        assert figure(metrics, "baton_grammar_validator_available") == 1
        assert admission.helpers[0].pid not in (None, first)
        for error in await asyncio.gather(*asking):
            assert error.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT and error.metadata == {"cause": "timeout"}
        assert first is not None and not process_exists(first)
        assert (admission.template.pid, admission.template.starts) == (template, 1)
        await admission.admit(GrammarSpec(GrammarKind.REGEX, "[d-f]+"), "regex")
        assert admission.statistics()["slow"] == 0


def test_helper_when_the_loop_has_closed_its_pipe_already_then_it_counts_as_dead() -> None:
    """On the loop that the router runs on, which raises RuntimeError then."""

    async def ask() -> None:
        helper = HelperProcess(HelperTemplate(HelperConfig("", 0, 0, 0)))
        ours, theirs = socket.socketpair()
        helper._reader, helper._writer = await asyncio.open_unix_connection(sock=ours)
        theirs.close()
        helper._writer.close()
        await helper._writer.wait_closed()
        with pytest.raises(HelperDied):
            await helper.judge(GOOD)
        await helper.kill()

    uvloop.run(ask())


async def test_admission_when_it_is_off_then_605_and_no_process() -> None:
    async with admitting(enabled=False) as (admission, metrics):
        assert admission.helpers == [] and figure(metrics, "baton_grammar_validator_available") == 0
        error = await refused(admission, GOOD, "response_format")
        assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, "response_format")


async def test_admission_when_the_folder_cannot_be_read_then_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"router: error: .* has no tokenizer\.json"):
        async with admitting(folder=str(tmp_path)):
            pass
