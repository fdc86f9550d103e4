"""`baton`: one command line for the whole system.

Each sub-command lives in a module of its own and gets the remaining arguments; nothing is imported before it is
needed, so that `baton --help` and the servers start fast.
"""

from __future__ import annotations

import importlib
import sys

# name: (module with a `main`, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("cli.up", "start a router with prefill and decode servers on this machine"),
    "router": ("router.__main__", "start a router"),
    "prefill": ("prefill_server.__main__", "start a prefill server"),
    "decode": ("decode_server.__main__", "start a decode server"),
    "chat": ("cli.chat", "chat with a running router in the terminal"),
    "status": ("cli.status", "show servers, load and KV ledger of a running router"),
    "health": ("cli.health", "ask one process whether it is ready, for health checks of containers"),
    "bench": ("cli.bench", "load generator: baton bench serve"),
    "chaos": ("cli.chaos", "put a cluster of this machine under random faults and check every answer"),
    "model": ("cli.model_prepare", "prepare a model folder: baton model prepare"),
}
# Their `main` is that of `python -m`: it reads sys.argv and ends the process itself.
SERVERS = ("router", "prefill", "decode")


def usage() -> str:
    lines = ["usage: baton COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:<9}{what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "`baton COMMAND --help` shows the flags of a command, `baton --version` the version."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        from rpc.version import version

        print(f"baton {version()}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"baton: unknown command {name!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    run = importlib.import_module(COMMANDS[name][0]).main
    if name in SERVERS:
        sys.argv = [sys.argv[0], *rest]
        return int(run(prog=f"baton {name}") or 0)
    try:
        return int(run(rest) or 0)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
