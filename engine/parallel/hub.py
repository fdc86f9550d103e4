"""Rank 0's end of the connections to the other ranks: one frame to all of them, their frames back.

Reads never wait. A write waits until the kernel has taken the frame for every follower, since a step's forward pass
needs all of them; the followers that lag are written to side by side, so one of them delays no other, and what they
have to say meanwhile is taken in, so that nobody waits for each other. Every wait has the deadline of
`--tp-broadcast-timeout-seconds`.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.first_cause import PEERS_LOST
from engine.messages import RankFacts
from engine.parallel.agent_messages import AgentCall, error_of
from engine.parallel.frame_socket import HEADER_BYTES, MOST_BYTES, FrameSocket
from engine.parallel.lost import RankLost
from engine.parallel.messages import (
    PROTOCOL_VERSION,
    FollowerFrame,
    FollowerStart,
    LoadedWeights,
    RankFrame,
    StepOrder,
)
from engine.parallel.tier_messages import FetchEnded, TierCall

HEARTBEAT_S = 1.0  # longest silence towards the followers while they have nothing to do, if the deadline allows it
BLAME_S = 0.5  # how long a failed step waits for the rank that is at fault to say so


@dataclass(slots=True)
class _Follower:
    rank: int
    link: FrameSocket
    frames: list[RankFrame] = field(default_factory=list)  # read, and not yet returned by `poll`
    asked_at: float = 0.0  # when the oldest heartbeat was sent that it has not answered; 0: none
    asked: int = 0  # that heartbeat's number
    lost: RankLost | None = None
    reached: str = ""
    hello: bool = False
    ready: RankFacts | None = None


class Hub:
    """All followers of an engine. Belongs to one thread.

    connections: to rank 1, 2, …, in order. Every method but `close` raises RankLost once a follower has failed, is gone
    or has missed a deadline; the first cause stays, and nothing is sent any more.
    """

    def __init__(
        self,
        connections: Sequence[socket.socket],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = 1 + len(connections)
        self.timeout_s = timeout_s
        self.sent_frames = 0
        self.failure: RankLost | None = None
        self._clock = clock
        self._followers = [_Follower(rank, FrameSocket(link)) for rank, link in enumerate(connections, 1)]
        self._by_descriptor = {follower.link.fileno(): follower for follower in self._followers}
        self._readable = select.poll()
        for descriptor in self._by_descriptor:
            self._readable.register(descriptor, select.POLLIN)
        self._heartbeat_s = min(HEARTBEAT_S, timeout_s / 4)
        self._sent_at = clock()
        self._seq = 0
        self._wipes: list[tuple[str, list[int]]] = []
        self._calls: list[AgentCall] = []
        self._tier_calls: list[TierCall] = []
        self._tier_ends: list[tuple[int, FetchEnded]] = []
        self._given: list[int] = []
        self._versions: Sequence[int] = ()
        self._stopped = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankFrame)
        self._buffer = bytearray()

    def filenos(self) -> list[int]:
        """Descriptors that become readable when a follower has something to say."""
        return list(self._by_descriptor)

    # -- start ----------------------------------------------------------------------------------------------

    def begin(self, start: FollowerStart) -> None:
        """Gives every follower what it needs to load."""
        self._send(FollowerFrame(self._next(), start=start))

    def meet(self, place: str, deadline: float, weights: LoadedWeights | None = None) -> None:
        """Waits until every follower has reached `place`, and lets them go on; `weights` is what they are told then.
        deadline: a reading of the clock.

        Ranks load at their own pace, so this wait has the deadline of the start, and what follows it that of serving.
        """
        self._wait_until(lambda follower: follower.reached == place, f"reached {place!r}", deadline)
        for follower in self._followers:
            follower.reached = ""
        self._send(FollowerFrame(self._next(), proceed=True, weights=weights))

    def ready(self, deadline: float) -> list[RankFacts]:
        """What the followers say about themselves, in the order of their ranks, once all can compute."""
        self._wait_until(lambda follower: follower.ready is not None, "become ready", deadline)
        return [follower.ready for follower in self._followers if follower.ready is not None]

    def _wait_until(self, arrived: Callable[[_Follower], bool], what: str, deadline: float) -> None:
        while True:
            self._take()
            late = [follower for follower in self._followers if not arrived(follower)]
            if not late:
                return
            left_s = deadline - self._clock()
            if left_s <= 0:
                rank = late[0].rank
                raise self._lose(RankLost(rank, "silent", f"has not {what} in time"))
            self._readable.poll(max(1, int(left_s * 1000)))

    # -- out ------------------------------------------------------------------------------------------------

    def post(self, call: AgentCall) -> None:
        """Has every follower make the call on its agent: with the next step, or the next `flush`."""
        self._calls.append(call)

    def post_tiers(self, call: TierCall) -> None:
        """Has every follower make the call on its tiers: with the next step, or the next `flush`."""
        self._tier_calls.append(call)

    def watch_given(self, given: list[int], versions: Sequence[int]) -> None:
        """From now on each frame tells the versions of the blocks that are in `given`, and empties it."""
        self._given, self._versions = given, versions

    def wipe(self, group: str, blocks: Sequence[int]) -> None:
        """Has every follower zero the blocks: with the next step, or the next `flush`."""
        if blocks:
            self._wipes.append((group, list(blocks)))

    def step(self, order: StepOrder) -> None:
        """Has every follower compute the step. Returns when all of them have been written to. Raises ValueError for an
        order that is too large; nobody has been told of it then."""
        self._send(FollowerFrame(self._next(), step=order))

    def flush(self) -> None:
        """Sends what was posted, if anything."""
        if self._calls or self._wipes or self._tier_calls:
            self._send(FollowerFrame(self._next()))

    def heartbeat(self) -> None:
        """To be called by a loop that has nothing to compute, at least every `wait_s()`: shows the followers that
        rank 0 lives, and asks each for a sign of life."""
        self._take()
        now = self._clock()
        if now - self._sent_at >= self._heartbeat_s:
            self._beat(now)
        self.poll_silence(now)

    def serve(self) -> None:
        """The start is over, for the followers too: from here on each side misses the other after the deadline of
        serving. To be called before anybody is told that the engine is ready."""
        self._beat(self._clock())

    def _beat(self, now: float) -> None:
        seq = self._next()
        for follower in self._followers:
            if not follower.asked_at:
                follower.asked_at, follower.asked = now, seq
        self._send(FollowerFrame(seq, heartbeat=True))

    def wait_s(self) -> float:
        """How long a loop that has nothing to compute may sleep before the next `heartbeat`."""
        return max(0.0, self._sent_at + self._heartbeat_s - self._clock())

    def stop(self, skipped: int = 0, kind: str = "") -> None:
        """Has every follower leave after this. skipped: requests that the next step would have computed; kind: of that
        step. A second call does nothing, and so does one after a failure."""
        if not self._stopped and self.failure is None:
            self._stopped = True
            self._send(FollowerFrame(self._next(), stop=True, skipped=skipped, skipped_kind=kind))

    def close(self) -> None:
        """Lets go of the connections, which ends the followers. A second call does nothing."""
        for follower in self._followers:
            follower.link.close()

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, frame: FollowerFrame) -> None:
        if self.failure is not None:
            raise self.failure
        if self._stopped and not frame.stop:
            return  # nobody is there any more
        if self._calls:
            frame.calls, self._calls = self._calls, []
        if self._wipes:
            frame.wipes, self._wipes = self._wipes, []
        if self._tier_calls:
            frame.tiers, self._tier_calls = self._tier_calls, []
        if self._given:
            frame.given = [(block, self._versions[block]) for block in self._given]
        buffer = self._buffer
        self._encoder.encode_into(frame, buffer, HEADER_BYTES)
        length = len(buffer) - HEADER_BYTES
        if length > MOST_BYTES:
            # They leave with the next frame.
            self._calls, self._wipes, self._tier_calls = frame.calls, frame.wipes, frame.tiers
            self._buffer = bytearray()
            raise ValueError(f"a frame of {length} bytes; at most {MOST_BYTES} are allowed")
        self._given.clear()
        buffer[:HEADER_BYTES] = length.to_bytes(HEADER_BYTES, "little")
        lagging: list[_Follower] = []
        for follower in self._followers:
            try:
                if not follower.link.send(buffer):
                    lagging.append(follower)
            except OSError as error:
                self._gone(follower, error)
        if lagging:
            self._finish(lagging, length)
            self._buffer = bytearray()  # a large frame's memory is not kept
        self.sent_frames += 1
        self._sent_at = self._clock()

    def _finish(self, lagging: list[_Follower], length: int) -> None:
        """Writes the rest of a frame to those whose sockets were full."""
        poller = select.poll()
        for follower in lagging:
            poller.register(follower.link.fileno(), select.POLLOUT | select.POLLIN)
        deadline = self._clock() + self.timeout_s
        while lagging:
            left_s = deadline - self._clock()
            if left_s <= 0:
                rank = lagging[0].rank
                how = f"has not read a message of {length} bytes within {self.timeout_s:g} s"
                raise self._lose(RankLost(rank, "not_reading", how))
            for descriptor, event in poller.poll(max(1, int(left_s * 1000))):
                follower = self._by_descriptor[descriptor]
                if event & ~select.POLLOUT:
                    self._read(follower)
                    if follower.lost is not None:
                        raise self._lose(follower.lost)
                try:
                    if not follower.link.flush():
                        continue
                except OSError as error:
                    self._gone(follower, error)
                lagging.remove(follower)
                poller.unregister(descriptor)

    # -- in -------------------------------------------------------------------------------------------------

    def poll(self) -> list[tuple[int, RankFrame]]:
        """What the followers' agents have to say, without waiting: frames with events, observations or figures."""
        self._take()
        found = []
        for follower in self._followers:
            if follower.frames:
                frames, follower.frames = follower.frames, []
                found += [(follower.rank, frame) for frame in frames]
        return found

    def take_tier_ends(self) -> list[tuple[int, FetchEnded]]:
        """What the followers' tiers have ended, as far as `poll` or another call has read it."""
        ends, self._tier_ends = self._tier_ends, []
        return ends

    def poll_silence(self, now: float) -> None:
        """Raises RankLost for a follower that has not answered a heartbeat in time."""
        if all(not follower.asked_at or now - follower.asked_at < self.timeout_s for follower in self._followers):
            return
        self._take()  # its answer may be here already
        for follower in self._followers:
            if follower.asked_at and now - follower.asked_at >= self.timeout_s:
                how = f"has not answered for {self.timeout_s:g} s"
                raise self._lose(RankLost(follower.rank, "silent", how))

    def blame(self, wait_s: float = BLAME_S) -> RankLost | None:
        """The follower that made a collective operation fail, if one can be found within `wait_s`: one that said itself
        what is wrong, else one that is gone, else one that says nothing while others say that they lost their peers, or
        that is the only one. One that only lost its peers is not it."""
        deadline = self._clock() + wait_s
        while True:
            for follower in self._followers:
                if follower.lost is None:
                    self._read(follower)
            found = [follower.lost for follower in self._followers if follower.lost is not None]
            own = [lost for lost in found if lost.metadata["cause"] not in ("closed", PEERS_LOST)]
            left_s = deadline - self._clock()
            if own or left_s <= 0 or all(follower.lost is not None for follower in self._followers):
                gone = [lost for lost in found if lost.metadata["cause"] == "closed"]
                quiet = [follower.rank for follower in self._followers if follower.lost is None]
                if not own and not gone and len(quiet) == 1:
                    gone = [RankLost(quiet[0], "silent", "has not taken part in a step in time")]
                return next(iter([*own, *gone]), None)
            waiting = select.poll()
            for follower in self._followers:
                if follower.lost is None:
                    waiting.register(follower.link.fileno(), select.POLLIN)
            waiting.poll(max(1, int(left_s * 1000)))

    def _take(self) -> None:
        """Reads what has come. Raises RankLost."""
        if self.failure is not None:
            raise self.failure
        if self._stopped:
            return  # they leave, one before the other
        for descriptor, _ in self._readable.poll(0):
            follower = self._by_descriptor[descriptor]
            self._read(follower)
            if follower.lost is not None:
                raise self._lose(follower.lost)

    def _read(self, follower: _Follower) -> None:
        """Books the frames of one follower; what ends it goes into `lost`."""
        try:
            for body in follower.link.receive():
                frame = self._decoder.decode(body)
                self._book(follower, frame)
                if follower.lost is not None:
                    return
        except (EOFError, OSError):
            follower.lost = RankLost(follower.rank, "closed", "is gone: it has closed its connection")
        except (ValueError, msgspec.MsgspecError) as error:
            how = "sent a message that cannot be read"
            follower.lost = RankLost(follower.rank, "protocol", how, {"detail": str(error)})

    def _book(self, follower: _Follower, frame: RankFrame) -> None:
        if frame.failed is not None:
            follower.lost = RankLost.of(follower.rank, error_of(frame.failed))
            return
        if frame.hello:
            follower.hello = True
            if frame.protocol_version != PROTOCOL_VERSION:
                follower.lost = RankLost(follower.rank, "protocol", "is of another version; install one version")
        if frame.reached:
            follower.reached = frame.reached
        if frame.ready is not None:
            follower.ready = frame.ready
        self._tier_ends += [(follower.rank, end) for end in frame.tier_ends]
        if frame.pong and frame.pong >= follower.asked:
            follower.asked_at = 0.0
        if frame.events or frame.observations or frame.stats is not None:
            follower.frames.append(frame)

    def _gone(self, follower: _Follower, error: OSError) -> None:
        """A write failed: what the follower said before it left is the better cause. Raises RankLost."""
        self._read(follower)
        if follower.lost is None:
            self._read(follower)
        lost = follower.lost or RankLost(
            follower.rank, "closed", "is gone: it has closed its connection", {"detail": str(error)}
        )
        raise self._lose(lost)

    def _lose(self, lost: RankLost) -> RankLost:
        if self.failure is None:
            self.failure = lost
        return self.failure
