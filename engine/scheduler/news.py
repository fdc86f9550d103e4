"""What a step has to tell the front: gathered while it runs. What somebody waits for goes first, the figures later."""

from __future__ import annotations

from engine.messages import EngineError, Observation, RequestOutput, StagedEnd
from rpc.errors import BatonError


def engine_error(error: BatonError) -> EngineError:
    return EngineError(int(error.code), error.message, error.stage, dict(error.metadata))


class News:
    """Outputs by request in the order of their first news, ends of staged KV, counters (summed) and samples."""

    def __init__(self) -> None:
        self._outputs: dict[str, RequestOutput] = {}
        self._staged_ends: list[StagedEnd] = []
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._samples: list[Observation] = []

    def output(self, request_key: str) -> RequestOutput:
        """The output of this step for the request, made on first use."""
        output = self._outputs.get(request_key)
        if output is None:
            output = self._outputs[request_key] = RequestOutput(request_key)
        return output

    def staged_end(self, end: StagedEnd) -> None:
        self._staged_ends.append(end)

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        self._counts[key] = self._counts.get(key, 0) + value

    def sample(self, name: str, value: float, **labels: str) -> None:
        self._samples.append(Observation(name, labels, value))

    def __bool__(self) -> bool:
        return bool(self._outputs or self._staged_ends)

    def take_outputs(self) -> tuple[list[RequestOutput], list[StagedEnd]]:
        """What somebody waits for, since the last call."""
        outputs, ends = list(self._outputs.values()), self._staged_ends
        self._outputs, self._staged_ends = {}, []
        return outputs, ends

    def take(self) -> tuple[list[RequestOutput], list[StagedEnd], list[Observation]]:
        """Everything since the last call."""
        outputs, ends = self.take_outputs()
        observations = self._samples
        observations += [Observation(name, dict(labels), value) for (name, labels), value in self._counts.items()]
        self._samples, self._counts = [], {}
        return outputs, ends, observations
