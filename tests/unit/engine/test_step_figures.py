"""How many figures a step books: few, and those of prompts only when it computes one."""

from __future__ import annotations

import dataclasses

import pytest

from engine.messages import Observation
from engine.runner.batch import StepResult
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


@pytest.mark.parametrize("padding", [0, 3])
def test_decode_replay_when_its_rows_fill_the_graph_then_padding_is_absent(padding: int) -> None:
    with RealEngine(role="decode") as engine:
        execute = engine.core.runner.execute

        def replayed(*arguments: object, **options: object) -> StepResult:
            result = execute(*arguments, **options)
            return dataclasses.replace(
                result, decode_status="replayed", decode_graph_rows=len(result.rows) + padding
            )  # what a runner with graphs of that size says

        engine.core.runner.execute = replayed  # type: ignore[method-assign]
        engine.add("a", [5, 6, 7, 8], max_tokens=4)
        engine.run()
        names = {one.name for one in engine.observations}
        assert "baton_decode_cuda_graph_steps_total" in names
        counted = {name for name in names if name.startswith("baton_decode_cuda_graph_padded_")}
        padded = {f"baton_decode_cuda_graph_padded_{kind}_total" for kind in ("rows", "tokens")}
        assert counted == (padded if padding else set())
        assert engine.counted("baton_decode_cuda_graph_padded_rows_total") == 3 * padding
