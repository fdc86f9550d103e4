"""`baton bench`: load generation against a running router."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] != "serve":
        print("usage: baton bench serve [flags]; `baton bench serve --help` lists them", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    from bench.serve import main as serve

    return serve(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
