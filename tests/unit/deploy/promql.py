"""What a PromQL expression asks for: series with their matchers, and the labels that it groups or joins by.

Syntax is left to `promtool`; this only reads expressions that it has accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[a-zA-Z_:][\w:]*|\[[^\]]*\]|=~|!~|!=|<=|>=|==|\d[\w.]*|[^\s]')
_AGGREGATIONS = {"sum", "max", "min", "avg", "count", "topk", "bottomk", "quantile", "group", "stddev"}
_CLAUSES = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")


@dataclass(frozen=True)
class Matcher:
    label: str
    operator: str
    value: str

    def alternatives(self) -> list[str]:
        """The values that it names; none for a variable or a real regular expression."""
        if "$" in self.value or (self.operator in ("=~", "!~") and re.search(r"[.*+?()\[\]]", self.value)):
            return []
        return self.value.split("|") if self.operator in ("=~", "!~") else [self.value]


@dataclass
class Selector:
    metric: str
    matchers: list[Matcher] = field(default_factory=list)


@dataclass
class Asked:
    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)


def read(expression: str) -> Asked:
    """Raises ValueError for what it does not understand, so that nothing goes unchecked."""
    tokens = _TOKEN.findall(expression)
    asked = Asked()
    at = 0
    while at < len(tokens):
        token = tokens[at]
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        if token in _CLAUSES:
            if following != "(":
                raise ValueError(f"no labels after {token}: {expression}")
            end = tokens.index(")", at)
            asked.grouping |= {word for word in tokens[at + 2 : end] if word != ","}
            at = end + 1
            continue
        if not _NAME.fullmatch(token) or token in _WORDS | _AGGREGATIONS or following == "(":
            at += 1
            continue
        selector = Selector(token)
        asked.selectors.append(selector)
        at += 1
        if following == "{":
            end = tokens.index("}", at)
            inner = tokens[at + 1 : end]
            while inner:
                label, operator, value, *inner = inner
                if operator not in ("=", "!=", "=~", "!~") or not value.startswith('"'):
                    raise ValueError(f"no matcher: {label} {operator} {value} in {expression}")
                selector.matchers.append(Matcher(label, operator, value[1:-1]))
                if inner and inner[0] == ",":
                    inner = inner[1:]
            at = end + 1
    return asked


def mistakes(
    expression: str, labels_of: dict[str, frozenset[str]], values_of: dict[tuple[str, str], frozenset[str]]
) -> list[str]:
    """What the expression asks for in vain.

    `labels_of`: labels of every series that exists (`…_bucket`, recorded ones too), those of the scrape included.
    `values_of`: closed sets of values by series and label.
    """
    asked = read(expression)
    found = [] if asked.selectors else ["asks for nothing"]
    known: set[str] = set()
    for selector in asked.selectors:
        labels = labels_of.get(selector.metric)
        if labels is None:
            found.append(f"there is no series {selector.metric}")
            continue
        known |= labels
        for matcher in selector.matchers:
            if matcher.label not in labels:
                found.append(f"{selector.metric} has no label {matcher.label}")
            allowed = values_of.get((selector.metric, matcher.label))
            for value in matcher.alternatives():
                if allowed is not None and value not in allowed:
                    found.append(f"{matcher.label} of {selector.metric} is never {value}")
    found += [f"nothing here has the label {label}" for label in asked.grouping - known]
    return found
