"""A model that is shared out over two ranks on GPUs: a device for each and NCCL between them, with graphs; where there
is only one, both share it and meet on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine import sharded_steps as jobs
from tests.unit.engine.rank_processes import RankProcesses
from tests.unit.engine.sharded_steps import Case
from tests.unit.engine.test_sharded_model import AWKWARD, BFLOAT16_TOLERANCE, TOLERANCE

SIZE = 2
APART = torch.cuda.device_count() >= SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(SIZE, device="cuda") as processes:
        yield processes


@pytest.mark.parametrize("name", ["llama-bias", "llama-tied", "mistral-window", "qwen2", "qwen3"])
def test_logits_when_a_model_is_shared_out_over_devices_then_equal_those_of_one(
    ranks: RankProcesses, name: str
) -> None:
    case = Case(name, "cuda")
    shared, alone = (ranks.run(size, jobs.logits_of_steps, case)[0] for size in (SIZE, 1))
    torch.testing.assert_close(shared, alone, rtol=0, atol=TOLERANCE)


def test_logits_when_the_vocabulary_leaves_padding_then_equal_those_of_one_device(ranks: RankProcesses) -> None:
    case = Case("llama", "cuda", changed=AWKWARD)
    shared, alone = (ranks.run(size, jobs.logits_of_steps, case)[0] for size in (SIZE, 1))
    torch.testing.assert_close(shared, alone, rtol=0, atol=TOLERANCE)


def test_logits_when_a_bfloat16_model_is_shared_out_over_devices_then_are_near(ranks: RankProcesses) -> None:
    case = Case("qwen3", "cuda", "bfloat16")
    shared, alone = (ranks.run(size, jobs.logits_of_steps, case)[0] for size in (SIZE, 1))
    torch.testing.assert_close(shared, alone, rtol=0, atol=BFLOAT16_TOLERANCE)


def test_decode_steps_when_ranks_have_devices_of_their_own_then_are_replayed(ranks: RankProcesses) -> None:
    case, prompt = Case("llama-bias", "cuda"), jobs.random_prompt(9, 5)
    expected = ranks.run(1, jobs.greedy_tokens, case, [prompt], 6)[0][0]
    status = "replayed" if APART else "capture_unavailable"
    for captured, tokens, statuses in ranks.run(SIZE, jobs.decode_by_graphs, case, prompt, 6):
        assert captured == int(APART)
        assert tokens == expected
        assert statuses in ([], ["prefill_input", *[status] * 5])
