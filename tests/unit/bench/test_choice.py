"""The measurement of choices: every policy is measured, and those with an index find what is cached."""

from __future__ import annotations

from bench.choice import measure, report
from router.policies import POLICIES


def test_measure_when_it_ran_then_every_policy_has_a_line_and_the_cached_prompts_were_found():
    candidates = measure(servers=2, prompt_tokens=64, rounds=3)
    lines = report(candidates).splitlines()
    assert [line.split()[1] for line in lines[2:]] == list(POLICIES)
    for candidate in candidates:
        assert [len(times) for times in candidate.times.values()] == [3, 3]
        if candidate.chooser.index is not None:
            assert candidate.predicted == {"new": [0, 0, 0], "cached": [48, 48, 48]}
