"""What travels between the router's parts: a request going in, tokens coming out.

The HTTP and gRPC surfaces build a `RouterRequest` per choice, the orchestrator turns it into `TokensEvent`s
and one `FinishEvent`. Frozen records; token ids and indices count from 0; times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from rpc.deadline import Deadline
from rpc.grammar import GrammarSpec
from rpc.input_embeddings import InputEmbedding

if TYPE_CHECKING:
    from router.open_requests import OpenRequest

Api = Literal["chat", "completions", "grpc"]
Path = Literal["pd", "colocated"]
FinishReason = Literal["stop", "length", "abort"]
SingleServer = Literal["beam_or_n", "requested"]

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Ranges are those of `SamplingParams` in protos/common.proto, checked by the
    surface.

    `max_tokens` is always set (>= 1). `seed` None: the router draws one. `logprobs` and `prompt_logprobs`:
    None is none, k >= 0 is the token's own and the k most likely ones.
    """

    max_tokens: int
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RouterRequest:
    """One sequence to generate. A client request with several choices or prompts makes one of these for each.

    All of them share `owner`, the client request that they belong to (see router/open_requests.py): it is
    what is open, aborted, drained and accounted. Without an owner the orchestrator opens one for this request
    alone. `single_server` asks that one server does the whole request and says why. Pins are `host:port`.
    """

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: Sampling
    api: Api = "completions"
    stream: bool = False
    cache_salt: str = ""
    priority: int = 0
    input_embeddings: tuple[InputEmbedding, ...] = ()  # in place of those of prompt tokens
    grammar: GrammarSpec | None = None  # what is generated keeps to it; it has been found to compile
    session_id: str = ""
    pin_prefill: str = ""
    pin_decode: str = ""
    arrival: float = field(default_factory=time.monotonic)
    deadline: Deadline = field(default_factory=Deadline.never)
    single_server: SingleServer | None = None
    owner: OpenRequest | None = None
    # W3C trace context, handed to the servers as it came.
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability; rank 1 is the most likely token, 0 not computed."""

    token_id: int
    logprob: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `logprob` and `top_logprobs` (most likely first) are there when asked for."""

    index: int
    token_id: int
    logprob: Logprob | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Of the prompt's own token at `position` (>= 1: the first one has no predecessor)."""

    position: int
    logprob: Logprob
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillSummary:
    """What is known once the prompt is computed. Comes with the first token, once per request."""

    cached_tokens: int  # 0 <= cached <= prompt, of the server that computed the prompt
    prefill_cuda_graph_status: str
    path: Path
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """The next tokens, at least one, in index order; every index comes exactly once."""

    tokens: list[Token]
    prefill: PrefillSummary | None = None


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request that did not fail.

    `stop_token_id` is the token that ended it, with reason stop; it is also the last token. `timeline` has
    seconds by "role.stage": router.choose, prefill.compute, decode.load, … `path` is None when it was aborted
    before a server was chosen.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    timeline: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 1
    preemptions: int = 0
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The one model that the router serves, as its servers describe it, else as the router was told.

    `max_model_len` and `vocab_size` are 0 while no server is known and the folder does not say.
    """

    served_names: tuple[str, ...]
    root: str
    max_model_len: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()


class Serving(Protocol):
    """The orchestrator as the surfaces see it."""

    def generate(self, request: RouterRequest) -> AsyncGenerator[TokensEvent | FinishEvent, None]:
        """Serves `request`: TokensEvents, then one FinishEvent. Raises BatonError, also after some tokens.

        Closing it early (`aclose()`, or cancelling the task that reads it) ends every leg at once. It does
        not end by itself on a stop string: the surface closes it then.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Ends the open request with finish reason abort and what it has. Unknown: leaves a tombstone,
        False."""
        ...

    def model(self) -> ModelFacts: ...

    def ready(self) -> tuple[bool, Sequence[str]]:
        """Whether a request can be served now, and if not, why."""
        ...
