"""Rules and the configuration of Prometheus: what they ask for exists, and `promtool` accepts and tests them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana.boards import BOARDS
from rpc.errors import TABLE, ErrorCode
from tests.unit.deploy.promql import mistakes, read
from tests.unit.deploy.series import PROMETHEUS, ROOT, RULE_FILES, exported, recorded, rules
from tests.unit.rpc.test_metric_families_fed import WAITING

ALERTS = {
    "HighErrorRate", "NoReadyPair", "EngineDown", "KVLedgerImbalance", "KVLeak", "LeaseExpiry", "TransferStall",
    "TransferFailures", "ChecksumMismatch", "BreakerOpen", "RetryBudgetExhausted", "GraphFallback", "DrainStuck",
    "ContractBreach", "TTFTSLOBurn",
}  # fmt: skip
OVERLOAD = {ErrorCode.PRIORITY_PREEMPTED, ErrorCode.ROUTER_QUEUE_FULL, ErrorCode.ROUTER_QUEUE_TIMEOUT}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool: install the Debian package prometheus (`make test` does, as root)"
)


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", RULE_FILES)
def test_rules_when_read_then_all_series_labels_and_values_exist(name: str) -> None:
    labels, values = exported()
    labels |= recorded()
    waiting = {f"baton_{family}" for families in WAITING.values() for family in families}
    for rule in rules(name):
        title = rule.get("record") or rule["alert"]
        assert mistakes(rule["expr"], labels, values) == [], title
        for selector in read(rule["expr"]).selectors:
            assert re.sub("_(bucket|sum|count)$", "", selector.metric) not in waiting, title


def test_alerts_when_listed_then_each_has_severity_patience_and_a_section_of_its_own() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("#")
    }
    alerts = rules("rules.yml")
    assert {rule["alert"] for rule in alerts} == ALERTS
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["for"]
        document, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert document == "docs/operations.md"
        assert heading == rule["alert"].lower() in headings, rule["alert"]
        assert rule["annotations"]["summary"]


def test_error_share_when_codes_are_left_out_then_they_are_those_that_clients_answer_for() -> None:
    (rule,) = (r for r in rules("recording.yml") if r["record"] == "model_name:baton_request_errors:ratio_rate5m")
    excluded = set(re.findall(r"[A-Z_]{5,}", rule["expr"]))
    client = {code for code, spec in TABLE.items() if spec.http is not None and 400 <= spec.http < 500} - OVERLOAD
    assert excluded == {code.name for code in client}


def test_rtp_llm_names_when_recorded_then_none_is_recorded_twice() -> None:
    names = [rule["record"] for rule in rules("rtp_llm_names.yml")]
    assert len(names) == len(set(names))
    assert all(name.startswith("rtp_llm_") for name in names)


@needs_promtool
def test_rules_and_configuration_when_checked_by_promtool_then_they_are_right(tmp_path: Path) -> None:
    promtool("check", "rules", *(PROMETHEUS / name for name in RULE_FILES))
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    expressions = [query.expr for board in BOARDS for panel in board.panels() for query in panel.queries]
    expressions += [annotation.expr for board in BOARDS for annotation in board.annotations]
    panels = [
        {"record": f"panel_{number}", "expr": expression.replace("$__rate_interval", "20s").replace("$", "")}
        for number, expression in enumerate(expressions)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]}))
    promtool("check", "rules", path)


@needs_promtool
def test_alerts_when_tested_by_promtool_then_they_fire_when_they_should_and_only_then() -> None:
    path = PROMETHEUS / "rules_test.yml"
    tests = yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
    fires, silent = set(), set()
    for case in tests:
        for alert in case.get("alert_rule_test", ()):
            (fires if alert.get("exp_alerts") else silent).add(alert["alertname"])
    assert fires == ALERTS
    assert silent == ALERTS
    promtool("test", "rules", path)
