"""Dashboards: what is committed is what the generator writes, and every query asks for something that exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from deploy.grafana.__main__ import FOLDER, texts
from deploy.grafana.boards import BOARDS
from deploy.grafana.panels import Board, Panel, Variable
from tests.unit.deploy.promql import mistakes, read
from tests.unit.deploy.series import ROOT, exported, recorded
from tests.unit.rpc.test_metric_families_fed import WAITING

GRAFANA = ROOT / "deploy" / "grafana"
UNITS = {"s", "percentunit", "reqps", "short", "Bps", "bytes"}


def queries() -> Iterator[tuple[Board, Panel, str, str]]:
    for board in BOARDS:
        for panel in board.panels():
            for query in panel.queries:
                yield board, panel, query.expr, query.legend


def test_files_when_compared_with_the_generator_then_they_are_what_it_writes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert committed == texts(), "run: python -m deploy.grafana"


def test_queries_when_read_then_all_series_labels_and_values_exist() -> None:
    labels, values = exported()
    labels |= recorded()
    found = [
        f"{board.name}: {panel.title}: {mistake}"
        for board, panel, expression, _ in queries()
        for mistake in mistakes(expression, labels, values)
    ]
    for board in BOARDS:
        for annotation in board.annotations:
            found += [f"{board.name}: {annotation.name}: {m}" for m in mistakes(annotation.expr, labels, values)]
    assert found == []


def test_queries_when_read_then_no_feature_to_come_has_a_panel() -> None:
    waiting = {f"baton_{name}" for names in WAITING.values() for name in names}
    for board, panel, expression, _ in queries():
        for selector in read(expression).selectors:
            family = re.sub("_(bucket|sum|count)$", "", selector.metric)
            assert not {family, selector.metric} & waiting, (board.name, panel.title)


def test_legends_when_they_name_a_label_then_the_result_has_it() -> None:
    for board, panel, expression, legend in queries():
        shown = set(re.findall(r"{{(\w+)}}", legend))
        assert shown <= read(expression).grouping, (board.name, panel.title, legend)
        if len(panel.queries) > 1:
            assert legend, (board.name, panel.title)


def test_panels_when_drawn_then_each_has_a_unit_and_says_what_it_shows() -> None:
    for board in BOARDS:
        titles = [panel.title for panel in board.panels()]
        assert len(titles) == len(set(titles)), board.name
        for panel in board.panels():
            assert panel.unit in UNITS, (board.name, panel.title)
            assert panel.description.endswith("."), (board.name, panel.title)
            assert panel.queries, (board.name, panel.title)


def test_ratios_when_the_denominator_may_be_zero_then_it_is_filtered() -> None:
    for board, panel, expression, _ in queries():
        for denominator in expression.split(" / ")[1:]:
            assert denominator.startswith("(sum by"), (board.name, panel.title)
            assert "> 0)" in denominator, (board.name, panel.title)
        if panel.unit == "percentunit" and "_ratio" not in expression:
            assert " / " in expression, (board.name, panel.title)


def test_histograms_when_shown_as_quantiles_then_over_rates_and_by_le() -> None:
    for board, panel, expression, _ in queries():
        if "_bucket" in expression and "histogram_quantile" in expression:
            assert re.search(r"histogram_quantile\([\d.]+, sum by \(le\b.*rate\(\w+_bucket\{", expression), panel.title
        assert "quantile" in expression or "_bucket" not in expression or board.name == "overview", panel.title


def _variables(board: Board) -> dict[str, Variable]:
    return {variable.name: variable for variable in board.variables}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_variables_when_used_then_the_board_has_them_and_uses_all(board: Board) -> None:
    variables = _variables(board)
    texts_ = [query.expr for panel in board.panels() for query in panel.queries]
    texts_ += [variable.query for variable in board.variables]
    used = {name for text in texts_ for name in re.findall(r"\$(\w+)", text)} - {"__rate_interval"}
    assert used == set(variables)


def test_variables_when_they_ask_for_label_values_then_the_labels_exist() -> None:
    labels, values = exported()
    limits = {
        "ttft_slo": "baton_time_to_first_token_seconds_bucket",
        "tpot_slo": "baton_time_per_output_token_seconds_bucket",
        "e2e_slo": "baton_e2e_request_latency_seconds_bucket",
    }
    for board in BOARDS:
        for variable in board.variables:
            if variable.choices:
                assert set(variable.choices) <= values[limits[variable.name], "le"], variable.name
                continue
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
            assert match, variable.query
            assert mistakes(match[1], labels, values) == []
            (selector,) = read(match[1]).selectors
            assert match[2] in labels[selector.metric]


def test_json_when_loaded_then_panels_have_places_and_ids_of_their_own() -> None:
    uids = set()
    for text in texts().values():
        board = json.loads(text)
        uids.add(board["uid"])
        assert len(board["uid"]) <= 40
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        taken = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells
        assert {annotation["name"] for annotation in board["annotations"]["list"]} == {"drains", "restarts"}
    assert len(uids) == len(BOARDS)


def test_provisioning_when_read_then_the_data_source_scrapes_as_often_as_prometheus_does() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/baton.yml").read_text())["datasources"]
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert source["type"] == "prometheus"
    assert source["isDefault"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/baton.yml").read_text())["providers"]
    assert provider["type"] == "file"
