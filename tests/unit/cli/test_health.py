"""`baton health` beside a process: where it asks, what it says, and with which status it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from cli import health
from cli.flags_doc import ROLES
from cli.main import main


class Process(BaseHTTPRequestHandler):
    """Ready or not, as its server says."""

    def do_GET(self) -> None:
        ready = self.server.ready or self.path == "/live"  # type: ignore[attr-defined]
        body = b'{"ready": false, "reasons": ["draining", "the engine is dead"]}'
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *unused: object) -> None:
        pass


@contextmanager
def process(ready: bool) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Process)
    server.ready = ready  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("role", "letter"), [("router", "R"), ("prefill", "P"), ("decode", "D")])
def test_health_when_nothing_is_set_then_it_asks_at_the_defaults_of_the_role(role: str, letter: str) -> None:
    fields = ROLES[letter].model_fields
    name = "port" if role == "router" else "metrics_port"
    assert health.address_of(role, {}) == ("127.0.0.1", fields[name].default)


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"BATON_HOST": "0.0.0.0", "BATON_METRICS_PORT": "9200"}, ("127.0.0.1", 9200)),
        ({"BATON_HOST": "::"}, ("::1", 9102)),
        ({"BATON_HOST": "10.0.0.1"}, ("10.0.0.1", 9102)),
        ({"BATON_HOST": "[fd00::1]"}, ("fd00::1", 9102)),
    ],
)
def test_health_when_the_process_listens_elsewhere_then_it_asks_there(
    environ: dict[str, str], address: tuple[str, int]
) -> None:
    assert health.address_of("decode", environ) == address


def test_health_when_ready_then_status_zero_and_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with process(ready=True) as port:
        monkeypatch.setenv("BATON_METRICS_PORT", str(port))
        assert main(["health", "prefill"]) == 0
        assert main(["health", "--address", f"127.0.0.1:{port}"]) == 0
    assert capsys.readouterr() == ("", "")


def test_health_when_not_ready_then_status_one_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    with process(ready=False) as port:
        assert health.main(["--address", f"127.0.0.1:{port}"]) == 1
        assert capsys.readouterr().err == (
            f"baton health: 127.0.0.1:{port}/ready: status 503 (draining; the engine is dead)\n"
        )
        assert health.main(["--live", "--address", f"127.0.0.1:{port}"]) == 0


def test_health_when_nothing_listens_then_status_one_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with process(ready=True) as port:
        pass
    assert health.main(["--address", f"127.0.0.1:{port}"]) == 1
    error = capsys.readouterr().err
    assert "no answer" in error and error.count("\n") == 1


@pytest.mark.parametrize("port", ["0", "none", "70000", "x"])
def test_health_when_the_port_cannot_be_asked_then_the_variable_is_named(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_METRICS_PORT", port)
    assert health.main(["decode"]) == 1
    assert f"BATON_METRICS_PORT='{port}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [[], ["router", "--address", "a:1"], ["engine"], ["router", "--timeout", "0"], ["--timeout", "x"]]
)
def test_health_when_flags_are_wrong_then_status_two(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        health.main(flags)
    assert ended.value.code == 2


@pytest.mark.parametrize("address", ["localhost", ":80", "a:0", "a:70000", "a:x"])
def test_health_when_the_address_is_none_then_status_one(address: str) -> None:
    assert health.main(["--address", address]) == 1


def test_health_when_run_then_it_imports_the_standard_library_only() -> None:
    """It runs every few seconds in every container."""
    code = (
        "import sys; sys.argv = ['baton', 'health', 'router']; from cli.main import main; main(); print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"httpx", "pydantic", "rpc", "rich", "grpc", "yaml"} & set(ended.stdout.split())
