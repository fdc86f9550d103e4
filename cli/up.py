"""`baton up`: router, prefill servers and decode servers on this machine, from one command."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading

from cli.launch import Launcher, LaunchError


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton up", description=__doc__)
    p.add_argument("--model", default="", help="model folder (default: the embedded SmolLM2-135M-Instruct)")
    p.add_argument("--prefill-servers", type=int, default=1, metavar="N", help="default 1; 0 is colocated serving")
    p.add_argument("--decode-servers", type=int, default=1, metavar="M", help="default 1")
    p.add_argument("--host", default="127.0.0.1", help="address that the router listens on (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="HTTP port of the router (default 8000)")
    p.add_argument("--grpc-port", type=int, default=8001, help="gRPC port of the router (default 8001)")
    p.add_argument("--server-flags", default="", help="flags for every server, one quoted string")
    p.add_argument("--prefill-flags", default="", help="flags for the prefill servers")
    p.add_argument("--decode-flags", default="", help="flags for the decode servers")
    p.add_argument("--router-flags", default="", help="flags for the router")
    p.add_argument("--verbose", action="store_true", help="print the servers' logs")
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    for name in ("prefill_servers", "decode_servers"):
        if getattr(arguments, name) < 0:
            print(f"baton up: --{name.replace('_', '-')} must be 0 or more", file=sys.stderr)
            return 2
    if arguments.decode_servers < 1:
        print("baton up: --decode-servers must be at least 1: without one nothing can answer", file=sys.stderr)
        return 2
    from cli.model_prepare import ModelPrepareError, prepare_model

    try:
        model = prepare_model(arguments.model or None, None, progress=sys.stderr.isatty())
    except ModelPrepareError as error:
        print(f"baton up: {error}", file=sys.stderr)
        return 1
    launcher = Launcher(
        model=str(model),
        prefill_servers=arguments.prefill_servers,
        decode_servers=arguments.decode_servers,
        host=arguments.host,
        port=arguments.port,
        grpc_port=arguments.grpc_port,
        server_flags=shlex.split(arguments.server_flags),
        prefill_flags=shlex.split(arguments.prefill_flags),
        decode_flags=shlex.split(arguments.decode_flags),
        router_flags=shlex.split(arguments.router_flags),
        log=(lambda line: print(line, file=sys.stderr)) if arguments.verbose else None,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(f"starting {arguments.prefill_servers} prefill + {arguments.decode_servers} decode servers, model {model}")
    try:
        launcher.start()
    except LaunchError as error:
        print(f"baton up: {error}", file=sys.stderr)
        return 1
    url = f"http://{launcher.router.ready['http']}"
    print(
        f"\nBaton serves at {url}/v1\n"
        f"  try:    .venv/bin/baton chat --base-url {url}\n"
        f"  status: .venv/bin/baton status --base-url {url}\n"
        "  stop:   Ctrl-C",
        flush=True,
    )
    status = launcher.supervise(stop)
    print("stopping", flush=True)
    launcher.stop()
    return status


if __name__ == "__main__":
    sys.exit(main())
