"""The front's hold on its engine: starting, up or gone, and the facts and latest counts of a live one."""

from __future__ import annotations

from enum import StrEnum

from engine.client import EngineClient
from engine.messages import EngineReady, EngineStats
from front.validation import ModelFacts
from rpc.errors import BatonError, ErrorCode


class EngineState(StrEnum):
    STARTING = "starting"
    UP = "up"
    DEAD = "dead"


class EngineLink:
    """What the services may ask about the engine. `require` is the only way to a live one."""

    def __init__(self, client: EngineClient, served_names: tuple[str, ...]) -> None:
        self.client = client
        self.served_names = served_names
        self.state = EngineState.STARTING
        self.ready: EngineReady | None = None
        self.facts: ModelFacts | None = None
        self.death: BatonError | None = None

    @property
    def engine_id(self) -> str:
        """Empty until the engine is up."""
        return self.ready.engine_id if self.ready is not None else ""

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    def came_up(self, ready: EngineReady) -> None:
        self.ready = ready
        self.facts = ModelFacts(
            self.served_names, ready.vocab_size, ready.max_model_len, ready.embedding_size, ready.grammars
        )
        self.state = EngineState.UP

    def died(self, error: BatonError) -> None:
        """The engine is gone; `error` (ENGINE_DEAD) is the answer to everything from now on. The first
        cause stays.
        """
        if self.death is None:
            self.death = error
        self.state = EngineState.DEAD

    def require(self) -> tuple[EngineReady, ModelFacts]:
        """Facts of the live engine. Raises ENGINE_DEAD while it loads and after its death."""
        if self.state is EngineState.UP and self.ready is not None and self.facts is not None:
            return self.ready, self.facts
        raise self.refusal()

    def refusal(self) -> BatonError:
        """A fresh error per caller: errors collect context on their way."""
        if self.state is EngineState.DEAD and self.death is not None:
            return BatonError(ErrorCode.ENGINE_DEAD, self.death.message, metadata=self.death.metadata)
        return BatonError(ErrorCode.ENGINE_DEAD, "the engine is still loading the model; try again in a moment")
