"""`baton up`: router, prefill servers and decode servers on this machine, from one command."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cli.launch import Launcher, LaunchError, LaunchStopped, LaunchTimeout

START_TIMEOUT_S = 600.0  # a process that ends while it starts is noticed at once; this is for one that hangs


class StopSignals:
    """SIGTERM and SIGINT as events: the first asks for an orderly stop, the second for a fast one.

    SIGHUP calls `on_hangup`; from a terminal, which sends it when it is closed, it asks for a stop too, unless it was
    ignored before.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.hurry = threading.Event()
        self.number = 0

    def install(self, on_hangup: Callable[[], None] | None = None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        ends = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL  # under nohup it is ignored, and must end nothing
        if ends and sys.stdin is not None and sys.stdin.isatty():
            signal.signal(signal.SIGHUP, self._on_signal)
        elif on_hangup is not None:
            signal.signal(signal.SIGHUP, lambda number, frame: on_hangup())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.number = self.number or number
        self.stop.set()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton up", description=__doc__)
    p.add_argument("--model", default="", help="model folder (default: the embedded SmolLM2-135M-Instruct)")
    p.add_argument("--prefill-servers", type=int, default=1, metavar="N", help="default 1; 0 is colocated serving")
    p.add_argument("--decode-servers", type=int, default=1, metavar="M", help="default 1")
    p.add_argument(
        *("-tp", "--tensor-parallel-size", "--tp-size"),
        type=int,
        default=1,
        metavar="N",
        dest="tensor_parallel_size",
        help="engine processes (ranks) that share the model, in each server (default 1)",
    )
    p.add_argument("--host", default="127.0.0.1", help="address that the router listens on (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="HTTP port of the router (default 8000; 0: a free one)")
    p.add_argument("--grpc-port", type=int, default=8001, help="gRPC port of the router (default 8001; 0: a free one)")
    p.add_argument("--server-flags", default="", metavar="FLAGS", help="for every server: --server-flags='--threads 2'")
    p.add_argument("--prefill-flags", default="", metavar="FLAGS", help="for the prefill servers")
    p.add_argument("--decode-flags", default="", metavar="FLAGS", help="for the decode servers")
    p.add_argument("--router-flags", default="", metavar="FLAGS", help="for the router")
    p.add_argument(
        "--prometheus-targets",
        default="",
        metavar="FILE",
        help="write the addresses of all /metrics there, as Prometheus reads them (file_sd)",
    )
    p.add_argument(
        "--access-log-dir",
        default="",
        metavar="DIR",
        help="access logs of all processes: DIR/router.log, DIR/prefill-0.log, ...; opened anew on SIGHUP",
    )
    p.add_argument(
        "--kv-disk-path",
        default="",
        metavar="DIR",
        help="keep prefix blocks on disk, across restarts: DIR/prefill-0, DIR/decode-0, ...; --server-flags takes "
        "--kv-disk-bytes of each, --kv-host-bytes and --kv-tier",
    )
    p.add_argument(
        "--start-timeout",
        type=float,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help=f"give a process up that has not loaded its model within so many (default {START_TIMEOUT_S:g})",
    )
    p.add_argument("--verbose", action="store_true", help="print the logs of all processes")
    return p


def _mistake(arguments: argparse.Namespace) -> str:
    """What is wrong with the flags; empty when nothing is."""
    if arguments.prefill_servers < 0:
        return f"--prefill-servers {arguments.prefill_servers} must be 0 or more"
    if arguments.decode_servers < 1:
        return f"--decode-servers {arguments.decode_servers} must be 1 or more: without one nothing can answer"
    if arguments.tensor_parallel_size < 1:
        return f"--tensor-parallel-size {arguments.tensor_parallel_size} must be 1 or more"
    for name in ("port", "grpc_port"):
        if not 0 <= getattr(arguments, name) <= 65535:
            return f"--{name.replace('_', '-')} {getattr(arguments, name)} must be from 0 to 65535"
    if arguments.port and arguments.port == arguments.grpc_port:
        return f"--port and --grpc-port are both {arguments.port}; choose two"
    if not arguments.start_timeout > 0:
        return f"--start-timeout {arguments.start_timeout:g} must be above 0"
    for name in ("server_flags", "prefill_flags", "decode_flags", "router_flags"):
        try:
            shlex.split(getattr(arguments, name))
        except ValueError as error:
            return f"--{name.replace('_', '-')} {getattr(arguments, name)!r}: {error}"
    folder = Path(arguments.prometheus_targets).parent
    if arguments.prometheus_targets and not folder.is_dir():
        return f"--prometheus-targets {arguments.prometheus_targets}: there is no folder {folder}; make it first"
    if arguments.access_log_dir and not Path(arguments.access_log_dir).is_dir():
        return f"--access-log-dir {arguments.access_log_dir}: there is no such folder; make it first"
    return ""


def _command() -> str:
    """How `baton` is called here: it may have been started by its path, from a folder that is not on the PATH."""
    if shutil.which("baton"):
        return "baton"
    return shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "baton" else f"{shlex.quote(sys.executable)} -m cli"


def _rank_flags(size: int) -> list[str]:
    """Of every server; flags that are given for servers come after these, and win."""
    return ["--tensor-parallel-size", str(size)] if size > 1 else []


@contextlib.contextmanager
def _targets_file(file: str, launcher: Launcher) -> Iterator[None]:
    """The addresses in a file for as long as the body runs; none without a name. A restart keeps the ports."""
    if not file:
        yield
        return
    path = Path(file)
    # Prometheus may read at any moment, so the file is whole from the start.
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps([{"targets": [process.ready["http"] for process in launcher.processes]}]) + "\n")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        print(
            f"baton up: unknown {shlex.join(unknown)}; flags of the processes go into --server-flags='…' (all "
            "servers), --prefill-flags, --decode-flags and --router-flags; BATON_… variables are passed on to all",
            file=sys.stderr,
        )
        return 2
    mistake = _mistake(arguments)
    if mistake:
        print(f"baton up: {mistake}", file=sys.stderr)
        return 2
    from cli.model_prepare import ModelPrepareError, prepare_model

    try:
        model = prepare_model(arguments.model or None, None, progress=sys.stderr.isatty())
    except ModelPrepareError as error:
        print(f"baton up: {'--model: ' if arguments.model else ''}{error}", file=sys.stderr)
        return 1
    launcher = Launcher(
        model=str(model),
        prefill_servers=arguments.prefill_servers,
        decode_servers=arguments.decode_servers,
        host=arguments.host,
        port=arguments.port,
        grpc_port=arguments.grpc_port,
        server_flags=[*_rank_flags(arguments.tensor_parallel_size), *shlex.split(arguments.server_flags)],
        prefill_flags=shlex.split(arguments.prefill_flags),
        decode_flags=shlex.split(arguments.decode_flags),
        router_flags=shlex.split(arguments.router_flags),
        access_log_dir=arguments.access_log_dir,
        kv_disk_path=arguments.kv_disk_path,
        start_timeout_s=arguments.start_timeout,
        log=(lambda line: print(line, file=sys.stderr)) if arguments.verbose else None,
        say=lambda line: print(line, flush=True),
    )
    signals = StopSignals()
    # Only now: until here there is nothing to stop, and the default handling is quicker.
    signals.install(launcher.reopen_logs)
    launcher.say(
        f"starting {arguments.prefill_servers} prefill + {arguments.decode_servers} decode servers, model {model}"
    )
    try:
        launcher.start(signals.stop)
    except LaunchStopped:
        launcher.say("stopped before everything was up")
        return 128 + signals.number
    except LaunchTimeout as error:
        print(f"baton up: {error}; --start-timeout allows more", file=sys.stderr)
        return 1
    except LaunchError as error:
        print(f"baton up: {error}", file=sys.stderr)
        return 1
    address = launcher.router.ready["http"]
    baton = _command()
    launcher.say(
        f"\nBaton serves at http://{address}/v1\n"
        f"  try:    {baton} chat --base-url http://{address}\n"
        f"  status: {baton} status --base-url http://{address}\n"
        "  stop:   Ctrl-C"
    )
    try:
        with _targets_file(arguments.prometheus_targets, launcher):
            status = launcher.supervise(signals.stop)
    except OSError as error:
        print(f"baton up: --prometheus-targets {arguments.prometheus_targets}: {error.strerror}", file=sys.stderr)
        status = 1
    launcher.say("stopping (a second Ctrl-C ends open requests at once)")
    launcher.stop(hurry=signals.hurry)
    return status


if __name__ == "__main__":
    sys.exit(main())
