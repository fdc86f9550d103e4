"""Which series there are: those of the table of families, those of every scrape, and those that rules record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rpc.metric_families import BUCKETS, FAMILIES, Family
from tests.unit.deploy.promql import read

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULE_FILES = ("rules.yml", "recording.yml", "rtp_llm_names.yml")
SCRAPE = frozenset(("instance", "job"))

Labels = dict[str, frozenset[str]]
Values = dict[tuple[str, str], frozenset[str]]


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series_of(family: Family) -> list[str]:
    return [family.name + suffix for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))]


def exported() -> tuple[Labels, Values]:
    """Labels of every series of the processes, and the closed sets of values."""
    labels: Labels = {"up": SCRAPE, "process_start_time_seconds": SCRAPE}
    values: Values = {}
    for family in FAMILIES.values():
        own = frozenset(label for role in family.roles for label in family.all_labels(role)) | SCRAPE
        for name in series_of(family):
            labels[name] = own | {"le"} if name.endswith("_bucket") else own
            values |= {(name, label): allowed for label, allowed in family.values.items()}
            if family.own_role:
                values[name, "role"] = frozenset(family.roles)
            if name.endswith("_bucket"):
                bounds = frozenset(str(float(bound)) for bound in BUCKETS[family.buckets])
                values[name, "le"] = bounds | {"+Inf"}
    return labels, values


def recorded() -> Labels:
    """Labels of what the rules record: those that the expression groups by, or `label_replace` adds."""
    found: Labels = {}
    for name in RULE_FILES:
        for rule in rules(name):
            if "record" in rule:
                added = {"error_code_name"} if "error_code_name" in rule["expr"] else set()
                found[rule["record"]] = frozenset(read(rule["expr"]).grouping - {"le"} | added)
    return found
