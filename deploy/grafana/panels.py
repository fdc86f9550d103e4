"""What a dashboard consists of, and the JSON that Grafana provisions it from.

A board is rows of panels, a panel is queries with legends and one unit. Positions, ids, the data source and the looks
follow from that, so that all boards are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "table", "bargauge"]

GRID_WIDTH = 24
SCHEMA_VERSION = 39  # of Grafana 10.2 and later; newer ones migrate it when they load it
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """One PromQL expression. `legend`: Grafana's template, `{{label}}` for a label of the result."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture. `unit` is Grafana's id (`s`, `percentunit`, `reqps`, `short`, …), `width` of 24 columns."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    minimum: float | None = 0  # of the axis; None: as the values have it


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the head of a board: all values of a label, or a list.

    `query` is Grafana's `label_values(metric, label)`; with `choices` there is none, and the first is the default.
    """

    name: str
    label: str
    query: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Annotation:
    """Moments that are marked in every panel: where `expr` has a value."""

    name: str
    expr: str
    text: str
    color: str


@dataclass(frozen=True)
class Board:
    """`name` is that of the file and the end of the uid, which links and bookmarks use."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    annotations: tuple[Annotation, ...] = ()

    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def as_json(self) -> dict[str, Any]:
        return {
            "uid": f"baton-{self.name.replace('_', '-')}",
            "title": self.title,
            "description": self.description,
            "tags": ["baton"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "title": "Baton",
                    "type": "dashboards",
                    "tags": ["baton"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "annotations": {"list": [_annotation(annotation) for annotation in self.annotations]},
            "templating": {"list": [_data_source(), *(_variable(variable) for variable in self.variables)]},
            "panels": self._placed(),
        }

    def _placed(self) -> list[dict[str, Any]]:
        placed: list[dict[str, Any]] = []
        top = 0
        for row in self.rows:
            placed.append(
                {
                    "id": len(placed) + 1,
                    "type": "row",
                    "title": row.title,
                    "collapsed": False,
                    "panels": [],
                    "gridPos": {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1},
                }
            )
            top += 1
            left = line_height = 0
            for panel in row.panels:
                if left + panel.width > GRID_WIDTH:
                    top += line_height
                    left = line_height = 0
                position = {"x": left, "y": top, "w": panel.width, "h": panel.height}
                placed.append(_panel(panel, len(placed) + 1, position))
                left += panel.width
                line_height = max(line_height, panel.height)
            top += line_height
        return placed


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(variable: Variable) -> dict[str, Any]:
    shown = {"name": variable.name, "label": variable.label, "hide": 0}
    if variable.choices:
        options = [
            {"text": choice, "value": choice, "selected": choice == variable.choices[0]} for choice in variable.choices
        ]
        return {
            **shown,
            "type": "custom",
            "query": ",".join(variable.choices),
            "options": options,
            "current": options[0],
        }
    return {
        **shown,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,  # with the time range: servers come and go
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _annotation(annotation: Annotation) -> dict[str, Any]:
    return {
        "name": annotation.name,
        "datasource": DATA_SOURCE,
        "enable": True,
        "expr": annotation.expr,
        "titleFormat": annotation.text,
        "iconColor": annotation.color,
        "step": "10s",
    }


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind != "timeseries"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATA_SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if panel.kind == "table" else {}),
        }
        for index, query in enumerate(panel.queries)
    ]
    drawn: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATA_SOURCE,
        "gridPos": position,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }
    if panel.minimum is not None:
        drawn["fieldConfig"]["defaults"]["min"] = panel.minimum
    if panel.kind == "timeseries":
        drawn["fieldConfig"]["defaults"]["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        drawn["options"] = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind in ("stat", "bargauge"):
        drawn["options"] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return drawn
