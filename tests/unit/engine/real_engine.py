"""Engines with a real (tiny) model and a real cache-store agent, driven step by step in the test's own process."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Wakeup
from engine.messages import (
    AbortRequest,
    AddRequest,
    FrontMessage,
    KvEvent,
    KvSource,
    Observation,
    RequestOutput,
    RunMode,
    SamplingParams,
    StagedEnd,
)
from engine.startup import start_core
from rpc.errors import ErrorCode
from rpc.grammar import GrammarSpec
from rpc.input_embeddings import InputEmbedding
from tests.unit.engine.tiny_models import tiny_model

LIMIT_S = 30.0


class QuietWakeup(Wakeup):
    """One that nobody wakes any more once it is closed. An engine's process ends then; here a thread of an agent or of
    a compiler that ends later would write to whatever file of another test has the number of its descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()
        self._closed = False

    def wake(self) -> None:
        with self._turn:
            if not self._closed:
                super().wake()

    def close(self) -> None:
        with self._turn:
            self._closed = True
            super().close()


class RealEngine:
    """One core. `step` is a turn of its loop; outputs gather by key."""

    def __init__(self, role: str = "decode", model: str | Path = "llama", **options: object) -> None:
        settings = {
            "device": "cpu",
            "dtype": "float32",
            "num_kv_blocks": 64,
            "block_size": 8,
            "max_model_len": 256,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "kv_lease_seconds": 5.0,
            **options,
        }
        folder = model if isinstance(model, Path) else tiny_model(model)
        self.config = EngineConfig(role=role, model=str(folder), **settings)  # type: ignore[arg-type]
        self.wakeup = QuietWakeup()
        self.core, self.ready = start_core(self.config, self.wakeup)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.staged_ends: list[StagedEnd] = []
        self.kv_events: list[KvEvent] = []
        self.observations: list[Observation] = []

    def __enter__(self) -> RealEngine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.core.tiers is not None:
            self.core.tiers.close(drain_s=10.0)
        if self.core.scheduler.grammars is not None:
            self.core.scheduler.grammars.close()
        self.core.agent.close(10.0)
        self.wakeup.close()

    @property
    def source(self) -> KvSource:
        return KvSource(self.ready.engine_id, (self.ready.cache_store_address,), 1)

    def add(
        self,
        key: str,
        prompt: Sequence[int],
        mode: RunMode = RunMode.LOCAL,
        *,
        source: KvSource | None = None,
        outputs: Sequence[int] = (),
        salt: str = "",
        embeddings: Sequence[InputEmbedding] = (),
        grammar: GrammarSpec | None = None,
        **sampling: object,
    ) -> None:
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        request = AddRequest(
            key,
            mode,
            list(prompt),
            params,
            output_token_ids=list(outputs),
            cache_salt=salt,
            arrival_ns=time.monotonic_ns(),
            kv_source=source,
            input_embeddings=list(embeddings),
            grammar=grammar,
        )
        self.core.handle(FrontMessage(adds=[request]))

    def abort(self, key: str, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        self.core.handle(FrontMessage(aborts=[AbortRequest(key, int(code))]))

    def step(self) -> bool:
        computed = self.core.step()
        self.collect()
        return computed

    def collect(self) -> None:
        message = self.core.take_message()
        if message is None:
            return
        for output in message.outputs:
            seen = self.outputs.setdefault(output.request_key, [])
            assert not (seen and seen[-1].last)
            seen.append(output)
        self.staged_ends += message.staged_ends
        self.kv_events += message.kv_events
        self.observations += message.observations

    def ended(self, key: str) -> bool:
        return bool(self.outputs.get(key)) and self.outputs[key][-1].last

    def run(self) -> None:
        """Until every request has ended."""
        run_until([self], lambda: not self.core.scheduler.open)

    def tokens(self, key: str) -> list[int]:
        found = [token for output in self.outputs[key] for token in output.tokens]
        first = found[0].index if found else 0
        assert [token.index for token in found] == list(range(first, first + len(found)))
        return [token.token_id for token in found]

    def last(self, key: str) -> RequestOutput:
        assert self.ended(key), f"{key} has not ended"
        return self.outputs[key][-1]

    def cached_tokens(self, key: str) -> int:
        return next(output.prefill.cached_tokens for output in self.outputs[key] if output.prefill is not None)

    def counted(self, name: str, **labels: str) -> float:
        """What a counter has come to."""
        return sum(item.value for item in self.observations if (item.name, item.labels) == (name, labels))

    def ledger(self) -> dict[str, int]:
        ledger = self.core.kv.ledgers()[0]
        states = ("free", "running", "staged", "receiving", "quarantined", "cached")
        counts = {state: getattr(ledger, state) for state in states}
        assert sum(counts.values()) == ledger.total
        return {state: count for state, count in counts.items() if count}

    def clean(self) -> bool:
        return set(self.ledger()) <= {"free", "cached"} and not self.core.scheduler.open


def run_until(engines: Sequence[RealEngine], done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Steps all engines until `done`; waits for their agents when none computes."""
    deadline = time.monotonic() + limit_s
    while True:
        computed = [engine.step() for engine in engines]
        if done():
            return
        assert time.monotonic() < deadline, [
            (engine.ledger(), {key: r.state for key, r in engine.core.scheduler.open.items()}) for engine in engines
        ]
        if not any(computed):
            wait_s = min(0.05, *(engine.core.wait_s() for engine in engines))
            select.select([engine.wakeup.fileno() for engine in engines], [], [], wait_s)
            for engine in engines:
                engine.wakeup.clear()


@contextmanager
def pair(
    prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None
) -> Iterator[tuple[RealEngine, RealEngine]]:
    """A prefill and a decode engine."""
    with ExitStack() as stack:
        p = stack.enter_context(RealEngine("prefill", **(prefill or {})))
        d = stack.enter_context(RealEngine("decode", **(decode or {})))
        yield p, d


def serve(p: RealEngine, d: RealEngine, key: str, prompt: Sequence[int], **options: object) -> list[int]:
    """One disaggregated request from start to end; its tokens as the decode server streams them."""
    d.add(key, prompt, RunMode.DECODE, source=p.source, **options)  # type: ignore[arg-type]
    p.add(key, prompt, RunMode.PREFILL, **options)  # type: ignore[arg-type]
    # The load is under way before the prompt is computed, as it is with servers of their own.
    run_until([d, p], lambda: d.ended(key) and p.ended(key) and p.clean())
    assert d.last(key).error is None, d.last(key).error
    assert p.tokens(key) == d.tokens(key)[:1]
    return d.tokens(key)
