"""Prefill and decode engines whose KV only copies reach: the same tokens, and every block is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch

from cache_store.geometry.layout import GroupLayout
from cache_store.memory.pool import StagedKvPool
from cache_store.memory.stream_copies import StreamCopyEngine
from engine.messages import RunMode
from engine.parallel.agent_messages import Share
from engine.transfer import HAND_OVER_BYTES, LATE_BYTES, Publisher
from rpc import faults
from rpc.errors import ErrorCode
from tests.unit.cache_store.late_device import LateDevice
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve

PROMPT = [5 + (i * 37) % 370 for i in range(45)]


@pytest.fixture(autouse=True)
def staged_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of this module see their KV as that of a device."""

    def kv_pool(
        layouts: Sequence[GroupLayout], layers: Mapping[str, Sequence[torch.Tensor]], *_: object
    ) -> StagedKvPool:
        places = {(tag, i): layer for tag, tensors in layers.items() for i, layer in enumerate(tensors)}
        return StagedKvPool(
            {layout.tag: layers[layout.tag][0].shape[0] for layout in layouts}, StreamCopyEngine(LateDevice(), places)
        )

    monkeypatch.setattr("engine.transfer.kv_pool", kv_pool)
    yield
    faults.disarm()


@pytest.mark.parametrize("transport", ["ipc", "grpc"])
def test_pd_when_the_kv_is_on_a_device_then_the_tokens_are_those_of_one_engine(transport: str) -> None:
    with RealEngine() as alone:
        alone.add("a#0.00000001", PROMPT, max_tokens=16)
        alone.run()
        expected = alone.tokens("a#0.00000001")
    options = {"kv_transport": transport, "max_num_batched_tokens": 16}
    with pair(options, options) as (p, d):
        assert p.ready.transports == d.ready.transports == [transport]
        for number in range(3):  # the second and third hit both prefix caches
            assert serve(p, d, f"r{number}#0.0000000{number}", PROMPT, max_tokens=16) == expected
        assert p.cached_tokens("r1#0.00000001") == 40
        run_until([p, d], lambda: p.clean() and d.clean())
        received = [item for item in d.observations if item.name == "baton_kv_transfer_bytes_total"]
        assert {item.labels["transport"] for item in received} == {transport}
        assert [end.outcome for end in p.staged_ends] == ["released"] * 3


class Told:
    """Takes what a publisher hands over."""

    def __init__(self, on_device: bool, block_bytes: int) -> None:
        self.on_device = on_device
        self.identity = SimpleNamespace(groups=[SimpleNamespace(tag="full", num_layers=3, block_bytes=block_bytes)])
        self.marks = 0
        self.published: list[tuple[str, int, int | None]] = []

    def mark(self) -> int | None:
        self.marks += 1
        return self.marks if self.on_device else None

    def publish(self, key: str, group: str, layer: int, upto: int, after: int | None) -> None:
        self.published.append((key, layer, after))


@pytest.mark.parametrize(
    ("on_device", "layer_bytes", "at_once", "late"),
    [
        (True, LATE_BYTES, [0, 1, 2], []),  # each layer when it is queued, the last one too
        (True, HAND_OVER_BYTES, [], [0, 1, 2]),  # little KV: after the first token
        (False, LATE_BYTES, [0, 1], [2]),
    ],
    ids=["long prompt on a device", "short prompt on a device", "on the CPU"],
)
def test_layers_of_a_step_when_they_are_queued_then_they_are_handed_over_in_time(
    on_device: bool, layer_bytes: int, at_once: list[int], late: list[int]
) -> None:
    agent = Told(on_device, layer_bytes // 2)
    deferred: list[Callable[[], None]] = []
    publisher = Publisher(agent, {"full": [Share("k", 7, 2)]}, deferred.append)  # type: ignore[arg-type]
    for layer in range(3):
        publisher("full", layer)
    assert [layer for _, layer, _ in agent.published] == at_once
    for hand_over in deferred:
        hand_over()
    assert [layer for _, layer, _ in agent.published] == at_once + late
    marks = [after for _, _, after in agent.published]
    assert all(isinstance(after, int) for after in marks) if on_device else marks == [None] * 3
    if at_once and on_device:
        assert marks == [1, 2, 3]  # each its own point of the computation


@pytest.mark.parametrize("transport", ["ipc", "grpc"])
def test_pd_when_the_load_breaks_then_the_decode_server_wipes_what_may_be_of_others(transport: str) -> None:
    options = {"kv_transport": transport, "kv_load_failure_policy": "fail"}
    with pair(options, options) as (p, d):
        wiped: list[list[int]] = []
        d.core.transfer._wipe_blocks = lambda group, blocks: wiped.append(list(blocks))
        faults.arm("cache_store.send_piece:raise=8309,layer=1")
        key = "r#0.00000001"
        d.add(key, PROMPT, RunMode.DECODE, source=p.source)
        p.add(key, PROMPT, RunMode.PREFILL)
        run_until([d, p], lambda: d.ended(key) and p.ended(key) and d.clean() and p.clean())
        error = d.last(key).error
        assert error is not None and error.metadata["cause_code"] == str(int(ErrorCode.CACHE_STORE_STORE_FAILED))
        assert bool(wiped) == (transport == "ipc")
