"""Processes that serve by gRPC start other programs, and gRPC's threads stay out of the children."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.cluster import ROOT

# A server and a connection, then a child as it is before it becomes another program: with one thread, its own.
PROGRAM = """
import asyncio, importlib, os, sys, time
importlib.import_module(sys.argv[1])
import grpc.aio
async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        child = os.fork()
        if not child:
            os._exit(len(os.listdir("/proc/self/task")))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    await server.stop(None)
asyncio.run(main())
"""


@pytest.mark.parametrize("module", ["router.__main__", "prefill_server.__main__", "decode_server.__main__"])
def test_child_when_a_server_that_speaks_grpc_forks_then_no_thread_of_grpc_starts_in_it(module: str) -> None:
    # What this process has set for itself is not handed on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr
