"""Messages between a server's front process and its engine process.

Encoded as msgpack by msgspec, carried over two ZeroMQ sockets (`ipc://`): front to engine and engine to
front, one message per engine step each way; figures may follow in one of their own. This module imports
neither torch nor grpc, so the front may use it.

Times named `_ns` are readings of `time.monotonic_ns()`; front and engine run on one host, whose
CLOCK_MONOTONIC is common to all processes. Durations are seconds. Token ids and indices count from 0; the
index of a token is its position among the *generated* tokens of the request.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rpc.grammar import GrammarSpec
from rpc.input_embeddings import InputEmbedding

PROTOCOL_VERSION = 1


class RunMode(StrEnum):
    """What one server does for one request."""

    PREFILL = "prefill"  # compute the prompt, sample one token, keep the KV staged for a decode server
    DECODE = "decode"  # reserve, load the prompt's KV from a prefill server, then decode
    LOCAL = "local"  # prefill and decode here (colocated)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next token is chosen: a pure function of (logits, `seed`, token index) and these fields."""

    max_tokens: int  # generated tokens at the most, already emitted ones (output_token_ids) included; >= 1
    seed: int = 0  # unsigned 64 bit; always set by the router, so that retries and fail-overs repeat the draw
    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # 0 means off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # > 0; applies to prompt and generated tokens
    presence_penalty: float = 0.0  # [-2, 2]; applies to generated tokens
    frequency_penalty: float = 0.0  # [-2, 2]; applies to generated tokens
    logit_bias: dict[int, float] = {}  # token id to an addend of its logit, [-100, 100]
    min_tokens: int = 0  # end-of-sequence and stop tokens are masked before this many generated tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1 none; k >= 0: the chosen token's and the k most likely tokens' log-probabilities
    prompt_logprobs: int = -1  # the same for prompt positions 1..n-1


class KvSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a decode server finds the prompt's KV."""

    engine_id: str  # the prefill engine that is expected to hold it; another one is PEER_RESTARTED
    addresses: tuple[str, ...]  # cache-store `host:port` of each prefill rank, in rank order
    tp_size: int


class AddRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    request_key: str  # "{request_id}#{attempt}.{nonce}": the only key from router to cache store
    mode: RunMode
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []  # generated before this attempt (fail-over); sampling goes on after them
    cache_salt: str = ""
    priority: int = 0  # lower first
    arrival_ns: int = 0
    deadline_ns: int = 0  # 0: none; passing it ends the request with 603 GENERATE_TIMEOUT
    kv_source: KvSource | None = None  # set if and only if mode is DECODE
    input_embeddings: list[InputEmbedding] = []  # in place of those of prompt tokens
    # Set when the request is traced: the last output has `stage_times`. Of mode DECODE it is the W3C trace context that
    # goes with the load of the KV, which a prefill server makes a span of.
    traceparent: str = ""
    grammar: GrammarSpec | None = None  # the generated tokens keep to it


class AbortRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    request_key: str
    code: int = 8100  # the cause, a number of the error table
    source: str = "client"  # label of baton_aborts_total: client, deadline, peer, error, drain


class ProfileOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Start, or stop, recording what the engine does."""

    number: int  # the answer has it too
    start: bool


class FrontMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Front to engine: everything that came up since the last one."""

    adds: list[AddRequest] = []
    aborts: list[AbortRequest] = []
    flush_cache: bool = False  # drop unreferenced prefix-cache blocks
    profiles: list[ProfileOrder] = []
    shutdown: bool = False  # end every open request with 8608, then leave the step loop


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int = 0  # 1 = most likely; 0 = not computed


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    index: int
    token_id: int
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    position: int  # position in the prompt, >= 1
    logprob: TokenLogprob  # of the prompt's own token at that position
    top_logprobs: tuple[TokenLogprob, ...] = ()


class EngineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failure with its code; one without a code cannot be built."""

    code: int
    message: str
    stage: str = ""  # stage of the request when it failed
    metadata: dict[str, str] = {}


class PrefillInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server that computed the prompt has to say about it."""

    cached_tokens: int = 0  # prompt tokens found in its prefix cache
    cuda_graph_status: str = "not_requested"
    kv_generation: int = 0  # allocation generation of the staged KV (mode PREFILL)


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True):
    name: str  # e.g. "admitted", "computed", "layer_published:3", "load_started", "first_step"
    at_ns: int


class RequestOutput(msgspec.Struct, omit_defaults=True):
    """News about one request out of one engine step.

    The one with `last` set is the last of its request. It has `error`, or `finish_reason`, never both; only
    in mode PREFILL may it have neither: the request then goes on at the decode server, while its KV stays
    staged here.
    """

    request_key: str
    last: bool = False
    reserved: bool = False  # DECODE: KV blocks for prompt + reserve are held (once, before any token)
    blocks_in_cache: int = 0  # with reserved: prompt blocks found in the prefix cache here, not loaded
    loaded: bool = False  # DECODE: KV is complete and verified (once); prefill and token 0 come with it
    tokens: list[TokenOutput] = []
    prefill: PrefillInfo | None = None  # with the first token
    prompt_logprobs: list[PromptLogprob] | None = None  # with the first token, when asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, when finish_reason is stop
    error: EngineError | None = None
    preemptions: int = 0  # on the last output: times the request lost its blocks and was computed again
    stages: dict[str, float] = {}  # on the last output: seconds per stage of this role
    stage_times: dict[str, tuple[int, int]] = {}  # with it, if traced: first begin and last end of each, in ns
    events: list[TimelineEvent] = []  # on the last output


class LoadTime(msgspec.Struct, frozen=True, array_like=True):
    """A load of staged KV that this engine served, for the trace of its caller."""

    traceparent: str
    begin_ns: int
    end_ns: int


class StagedEnd(msgspec.Struct, frozen=True, omit_defaults=True):
    """End of the life of a PREFILL request's staged KV, after its answer was given."""

    request_key: str
    outcome: str  # released, aborted, expired
    cause: str = ""  # for expired: never_loaded, load_stalled, never_released
    publish_seconds: float = 0.0
    held_seconds: float = 0.0
    events: list[TimelineEvent] = []
    load_times: list[LoadTime] = []  # of the loads that came with a trace context


class Ledger(msgspec.Struct, frozen=True):
    """Block counts of one cache group of one rank: total = free + running + staged + receiving + quarantined
    + cached."""

    group: str
    total: int
    free: int
    running: int
    staged: int
    receiving: int
    quarantined: int
    cached: int
    reserved: int  # outside total: block 0 and graph scratch


class KvEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of the prefix cache: block hashes (32 hex digits each) stored or removed; `cleared` empties
    it."""

    stored: list[str] = []
    removed: list[str] = []
    parent: str = ""  # hash of the block before stored[0]; empty at the start of a prompt
    cleared: bool = False


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """One counter increment (`value` added) or histogram observation for the metric family `name`.

    `labels` hold the family's labels except `role`, which the front adds. Families are those of
    rpc/metrics.py.
    """

    name: str
    labels: dict[str, str]
    value: float


class RankStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of the cache-store agent of one rank."""

    rank: int
    leases: int = 0
    transfers_inflight: int = 0
    transfer_queue_depth: int = 0
    tombstones: int = 0
    peers_connected: int = 0
    peers_incompatible: int = 0
    peers_lost: int = 0
    oldest_hold_seconds: dict[str, float] = {}  # of staged and receiving KV; absent when none is held


class TierFigures(msgspec.Struct, frozen=True):
    """What a tier below the KV pool holds."""

    tier: str
    blocks: int
    stored_bytes: int
    limit_bytes: int


class EngineStats(msgspec.Struct, omit_defaults=True):
    running: int = 0
    waiting: int = 0
    loading: int = 0
    ledgers: list[Ledger] = []
    leases: int = 0
    transfers_inflight: int = 0
    transfer_queue_depth: int = 0
    tombstones: int = 0
    peers_connected: int = 0
    peers_incompatible: int = 0
    peers_lost: int = 0
    oldest_hold_seconds: dict[str, float] = {}  # by state; absent when none is held
    # Of each rank's agent, rank 0's too, when there are several; the counts above are then those of all of them. Every
    # rank has the same blocks, so the ledgers are each rank's.
    ranks: list[RankStats] = []
    tiers: list[TierFigures] = []  # nearest first


class KvGroupInfo(msgspec.Struct, frozen=True):
    """Layout of one cache group: per layer one tensor [num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    tag: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # float32, bfloat16, float16
    total_kv_heads: int = 0  # of the whole model, over all ranks; 0: num_kv_heads are all


class CapturedGraphs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The CUDA graphs of one role that an engine captured at start-up."""

    kind: str  # a GraphRole
    count: int
    capture_seconds: list[float] = []  # of each graph, warm-up and test replay included
    memory_bytes: int = 0  # of the device, for all of them


class RankFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of an engine that can serve."""

    rank: int
    pid: int
    cache_store_address: str  # as in EngineReady
    load_seconds: float
    read_bytes: int = 0  # of the checkpoint's files
    captured: list[CapturedGraphs] = []
    device: str = ""  # that it computes on, as people name it


class EngineReady(msgspec.Struct, omit_defaults=True):
    """The engine can serve."""

    engine_id: str  # 32 hex digits, made at boot
    rank: int
    model_fingerprint: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    groups: list[KvGroupInfo]
    num_blocks: int  # usable blocks per group (the ledger's total)
    cache_store_address: str  # host:port that its agent listens on, as seen on the bind side
    transports: list[str]
    attention_backend: str
    prefill_cuda_graph_init: str
    torch_version: str
    load_seconds: float
    stats: EngineStats  # at the start, so that the ledger is known before the first step
    cuda_version: str = ""
    captured: list[CapturedGraphs] = []
    embedding_size: int = 0  # numbers of an input embedding's row; 0: the model takes none
    grammars: bool = False  # whether it can keep to grammars
    ranks: list[RankFacts] = []  # every one of them, in order

    @property
    def cache_store_addresses(self) -> list[str]:
        """Of all ranks, in order."""
        return [rank.cache_store_address for rank in self.ranks] or [self.cache_store_address]


class EngineFailed(msgspec.Struct):
    """Last message of an engine that could not start or cannot go on."""

    error: EngineError


class StepMessage(msgspec.Struct, omit_defaults=True):
    """Engine to front: the news of one step (or of one second without steps).

    Changes of the prefix cache, observations and stats come with the last step before a pause, and from time to time
    without one.
    """

    seq: int
    outputs: list[RequestOutput] = []
    staged_ends: list[StagedEnd] = []
    kv_events: list[KvEvent] = []
    observations: list[Observation] = []
    stats: EngineStats | None = None


class EngineHello(msgspec.Struct, omit_defaults=True):
    """First message of an engine: both sockets work. It has yet to load its model."""

    pid: int
    protocol_version: int = PROTOCOL_VERSION


class ProfileNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an order about a profile ended. Of a stop: the file, the seconds that were recorded, and whether they ended
    by the limit."""

    number: int
    error: EngineError | None = None
    path: str = ""
    seconds: float = 0.0
    size_bytes: int = 0
    by_limit: bool = False


class EngineEnvelope(msgspec.Struct, omit_defaults=True):
    """What travels on the engine-to-front socket: exactly one field is set."""

    hello: EngineHello | None = None
    ready: EngineReady | None = None
    failed: EngineFailed | None = None
    step: StepMessage | None = None
    profile: ProfileNews | None = None
