"""Servers of the tiny Llama that several tests of right tokens share: they start once, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.known_answers import PATIENT
from tests.conformance.test_right_tokens import BLOCK, FLAGS
from tests.extent import WHOLE
from tests.integration.cluster import Cluster, ServerProcess
from tests.unit.engine.tiny_models import tiny_model

# Where `test_right_tokens_failover.py` needs a middle of an answer, and, while its file is there, one that lasts long.
SLOW = (
    "engine.step:delay=0.03,kind=decode,request_key=slow-*;"
    "engine.step:delay=0.2,kind=decode,request_key=slow-*,while={middle}"
)
MIDDLE, LATE, HELD = "middle", "late", "held"  # names of files
SMALL_BLOCKS = 24  # of a small decode server: three whole requests of `test_right_tokens_preemption.py`
SMALL = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "64", *PATIENT, "--num-kv-blocks", str(SMALL_BLOCKS))


@contextmanager
def start(folder: Path) -> Iterator[Cluster]:
    """Two pairs, and decode servers that have too few blocks.

    The first servers of the pairs fail once each, at the answer of a prompt and at a reservation; both prefill servers
    fail in sending KV: of the load of request `twice` two times, so that the decode server computes its prompt, and of
    that of `once` one time.

    While files are in the folder: with LATE a step of a prompt of the first prefill server does not end, with HELD one
    of the first decode server, once each; with MIDDLE answers to `slow-*` are in their middle for long.
    """
    slow = SLOW.replace("{middle}", str(folder / MIDDLE))
    with Cluster(0, 0, model=tiny_model("llama"), router=False, prefill_flags=FLAGS, decode_flags=FLAGS) as running:
        # For the failed reservation to be what is seen first.
        late = f"engine.step:delay=60,kind=prefill,times=1,while={folder / LATE}"
        breaks = ";".join(
            f"cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,key={name}#*,times={times}"
            for name, times in (("twice", 2), ("once", 1))
        )
        fails = f"prefill.answer:raise=EXECUTION_EXCEPTION,times=1;{late}"
        running.start_prefill(env={"BATON_FAULTS": f"{fails};{breaks}"})
        running.start_prefill(env={"BATON_FAULTS": breaks})
        # What fails at its answer on the prefill server is not computed by the decode server before the router ends it.
        held = f"engine.step:delay=60,kind=prefill,times=1,while={folder / HELD}"
        running.start_decode(env={"BATON_FAULTS": f"decode.reserved:raise=EXECUTION_EXCEPTION,times=1;{held};{slow}"})
        running.start_decode(env={"BATON_FAULTS": slow})
        # One that cannot even find in its prefix cache what it lost.
        running.start_decode([*SMALL, "--no-enable-prefix-caching"])
        if WHOLE:
            running.start_decode(SMALL)
        for server in running.servers:
            server.wait_ready()
        yield running


def small_servers(pairs: Cluster) -> list[ServerProcess]:
    return pairs.decode[2:]
