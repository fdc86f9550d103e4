"""Writes `docs/metrics.md` from the table of metric families: `python -m rpc.metrics_doc >
docs/metrics.md`."""

from __future__ import annotations

import sys

from rpc.metric_families import BUCKETS, SECTIONS, Family, Role

HEADER = """\
# Metrics

Generated from `rpc/metric_families.py` by `python -m rpc.metrics_doc`; a test fails when the two differ.

Every process has its own `/metrics`: the router on its HTTP port (8000), a prefill server on 9101, a decode
server on 9102. Engines and cache stores have no port; their figures are shown by their server. `process_*`
and `python_*` are exported too.

What did not happen is absent: a counter or histogram makes a series with its first event, so a missing series
is not 0. `# HELP` and `# TYPE` of every family are there from the start. Units are base units and stand in
the names.

Dashboards and alerts that use them are described in [operations](operations.md#dashboards-and-alerts).

Families of prefill and decode servers, and those that all processes share, carry `role`, the exporting
process's own. In families of the router alone, `role` is that of the server in question.

"""

_SHORT: dict[Role, str] = {"router": "R", "prefill": "P", "decode": "D"}
_CONDITIONS = {"colocated": "colocated", "tensor_parallel": "TP > 1"}
_NAMES = {"S": "seconds", "T": "seconds per token or step", "N": "tokens", "B": "bytes", "Q": "requests"}


def _labels(family: Family) -> str:
    shown = []
    for label in family.all_labels(family.roles[0]):
        values = family.values.get(label, frozenset())
        if label == "role" and family.own_role:
            shown.append("`role`")
        elif 0 < len(values) <= 8:
            shown.append(f"`{label}` ({', '.join(sorted(values))})")
        else:
            shown.append(f"`{label}`")
    text = ", ".join(shown) or "–"
    for role, names in family.role_labels.items():
        extra = [name for name in names if name not in family.labels]
        text += f"; {_SHORT[role]} also {', '.join(f'`{name}`' for name in extra)}"
    return text


def _exported_by(family: Family) -> str:
    parts = []
    for role in family.roles:
        condition = family.conditions.get(role, "")
        parts.append(_SHORT[role] + (f" ({_CONDITIONS[condition]})" if condition else ""))
    return " ".join(parts)


def _row(family: Family) -> str:
    kind = family.kind + (f" {family.buckets}" if family.buckets else "")
    return f"| `{family.name}` | {kind} | {_exported_by(family)} | {_labels(family)} | {family.help} |"


def render() -> str:
    lines = [HEADER + "Buckets of the histograms:\n"]
    for name, bounds in BUCKETS.items():
        lines.append(f"* **{name}** ({_NAMES[name]}): {' '.join(f'{bound}' for bound in bounds)}")
    lines.append("\nExported by R router, P prefill server, D decode server.")
    for title, families in SECTIONS.items():
        lines += [f"\n## {title}\n", "| family | type | by | labels | meaning |", "|---|---|---|---|---|"]
        lines += [_row(family) for family in families]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
