"""Run by test_nixl.py: a NIXL agent in a thread, as it is for memory of a device, here for host memory.

It is a process of its own because the library cannot be got rid of again: at a regular exit of the interpreter one of
its parts (tried: 1.5) crashes. An engine's process ends like this one, by `os._exit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from dataclasses import replace

import numpy as np

from cache_store.geometry.rows import Rows
from cache_store.memory.regions import file_regions
from cache_store.memory.shared_memory import MemoryFile
from cache_store.memory.staging import MemoryUnavailable
from cache_store.nixl.link import Body, NixlLink, ReadFailed, _Thread
from tests.standstill import stand_still

WAIT_S = 40.0


class ThreadLink(NixlLink):
    def _make_body(self, theirs: socket.socket) -> Body:
        return _Thread(theirs, self._regions.attach)


def memory(seed: int) -> tuple[dict[tuple[str, int], MemoryFile], np.ndarray]:
    file = MemoryFile(64 * 4096)
    rows = np.frombuffer(file.view, np.uint8).reshape(64, 4096)
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, np.uint8)
    return {("full", 0): file}, rows


async def run() -> None:
    theirs, source = memory(1)
    own, target = memory(2)
    attached: list[str] = []
    regions = replace(file_regions(own), attach=lambda: attached.append(threading.current_thread().name))
    prefill, decode = NixlLink("theirs", file_regions(theirs)), ThreadLink("own", regions)
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(prefill.running(), decode.running())
            assert attached == ["kv-nixl"], attached
            peer = await decode.open(prefill.describe())
            await decode.read(peer, range(1), Rows("full", 0, 4096, [3, 4, 9]), Rows("full", 0, 4096, [7, 8, 1]))
            assert np.array_equal(target[[7, 8, 1]], source[[3, 4, 9]])

            pid = prefill.session.body.pid  # type: ignore[union-attr]
            stand_still(pid)
            session = decode.session
            hanging = decode.read(peer, range(1), Rows("full", 0, 4096, [3, 4]), Rows("full", 0, 4096, [20, 21]))
            decode.restart("of a test")
            try:
                await hanging
                raise AssertionError("a read of a peer that stands still has ended well")
            except ReadFailed:
                pass
            assert session is not None and session.over.done()
            then = target.copy()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            # The peer's process may end over this; it comes back either way.
            again = None
            while again is None:
                try:
                    await prefill.running()
                    again = await decode.open(prefill.describe())
                    await decode.read(again, range(1), Rows("full", 0, 4096, [5]), Rows("full", 0, 4096, [6]))
                except (MemoryUnavailable, ReadFailed):
                    again = None
                    await asyncio.sleep(0.05)
            assert np.array_equal(target[6], source[5])
            assert np.array_equal(target[[20, 21]], then[[20, 21]]), "written after its end"
    finally:
        await asyncio.gather(prefill.close(), decode.close())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    handlers = list(logging.getLogger().handlers)
    asyncio.run(run())
    assert logging.getLogger().handlers == handlers and logging.raiseExceptions
    assert not logging.getLogger("nixl").handlers
    print("well", flush=True)
    os._exit(0)
