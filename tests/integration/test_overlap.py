"""The transfer hides behind the computation: shown by the times of both servers' events, on their common clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.extent import extended
from tests.integration import direct_servers
from tests.integration.cluster import Cluster
from tests.integration.direct_servers import LAYER_S, PIECE_S, slow_layers
from tests.integration.test_servers_handoff import MODEL
from tests.integration.wire_client import TIMEOUT_S, Pair, generate_input
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

LAYERS = 3
BLOCKS = 7
PROMPT = [(7 * i * i + 3) % (VOCAB_SIZE - 2) + 2 for i in range(16 * BLOCKS - 5)]


def events_of(record: dict[str, object]) -> dict[str, int]:
    """Time in nanoseconds of each event of a request's record; the last of a name."""
    return {event["name"]: event["at_ns"] for event in record["events"]}  # type: ignore[attr-defined]


@contextmanager
def servers(direct: Cluster, slow: Path, chunk: int) -> Iterator[Cluster]:
    """A pair with slow layers on the prefill server, which computes `chunk` tokens in a step."""
    if chunk == direct_servers.CHUNK:
        slow.touch()
        try:
            yield direct
        finally:
            slow.unlink()
        return
    flags = (*direct_servers.FLAGS, "--max-num-batched-tokens", str(chunk))
    with Cluster(
        1, 1, model=tiny_model("llama"), router=False, prefill_flags=flags, decode_flags=flags,
        prefill_env={"BATON_FAULTS": slow_layers()},
    ) as own:  # fmt: skip
        yield own


@pytest.mark.serial
@pytest.mark.parametrize("chunk", [extended(128, id="one step"), pytest.param(64, id="two chunks")])
def test_transfer_when_layers_take_long_then_it_ends_within_one_layers_time_after_the_last_layer(
    direct: Cluster, slow: Path, chunk: int
) -> None:
    with servers(direct, slow, chunk) as cluster, Pair(cluster.prefill[0], cluster.decode[0], MODEL) as pair:
        request = generate_input("overlap", PROMPT, model=MODEL, max_tokens=4, ignore_eos=True)
        reader = pair.open_decode(request)
        reader.wait_for("reserved")
        computed = pair.open_prefill(request).result(TIMEOUT_S)
        assert (len(reader.wait_end().token_ids), computed.result.cached_tokens) == (4, 0), reader.error
        prefill = events_of(cluster.prefill[0].finished("overlap"))
        decode = events_of(cluster.decode[0].finished("overlap"))
        published = [prefill[f"layer_published:{layer}"] for layer in range(LAYERS)]
        received = [decode[f"layer_received:{layer}"] for layer in range(LAYERS)]
        # Pieces were sent slowly enough that the whole transfer, begun after the last layer, would take longer.
        assert LAYERS * BLOCKS * PIECE_S > LAYER_S
        for layer in range(1, LAYERS):
            # Less a little: the times are taken on threads of their own.
            assert (published[layer] - published[layer - 1]) / 1e9 >= 0.8 * LAYER_S
            assert received[layer - 1] < published[layer], f"layer {layer - 1} came after layer {layer} was computed"
        assert decode["load_started"] < published[0]
        behind_s = (decode["load_complete"] - published[-1]) / 1e9
        # As long as a layer took here, where others want the processors too.
        layer_s = max((later - earlier) / 1e9 for earlier, later in itertools.pairwise(published))
        assert 0 < behind_s <= layer_s, f"complete {behind_s:.3f} s after the last layer; {prefill}, {decode}"
        cluster.assert_clean_ledgers()
