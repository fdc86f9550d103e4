"""A follower's end of a hub, as a process: `python -m tests.unit.engine.parallel.rank_peer FD TIMEOUT_S BEHAVIOUR`.

echo: says hello, then answers each frame with the number of rows and bytes that it saw, as figures; leaves after `stop`
and prints what it skipped.
fail: reports a failure when the first step comes.
deaf: answers one frame, and then reads nothing until it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from engine.messages import EngineError, Observation
from engine.parallel.lost import RankLost
from engine.parallel.messages import RankFrame
from engine.parallel.port import Port


def main() -> int:
    descriptor, timeout_s, behaviour = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    port = Port(socket.socket(fileno=descriptor), timeout_s)
    port.send(RankFrame(hello=os.getpid()))
    try:
        while True:
            frame = port.receive()
            assert frame is not None
            if frame.stop:
                print(f"stopped: skipped {frame.skipped} of {frame.skipped_kind}", flush=True)
                return 0
            seen = [Observation("wipes", {}, len(frame.wipes)), Observation("calls", {}, len(frame.calls))]
            if frame.step is not None:
                if behaviour == "fail":
                    error = EngineError(514, "it went wrong here", metadata={"cause": "ValueError"})
                    port.send(RankFrame(failed=error))
                    port.flush(5.0)
                    return 1
                again = frame.step.again
                tokens = sum(len(row.token_ids) for row in frame.step.rows) + (len(again.token_ids) if again else 0)
                seen.append(Observation("tokens", {}, tokens))
            pong = frame.seq if frame.heartbeat else 0
            port.send(RankFrame(observations=seen, pong=pong))
            if behaviour == "deaf":
                signal.pause()
    except RankLost as lost:
        print(f"lost rank {lost.rank}: {lost.metadata['cause']}", flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main())
