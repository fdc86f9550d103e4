"""The `baton` command: dispatch, and flags that are checked before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cli import up
from cli.launch import LaunchError, check_free
from cli.main import COMMANDS, main
from cli.process import Process
from tests.integration.cluster import free_port


def test_help_then_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_command_when_unknown_then_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "'serve'" in error
    assert "prefill" in error


def test_command_when_missing_then_usage_and_status_two() -> None:
    assert main([]) == 2


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_server_command_when_run_then_it_reads_its_own_flags(name: str) -> None:
    command = [sys.executable, "-m", "cli", name, "--model", "/no/such/folder"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"baton {name}: error: --model")
    assert "/no/such/folder" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["up", "chat", "status", "model"])
def test_help_of_a_command_then_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: baton {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prefill-servers", "-1"], "--prefill-servers -1"),
        (["--decode-servers", "0"], "--decode-servers 0"),
        (["-tp", "0"], "--tensor-parallel-size 0"),
        (["--port", "70000"], "--port 70000"),
        (["--port", "9000", "--grpc-port", "9000"], "--port and --grpc-port"),
        (["--server-flags", "'"], "--server-flags"),
        (["--port", "0", "--grpc-port", "0", "--router-flags=--policy lucky"], "--policy 'lucky'"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_up_when_a_flag_is_wrong_then_one_line_names_it(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up.main(flags) != 0
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("stores", "same"),
    [
        (["127.0.0.1:9000"], ["--cache-store-port", "9000"]),
        (["127.0.0.1:9000", "127.0.0.1:9001"], ["--cache-store-port", "9000"]),
        (["127.0.0.1:9000", "127.0.0.1:9007"], []),  # each rank got a free port; the next one may be another process's
    ],
)
def test_restart_when_a_server_has_ranks_then_it_asks_for_ports_that_can_be_had(
    stores: list[str], same: list[str]
) -> None:
    process = Process("decode", "decode-0", [], None)
    process.ready = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2", "cache_store": stores}
    assert process._same_ports() == ["--port", "1", "--metrics-port", "2", *same]


def test_check_free_when_the_port_is_busy_then_flag_and_port_are_named() -> None:
    with socket.socket() as busy:
        port = free_port()  # nobody else is given it after this
        busy.bind(("127.0.0.1", port))
        busy.listen()
        with pytest.raises(LaunchError, match=f"--port {port}: cannot listen on 127.0.0.1:{port}"):
            check_free("--port", "127.0.0.1", port)
    check_free("--port", "127.0.0.1", port)
    check_free("--port", "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("on_path", "called", "said"),
    [
        ("/usr/bin/baton", "/opt/baton/bin/baton", "baton"),
        (None, ".venv/bin/baton", ".venv/bin/baton"),
        (None, "/opt/my baton/bin/baton", "'/opt/my baton/bin/baton'"),
        (None, "/opt/cli/__main__.py", f"{sys.executable} -m cli"),
    ],
)
def test_up_when_it_names_other_commands_then_as_they_can_be_called_here(
    on_path: str | None, called: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: on_path)
    monkeypatch.setattr(sys, "argv", [called, "up"])
    assert up._command() == said


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "it printed nothing"),
        (['{"level": "info", "message": "a"}', '{"level": "info", "message": "b"}'], "a | b"),
        (['{"level": "error", "message": "rank 1 is gone"}', '{"level": "info", "message": "b"}'], "rank 1 is gone"),
        (
            ['{"level": "error", "message": "a"}', "", "decode_server: error: b", '{"message": "c"}'],
            "decode_server: error: b",
        ),
        # What became of a request is not why the process ended, nor is the text of a failed one.
        (['{"level": "error", "message": "a"}', '{"log": "access", "code": "ENGINE_DEAD", "message": "b"}'], "a"),
    ],
)
def test_last_words_when_a_process_has_ended_then_those_that_say_why(lines: list[str], words: str) -> None:
    process = Process("decode", "decode-0", [], None)
    process._tail.extend(lines)
    assert process.last_words() == words
