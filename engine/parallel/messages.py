"""Messages between the ranks of one engine: frames from rank 0 to all others, and from each of them to rank 0.

Encoded as msgpack by msgspec, carried over one Unix-domain socket per follower. Every follower gets the same frames in
the same order, and does what a frame says in the order of its fields.
"""

from __future__ import annotations

import msgspec

from engine.messages import EngineError, Observation, RankFacts, RankStats
from engine.parallel.agent_messages import AgentCall, RankEvent, Share
from engine.parallel.tier_messages import FetchEnded, TierCall

PROTOCOL_VERSION = 3


class EmbeddingsOrder(msgspec.Struct, frozen=True, array_like=True):
    """Rows that take the places of a row's tokens from `place` on."""

    place: int
    rows: int
    values: bytes = b""  # float32, row by row; empty where the values come in the step's packed broadcast


class RowExtra(msgspec.Struct, frozen=True, array_like=True):
    """What few rows have."""

    prompt_logprobs_from: int = -1
    prompt_next_ids: list[int] = []
    num_prompt_logprobs: int = 0
    embeddings: list[EmbeddingsOrder] = []
    multimodal: bool = False
    position_ids: list[int] = []


class RowOrder(msgspec.Struct, frozen=True, array_like=True):
    """One row of a step: what a forward pass needs to know of it, and nothing about sampling.

    A row that was in the step before says where, and then `blocks` are those that its table has gained at its end since
    then. That keeps a long context out of every message: a table of 4096 tokens is 256 numbers on the CPU.
    """

    token_ids: list[int]
    start: int
    previous: int  # place of the request in the step before; -1: it was not there, and key and table are whole
    blocks: list[int]
    sample: bool
    request_key: str = ""
    extra: RowExtra | None = None


class RowsAgain(msgspec.Struct, frozen=True, array_like=True):
    """The rows of the step before in the same order, each of which computes and samples one token."""

    token_ids: list[int]
    starts: list[int]
    added: list[tuple[int, list[int]]]  # place of a row, blocks that its table has gained


class StepOrder(msgspec.Struct, omit_defaults=True):
    """A step, which every rank computes. Its number and order of collectives depend on nothing but this."""

    rows: list[RowOrder]  # empty with `again`
    kind: str  # decode, prefill or mixed
    shares: dict[str, list[Share]] = {}  # by group, what each rank publishes of its own KV, layer by layer
    again: RowsAgain | None = None


class FollowerStart(msgspec.Struct):
    """What a follower needs of rank 0 before it loads."""

    engine_id: str
    protocol_version: int = PROTOCOL_VERSION


class LoadedWeights(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has found out about the weights, for all."""

    model_fingerprint: str
    files: str  # the files and their state; a rank that read others has another model


class FollowerFrame(msgspec.Struct, omit_defaults=True):
    """Rank 0 to every other rank."""

    seq: int
    start: FollowerStart | None = None
    proceed: bool = False  # all ranks have come as far as the follower's `reached`
    weights: LoadedWeights | None = None  # with `proceed`, where they are loaded
    given: list[tuple[int, int]] = []  # with tiers: blocks that were given out since the last frame, their versions
    wipes: list[tuple[str, list[int]]] = []  # group, blocks to be zeroed
    calls: list[AgentCall] = []
    tiers: list[TierCall] = []
    step: StepOrder | None = None
    heartbeat: bool = False  # asks for a `pong` of this number
    stop: bool = False  # nothing comes after this frame, which has no step
    skipped: int = 0  # with `stop`: requests that would have been computed next
    skipped_kind: str = ""  # … and the kind of that step


class RankFrame(msgspec.Struct, omit_defaults=True):
    """A follower to rank 0."""

    hello: int = 0  # the follower's process id, in its first frame
    protocol_version: int = PROTOCOL_VERSION
    reached: str = ""  # it waits here for the others
    ready: RankFacts | None = None  # it can compute
    events: list[RankEvent] = []
    observations: list[Observation] = []
    stats: RankStats | None = None
    tier_ends: list[FetchEnded] = []
    pong: int = 0  # the heartbeat that it answers
    failed: EngineError | None = None  # it cannot go on, and leaves
