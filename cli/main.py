"""`baton`: one command line for the whole system.

Each sub-command lives in a module of its own and gets the remaining arguments; nothing is imported before it is
needed, so that `baton --help` and the servers start fast.
"""

from __future__ import annotations

import importlib
import sys

# name: (module, function, what it does)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "up": ("cli.up", "main", "start a router with prefill and decode servers on this machine"),
    "router": ("router.__main__", "main", "start a router"),
    "prefill": ("prefill_server.__main__", "main", "start a prefill server"),
    "decode": ("decode_server.__main__", "main", "start a decode server"),
    "chat": ("cli.chat", "main", "chat with a running router in the terminal"),
    "status": ("cli.status", "main", "show servers, load and KV ledger of a running router"),
    "bench": ("cli.bench", "main", "load generator: baton bench serve"),
    "model": ("cli.model_prepare", "main", "prepare a model folder: baton model prepare"),
}


def usage() -> str:
    lines = ["usage: baton COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:<9}{what}" for name, (_, _, what) in COMMANDS.items()]
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
    module, function, _ = COMMANDS[name]
    result = getattr(importlib.import_module(module), function)(rest)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
