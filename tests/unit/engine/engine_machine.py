"""What random lives of requests on one engine have in common, whatever else may happen to it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine.messages import RunMode
from tests.unit.engine.scripted_engine import ScriptedEngine, continuation

BASE = [7, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]


class EngineMachine(RuleBasedStateMachine):
    """A machine's `start` sets `engine`. At the end, every request must have the model's continuation of its prompt,
    or a beginning of it and an error, and every block must be free or cached."""

    engine: ScriptedEngine

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, tuple[list[int], int]] = {}  # prompt with given outputs, tokens to come

    @property
    def started(self) -> bool:
        return hasattr(self, "engine")

    def ask(
        self, mode: RunMode, length: int, tail: list[int], max_tokens: int, given_tokens: int = 0, **more: Any
    ) -> None:
        """A request whose prompt begins with `length` tokens of BASE, and has so many outputs already."""
        key, prompt = f"r{len(self.requests)}", [*BASE[:length], *tail]
        outputs = continuation(prompt, given_tokens) if max_tokens > given_tokens else []
        count = 1 if mode is RunMode.PREFILL else max_tokens - len(outputs)
        self.requests[key] = ([*prompt, *outputs], count)
        self.engine.add(key, prompt, mode, max_tokens=max_tokens, outputs=outputs, **more)
        self.engine.wait(0.0001)

    # -- rules ----------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.wait(0.01)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(list(self.requests))))

    @precondition(lambda self: self.engine.transfer.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        self.engine.load_done(data.draw(st.sampled_from(list(self.engine.transfer.loads))))

    @precondition(lambda self: self.engine.transfer.leases)
    @rule(data=st.data(), outcome=st.sampled_from(["released", "aborted", "expired"]))
    def end_lease(self, data: st.DataObject, outcome: str) -> None:
        self.engine.lease_ended(data.draw(st.sampled_from(list(self.engine.transfer.leases))), outcome)

    # -- the end --------------------------------------------------------------------------------------------

    def quiet(self) -> None:
        """Nothing happens beside the engine any more: before the last look at it."""

    def teardown(self) -> None:
        if not self.started:
            return
        engine, scheduler = self.engine, self.engine.scheduler
        for _ in range(400):
            engine.step()
            engine.wait(0.15)
            for key in list(engine.transfer.loads):
                engine.load_done(key)
            for key in list(engine.transfer.leases):
                if key in scheduler.holds.staged or key in scheduler.holds.leaving:
                    engine.lease_ended(key)
            if not scheduler.open and not scheduler.holds.leaving and not scheduler.holds.staged:
                break
        self.quiet()
        engine.assert_clean()
        for key, (known, count) in self.requests.items():
            expected = continuation(known, count)
            tokens = engine.tokens(key)
            assert tokens == expected[: len(tokens)]
            if engine.last(key).error is None:
                assert len(tokens) == len(expected)
