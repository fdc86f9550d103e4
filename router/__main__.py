"""`python -m router --model FOLDER --prefill HOST:PORT --decode HOST:PORT …`"""

from __future__ import annotations

from router.server import serve
from router.settings import RouterSettings
from rpc.lifecycle import run


def main(prog: str = "router") -> None:
    settings = RouterSettings.load(
        prog=prog, description="OpenAI-compatible HTTP API and gRPC API in front of prefill and decode servers."
    )
    run(lambda: serve(settings))


if __name__ == "__main__":
    main()
