"""docs/cuda_graphs.md names every status, setting and metric, and every invariant has a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

from engine.runner.decode_status import DecodeGraphStatus
from front.settings import FrontSettings
from rpc.graph_status import INIT_STATUSES, REQUEST_STATUSES
from rpc.metric_families import FAMILIES

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "cuda_graphs.md").read_text(encoding="utf-8")
WITHOUT_TEST = {22}  # experts: no such model is served


def section(title: str) -> str:
    return PAGE.split(f"\n### {title}", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]


def rows(text: str) -> list[str]:
    return re.findall(r"^\| `([a-z_]+)`", text, re.MULTILINE)


def test_page_when_read_then_each_start_up_status_is_in_its_table_in_the_order_of_the_gate():
    assert sorted(rows(section("Start-up"))) == sorted(INIT_STATUSES)


def test_page_when_read_then_each_status_of_a_request_is_in_one_of_the_tables():
    assert set(rows(section("Each request"))) | set(INIT_STATUSES) - {"captured"} == set(REQUEST_STATUSES)


def test_page_when_read_then_each_status_of_a_decode_step_is_in_its_table():
    table = PAGE.split("\n## Decode graphs", 1)[1].split("\n### ", 1)[0]
    assert sorted(rows(table)) == sorted(DecodeGraphStatus)


def test_page_when_read_then_it_has_every_setting_and_metric():
    for name in FrontSettings.model_fields:
        if "cuda_graph" in name or name == "decode_capture_config":
            assert f"`--{name.replace('_', '-')}`" in PAGE
    for family in FAMILIES:
        if "prefill_cuda_graph" in family or family.startswith("baton_cuda_graph"):
            assert f"`{family}`" in PAGE
    assert set(re.findall(r"`(baton_[a-z_]+)", PAGE)) <= set(FAMILIES)


def test_invariants_when_listed_then_each_has_a_test_module_that_names_it():
    listed = [int(number) for number in re.findall(r"^(\d+)\. ", PAGE.split("\n## Invariants", 1)[1], re.MULTILINE)]
    assert listed == list(range(1, 34))
    named: set[int] = set()
    places = [*Path(__file__).parent.glob("test_*.py"), ROOT / "tests" / "gpu" / "test_prefill_graph.py"]
    places.append(ROOT / "tests" / "integration" / "test_prefill_graph_status.py")
    for path in places:
        head = path.read_text(encoding="utf-8").split('"""')[1]
        for claim in re.findall(r"[Ii]nvariants? ([\d, andto]+) of docs/cuda_graphs", head.replace("\n", " ")):
            for part in re.split(r",| and ", claim):
                bounds = [int(number) for number in part.split(" to ")]
                named |= set(range(bounds[0], bounds[-1] + 1))
    assert set(listed) - named == WITHOUT_TEST
