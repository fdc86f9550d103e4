"""The benchmark of KV transfers: it moves the right bytes by each transport, and judges what it has measured."""

from __future__ import annotations

import pytest

from bench.kv_transfer.__main__ import Variant, measure
from bench.kv_transfer.memory import Shape
from bench.kv_transfer.processes import Processes, Way
from bench.kv_transfer.targets import ratios


def test_ratios_when_a_variant_is_slower_than_its_target_then_it_is_missed_round_by_round() -> None:
    found = {
        f"{each.target.what} / {each.target.beside}": (round(each.median, 2), each.low, each.high, each.met)
        for each in ratios(
            {
                "tcp off": [2.0, 1.0, 4.0],
                "bare socket": [1.0, 1.0, 1.0],
                "tcp all": [2.2, 1.1, 4.4],
                "memory copy": [1.0, 1.0, 1.0],
            }
        )
    }
    assert found == {
        "tcp off / bare socket": (0.5, 0.25, 1.0, False),
        "tcp all / tcp off": (0.91, pytest.approx(1 / 1.1), pytest.approx(1 / 1.1), True),
    }


def test_measure_when_it_runs_then_every_variant_has_its_rounds_and_the_bytes_were_compared() -> None:
    way = Way("tcp", "all")
    variants = [Variant("tcp", way), Variant("tcp, scattered", way, scattered=True)]
    variants += [Variant(bare, way, bare) for bare in ("socket", "stream", "copy")]
    processes = Processes(Shape(blocks=8, layers=2, block_size=4, block_bytes=4096), [way], threads=2)
    try:
        rows = measure(processes, variants, 6, 1)
        several = processes.load(way.name, 6, 3, False)
    finally:
        processes.close()
    assert [len(each) for each in rows.values()] == [1] * 5
    assert all(row["seconds"] > 0 for each in rows.values() for row in [*each, several])
