"""Whether an engine captures prefill graphs, decided once at start-up from facts. Pure.

Whatever the answer, the engine serves: without graphs it computes prompts eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from engine.attention.backend import AttentionBackend, GraphSelectionMode
from rpc.graph_status import PrefillGraphStatus

Chosen = TypeVar("Chosen", bound=AttentionBackend)


class PrefillGraphUnsupported(Exception):
    """No attention backend here can be captured in a prefill graph. Raised before a capture starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many ranks share the model, by kind of sharing."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1
    world: int = 1
    layer_micro_batches: bool = False  # a step's batch is cut in two whose layers alternate

    @property
    def single(self) -> bool:
        sizes = (self.tensor, self.data, self.pipeline, self.expert, self.world)
        return all(size == 1 for size in sizes) and not self.layer_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFacts:
    """What matters of a mixture of experts. Every field must be as a captured forward needs it."""

    num_experts: int
    top_k: int
    redundant_experts: int = 0
    all_to_all: str = ""  # library that exchanges tokens between ranks; empty: none
    forced_experts: bool = False  # a benchmark's override of the routing
    executor: str = ""

    def refusal(self) -> str:
        """The first condition that does not hold; empty when all do."""
        if not 0 < self.top_k <= self.num_experts:
            return f"top-k {self.top_k} of {self.num_experts} experts"
        if self.redundant_experts:
            return f"{self.redundant_experts} redundant experts"
        if self.all_to_all:
            return f"tokens are exchanged by {self.all_to_all}"
        if self.forced_experts:
            return "the routing is overridden for a benchmark"
        if self.executor not in STATIC_MOE_EXECUTORS:
            return f"executor {self.executor!r} has no static shapes"
        return ""


STATIC_MOE_EXECUTORS = frozenset({"masked_grouped_gemm"})
"""Executors whose launches do not depend on how many tokens each expert gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What matters of a model's forward."""

    latent_attention: bool = False  # MLA
    sparse_attention: bool = False
    static_shapes: bool = True
    moe: MoeFacts | None = None

    def refusal(self) -> str:
        """Why its forward cannot be captured, the experts left aside; empty when it can."""
        if self.latent_attention:
            return "latent attention"
        if self.sparse_attention:
            return "sparse attention"
        return "" if self.static_shapes else "a forward whose shapes depend on its input"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFacts:
    """What the gate asks, in the order in which it asks."""

    requested: bool  # --enable-prefill-cuda-graph
    prefills: bool  # this server computes prompts
    cuda_graphs: bool  # --enable-cuda-graph, which is off on a CPU unless it is asked for
    graphs_allowed: bool = True  # False for runners whose owner captures none, such as those of draft models
    topology: Topology = field(default_factory=Topology)
    model: ModelFacts = field(default_factory=ModelFacts)
    has_kv: bool = True  # there is a pool; the run that measures memory has none
    choose_backend: Callable[[], object]  # raises PrefillGraphUnsupported


@dataclass(frozen=True, slots=True)
class GateAnswer:
    """`status` CAPTURED: graphs may be captured now. Otherwise it is the engine's status, and `detail` says more."""

    status: PrefillGraphStatus
    detail: str = ""

    @property
    def open(self) -> bool:
        return self.status is PrefillGraphStatus.CAPTURED


def effective(facts: GateFacts) -> GateAnswer:
    """The first part of the gate: whether the feature is wanted and allowed at all. Its settings are checked then."""
    if not facts.requested or not facts.prefills:
        return GateAnswer(PrefillGraphStatus.NOT_REQUESTED)
    if not facts.cuda_graphs:
        return GateAnswer(PrefillGraphStatus.FEATURE_DISABLED, "it needs --enable-cuda-graph")
    if not facts.graphs_allowed:
        return GateAnswer(PrefillGraphStatus.FEATURE_DISABLED, "this runner's owner allows no graphs")
    return GateAnswer(PrefillGraphStatus.CAPTURED)


def ask(facts: GateFacts) -> GateAnswer:
    """The engine's answer; the first test that fails decides."""
    first = effective(facts)
    if not first.open:
        return first
    if not facts.topology.single:
        return GateAnswer(PrefillGraphStatus.UNSUPPORTED_TOPOLOGY, str(facts.topology))
    refusal = facts.model.refusal()
    if refusal:
        return GateAnswer(PrefillGraphStatus.UNSUPPORTED_MODEL, refusal)
    if not facts.has_kv:
        return GateAnswer(PrefillGraphStatus.CAPTURE_UNAVAILABLE, "there is no KV layout")
    refusal = facts.model.moe.refusal() if facts.model.moe is not None else ""
    if refusal:
        return GateAnswer(PrefillGraphStatus.UNSUPPORTED_MOE_CONFIG, refusal)
    try:
        facts.choose_backend()
    except PrefillGraphUnsupported as error:
        return GateAnswer(PrefillGraphStatus.UNSUPPORTED_BACKEND, str(error))
    return GateAnswer(PrefillGraphStatus.CAPTURED)


def capable_backend(candidates: Iterable[Chosen], *, selection_mode: GraphSelectionMode) -> Chosen:
    """The first of `candidates`, best first, that admits graphs of that kind. Raises PrefillGraphUnsupported."""
    asked = []
    for candidate in candidates:
        if candidate.admits(selection_mode=selection_mode):
            return candidate
        asked.append(candidate.name)
    raise PrefillGraphUnsupported(
        f"no attention backend can be captured in a {selection_mode.value}; asked: {', '.join(asked) or 'none'}"
    )
