"""An engine of two ranks on GPUs gives the answers of one on a GPU, whatever a request asks for: log-probabilities of
its prompt, penalties, seeds, a grammar, embeddings in place of tokens, prefixes, more than the blocks hold."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("xgrammar", reason="one of the requests has a grammar")

from tests.unit.engine.parallel.test_colocated_ranks import answers, check_answers

START_S = 180.0  # kernels are compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(500),
]


async def test_answers_when_an_engine_on_devices_has_two_ranks_then_they_are_those_of_one() -> None:
    one, two = [await answers(ranks, "cuda", "triton", START_S) for ranks in (1, 2)]
    check_answers(one, two)
