"""The servers that `tests/integration` drives over the wire contract, and what can be asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.cluster import Cluster
from tests.integration.grammar_packages import DAMAGED, in_front, package
from tests.integration.test_servers_handoff import BLOCK, MODEL
from tests.unit.engine.tiny_models import tiny_model

DECODE_BLOCKS = 28
CHUNK = 64
FLAGS = ("--served-model-name", MODEL, "--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK))
# A load that failed ends the request, so that its cause can be seen; by default D would compute the prompt itself.
DECODE_FLAGS = (*FLAGS, "--kv-load-failure-policy", "fail", "--num-kv-blocks", str(DECODE_BLOCKS))
# Every step of the prefill of `slow-*` takes long, and one does not end at all while the test has its file: states last
# long enough to be met. What is ended while it generates (`gen-*`) has not come to its end by itself before, and the
# answer to `victim` takes many seconds.
PREFILL_FAULTS = (
    "engine.step:delay=0.1,kind=prefill,request_key=slow-*",
    *(
        f"engine.step:delay=60,kind=prefill,request_key=slow-{name}*,while={{held}}"
        for name in ("queue", "load", "late")
    ),
    "engine.step:delay=60,nth=2,kind=prefill,request_key=slow-compute*,while={held}",  # its blocks are told by then
)
DECODE_FAULTS = (
    "engine.step:delay=0.02,request_key=gen-*",
    "engine.step:delay=0.05,kind=decode,request_key=victim*",
)
SLOW, HELD = "slow", "held"  # names of files
LAYER_S = 0.8  # that a layer of a step takes on a prefill server whose layers are slow
PIECE_S = 0.05  # and a block of a layer on its way


def slow_layers(condition: str = "") -> str:
    """Faults of a prefill server: its layers, and the transfer of their blocks, take long. `condition`: of faults."""
    points = (f"engine.layer:delay={LAYER_S}", f"cache_store.send_piece:delay={PIECE_S}")
    return ";".join(point + condition for point in points)


@contextmanager
def start(folder: Path) -> Iterator[Cluster]:
    """While there is a file SLOW in the folder, the layers of the prefill server are; while there is a file HELD, a
    step with the prompt of a `slow-*` does not end there. Structured output is off, and its library, which nobody may
    look at then, damaged."""
    library = package(folder, DAMAGED)
    prefill_faults = ";".join(PREFILL_FAULTS).replace("{held}", str(folder / HELD))
    with Cluster(
        1, 1, model=tiny_model("llama"), router=False, prefill_flags=FLAGS, decode_flags=DECODE_FLAGS,
        env={"PYTHONPATH": in_front(library), "BATON_GRAMMAR_BACKEND": "none"},
        prefill_env={"BATON_FAULTS": f"{prefill_faults};{slow_layers(f',while={folder / SLOW}')}"},
        decode_env={"BATON_FAULTS": ";".join(DECODE_FAULTS)},
    ) as running:  # fmt: skip
        yield running
