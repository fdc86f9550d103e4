"""Structured output fails closed: a process that is to offer it and cannot does not start, and says why in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.integration.cluster import ROUTER_FLAGS, SERVER_FLAGS, Cluster
from tests.integration.grammar_packages import DAMAGED, in_front, package
from tests.unit.engine.tiny_models import tiny_model

LIMIT_S = 100.0


def start(module: str, flags: tuple[str, ...], backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process with the package of `folder` in front of the installed one, until it ends."""
    command = [sys.executable, "-m", module, "--model", str(tiny_model("llama")), *flags, "--grammar-backend", backend]
    environment = {**os.environ, "PYTHONPATH": in_front(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.invariant("RPC-21")
@pytest.mark.parametrize(
    ("module", "flags", "backend"), [("router", ROUTER_FLAGS, "xgrammar"), ("decode_server", SERVER_FLAGS, "auto")]
)
def test_start_when_the_library_is_damaged_then_fails_with_one_line_that_names_the_flag(
    module: str, flags: tuple[str, ...], backend: str, tmp_path: Path
) -> None:
    done = start(module, flags, backend, package(tmp_path, DAMAGED))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "--grammar-backend: xgrammar cannot be used (ImportError: libxgrammar_bindings.so: wrong ELF class)" in last
    assert "Traceback" not in done.stderr and '"event": "ready"' not in done.stdout


@pytest.mark.invariant("RPC-21")
def test_start_when_the_library_has_a_programming_error_then_it_is_told_as_one(tmp_path: Path) -> None:
    done = start("router", ROUTER_FLAGS, "xgrammar", package(tmp_path, "undefined_name\n"))
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert "a programming error" in line and "NameError: name 'undefined_name' is not defined" in line


def test_grammar_when_structured_output_is_off_then_605_from_router_and_servers_alike(
    direct: Cluster, slow: Path
) -> None:
    """Off, the library is not even looked at: this one is damaged, as that of the servers. A server that is off refuses
    by itself."""
    damaged = {"PYTHONPATH": in_front(slow.parent)}
    none, on = ("--grammar-backend", "none"), ("--grammar-backend", "xgrammar")
    body = {"prompt": "x", "regex": "a+", "max_tokens": 4}
    assert direct.decode[0].metric("baton_grammar_validator_available") == 0
    with (
        direct.lent(direct.prefill, direct.decode, none, damaged) as off_router,
        direct.lent(direct.prefill, direct.decode, on) as on_router,
        httpx.Client(timeout=LIMIT_S, verify=False) as client,
    ):
        assert off_router.router.metric("baton_grammar_validator_available") == 0
        assert on_router.router.metric("baton_grammar_validator_available") == 1
        for name, cluster in (("off", off_router), ("on", on_router)):
            url = f"http://{cluster.router.http}/v1/completions"
            response = client.post(url, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["baton_code"]) == (400, 605), (name, error)
            assert "--grammar-backend" in error["message"]
            assert client.post(url, json={"prompt": "x"}).status_code == 200
        direct.assert_clean_ledgers()
