"""How many figures a step books: few, and those of prompts only when it computes one."""

from __future__ import annotations

import pytest

from engine.messages import Observation
from tests.unit.engine.real_engine import RealEngine

MOST = 14
PROMPT_FIGURES = ("baton_prefill_", "baton_prefix_cache_")


def series(observations: list[Observation]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(one.name, tuple(sorted(one.labels.items()))) for one in observations}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_steps_when_they_run_then_each_touches_few_series_and_those_of_prompts_only_with_prompts(role: str) -> None:
    with RealEngine(role=role, max_num_batched_tokens=64) as engine:
        for number in range(6):
            engine.add(f"r{number}", [number + 1] * 40, max_tokens=6)
        kinds = set()
        while engine.core.scheduler.open:
            seen = len(engine.observations)
            engine.step()
            news = engine.observations[seen:]
            assert len(series(news)) <= MOST, series(news)
            (kind,) = {one.labels["kind"] for one in news if one.name == "baton_engine_step_seconds"} or {"none"}
            kinds.add(kind)
            if kind == "decode":
                assert [one.name for one in news if one.name.startswith(PROMPT_FIGURES)] == []
        assert {"prefill", "decode"} <= kinds or "mixed" in kinds, kinds
