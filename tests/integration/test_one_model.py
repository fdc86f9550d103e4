"""Servers of one checkpoint pair, however it is saved and shared out; one whose weights differ in a bit stays alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from rpc.errors import ErrorCode
from tests.integration.cluster import Cluster, wait_for
from tests.integration.wire_client import TIMEOUT_S, Pair, generate_input, typed
from tests.unit.engine.test_weight_digests import flip_a_bit, spread
from tests.unit.engine.tiny_models import tiny_model

MODEL = "tiny"
PROMPT = list(range(2, 40))


@pytest.mark.extended
def test_pairing_when_weights_are_sharded_anew_or_differ_in_a_bit_then_the_former_serve_and_the_latter_is_named(
    tmp_path: Path,
) -> None:
    damaged = Path(shutil.copytree(tiny_model("llama"), tmp_path / "damaged"))
    flip_a_bit(damaged)
    sharded = Path(shutil.copytree(tiny_model("llama"), tmp_path / "sharded"))
    spread(sharded)
    names = ["--served-model-name", MODEL]
    flags = [*names, "--no-allow-local-prefill"]
    with Cluster(1, 0, model=tiny_model("llama"), router=False, prefill_flags=names, decode_flags=flags) as cluster:
        [prefill] = cluster.prefill
        other = cluster.start_decode(["--model", str(damaged)])
        same = cluster.start_decode(["--model", str(sharded), "--tensor-parallel-size", "2"])
        found = [
            server.wait_ready().page("/server_info")["engine"]["model_fingerprint"] for server in (prefill, same, other)
        ]
        assert found[0] == found[1] != found[2]
        with Pair(prefill, same, MODEL) as pair:
            tokens = pair.generate(generate_input("same", PROMPT, model=MODEL, max_tokens=4, ignore_eos=True)).token_ids
            assert len(tokens) == 4
        # What no router does: the servers see it themselves
        with Pair(prefill, other, MODEL) as pair:
            reader = pair.open_decode(generate_input("other", PROMPT, model=MODEL, max_tokens=4))
            assert reader.wait_end().tokens == []
        assert reader.error is not None
        error = typed(reader.error)
        assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
        assert error.metadata["cause"] == "INCOMPATIBLE_PEER"
        assert error.metadata["model_fingerprint"] == f"{found[2]} / {found[0]}"
        router = cluster.start_router()

        def reasons() -> list[str]:
            workers = router.page("/workers")["workers"]
            return [reason for worker in workers for reason in worker.get("reasons", [])]

        wait_for("the router's verdict", lambda: any("model_fingerprint" in reason for reason in reasons()), TIMEOUT_S)
        assert [reason for reason in reasons() if found[2] in reason] == reasons()
        question = {"model": MODEL, "prompt": "a b c", "max_tokens": 4}
        answer = httpx.post(f"http://{router.http}/v1/completions", json=question, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        cluster.assert_clean_ledgers()
