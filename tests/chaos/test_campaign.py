"""`baton chaos` by its command: a minute of it has to pass, and it has to find what is really wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extent import extent
from tests.integration.cluster import ROOT, wait_for

pytestmark = pytest.mark.timeout(700)

LIMIT_S = 600.0


def chaos(folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and output of one campaign, whose logs stay in `folder`."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "cli", "chaos", "--json", str(report), "--keep", str(folder), *flags]
    environment = {key: value for key, value in os.environ.items() if key != "BATON_FAULTS"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    output = ended.stdout + ended.stderr
    assert report.exists(), output
    return ended.returncode, json.loads(report.read_text()), output


@pytest.mark.invariant("RPC-32")
def test_campaign_when_everything_fails_at_random_then_answers_are_right_or_typed_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    flags = ("--seconds", extent("60", "240"), "--requests", "100000", "--seed", "11", "--blow-seconds", "4")
    status, report, output = chaos(tmp_path, *flags, "--intensity", "2")
    states = "\n".join(state.read_text() for state in tmp_path.glob("*/state.txt"))
    assert (status, report["violations"]) == (0, []), f"{output}\n{states}"
    assert report["endings"]["right"] > 20, output
    assert set(report["endings"]) <= {"right", "typed error", "client left", "aborted", "deadline"}
    assert {"kill", "pause", "restart"} == {blow.partition(" ")[0] for blow in report["blows"]}, output
    actions = {hit.rpartition(":")[2] for hit in report["points_hit"]}
    assert {"delay", "duplicate", "drop", "raise", "corrupt", "full"} <= actions, output
    # Every way in which KV travels was under fire, and has brought some.
    assert {"ipc", "tcp", "grpc"} <= set(report["settings"]["transports"]) == set(report["loads"]), output
    assert report["ledgers_clean_after_seconds"] is not None


@pytest.mark.extended
def test_campaign_when_tokens_blocks_and_requests_really_go_wrong_then_each_is_found(tmp_path: Path) -> None:
    wrong = (
        "--faults", "corrupt", "--intensity", "200", "--server-flags", "--kv-checksum off --kv-lease-seconds 3600",
        "--points", "cache_store.release:drop;router.stage:delay=600,stage=tokenize,every=25",
    )  # fmt: skip
    small = ("--prefill-servers", "1", "--decode-servers", "1", "--transport", "grpc", "--requests", "60")
    status, report, output = chaos(tmp_path, *wrong, *small, "--request-timeout", "3", "--settle-seconds", "1")
    found = "\n".join(report["violations"])
    assert status == 1, output
    assert "differs from the right answer" in found, output  # damaged KV that no checksum covered
    assert "no end within 8." in found, output  # a request that the router forgot
    assert "ledgers not clean after 1 s" in found and "staged = " in found, output  # blocks that nobody gave back
    assert any("staged" in state.read_text() for state in tmp_path.glob("*/state.txt")), "no dump of the state"


def test_campaign_when_it_is_ended_in_the_background_of_a_script_then_nothing_of_it_is_left(tmp_path: Path) -> None:
    def ignore() -> None:  # as a shell has it for what ends with &
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-m", "cli", "chaos", "--keep", str(tmp_path / "logs"), "--requests", "100000"]
    command += ["--prefill-servers", "1", "--decode-servers", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=ignore
    ) as campaign:
        try:
            wait_for("a server", lambda: list(tmp_path.glob("logs/*/decode-0.log")), 120.0)
            campaign.terminate()
            campaign.communicate(timeout=60.0)
        finally:
            campaign.kill()
    assert campaign.returncode == 130
    own = str(tmp_path).encode()  # the model that its servers were told to serve lies there
    wait_for("the end of its processes", lambda: not any(own in each for each in map(_content, _commands())), 30.0)
    assert not list(tmp_path.glob("baton-chaos-*"))


def _commands() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*/cmdline")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has ended
        return b""
