"""A real Prometheus with the rules of `deploy/prometheus/` on a free port, which scrapes several times a second.

with Prometheus(["127.0.0.1:9101"], folder) as prometheus:
    prometheus.wait_scrapes(2)
    prometheus.query("sum(baton_ready)")        # -> [({}, 1.0)]
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from deploy.grafana.boards import BOARDS
from deploy.grafana.panels import Board
from tests.unit.deploy.series import PROMETHEUS, RULE_FILES

BINARY = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    BINARY is None, reason="needs prometheus: install the Debian package prometheus (`make test` does, as root)"
)
SCRAPE_S = 0.5
LIMIT_S = 60.0

T = TypeVar("T")
Sample = tuple[dict[str, str], float]


class Prometheus:
    """`targets`: addresses with a `/metrics`. Everything it writes is in `folder`."""

    def __init__(self, targets: Sequence[str], folder: Path) -> None:
        self._folder = folder
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
        every = f"{round(SCRAPE_S * 1000)}ms"
        config["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        for name in RULE_FILES:
            rules = yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))
            for group in rules["groups"]:
                group.pop("interval", None)
            (folder / name).write_text(yaml.safe_dump(rules))
        (folder / "targets").mkdir()
        (folder / "targets" / "test.yml").write_text(yaml.safe_dump([{"targets": list(targets)}]))
        self.targets = list(targets)
        self._log = folder / "log"
        assert BINARY is not None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    BINARY, "--config.file", str(folder / "prometheus.yml"),
                    "--storage.tsdb.path", str(folder / "data"), "--web.listen-address", "127.0.0.1:0",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._http = httpx.Client(timeout=5.0)

    def __enter__(self) -> Prometheus:
        try:
            port = self._until("its port", self._port)
            self._http.base_url = httpx.URL(f"http://127.0.0.1:{port}")
            self._until("its readiness", lambda: self._http.get("/-/ready").is_success)
            self._until("its targets", lambda: len(self._scrapes()) == len(self.targets))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _port(self) -> str | None:
        found = re.search(r'"Listening on" address=127\.0\.0\.1:(\d+)', self._log.read_text(errors="replace"))
        assert found or self._process.poll() is None, self._log.read_text(errors="replace")
        return found[1] if found else None

    def _until(self, what: str, probe: Callable[[], T | None]) -> T:
        limit = time.monotonic() + LIMIT_S
        while True:
            try:
                found = probe()
            except httpx.TransportError:  # it listens before it answers
                found = None
            if found:
                return found
            if time.monotonic() > limit:
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def _get(self, path: str, **parameters: str) -> Any:
        response = self._http.get(f"/api/v1/{path}", params=parameters)
        body = response.json()
        assert body["status"] == "success", (parameters, body)
        return body["data"]

    def _scrapes(self) -> dict[str, str]:
        """Time of the latest scrape by target; only of those that have been scraped with success."""
        targets = self._get("targets")["activeTargets"]
        return {target["scrapeUrl"]: target["lastScrape"] for target in targets if target["health"] == "up"}

    def wait_scrapes(self, count: int) -> None:
        """Until every target has been scraped `count` times from now on, and what came of it can be asked for."""
        for _ in range(count + 1):  # the first one may have begun before
            before = self._scrapes()
            self._until(
                "a scrape of every target",
                lambda before=before: (
                    (now := self._scrapes()).keys() >= before.keys() and all(now[u] != t for u, t in before.items())
                ),
            )

    def query(self, expression: str) -> list[Sample]:
        """The samples of an instant query; those that are no number are left out."""
        found = self._get("query", query=expression)
        assert found["resultType"] == "vector", expression
        samples = [(sample["metric"], float(sample["value"][1])) for sample in found["result"]]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def wait_recorded(self, names: Sequence[str]) -> None:
        """Until all these recorded series have a value."""

        def missing() -> list[str]:
            return [name for name in names if not self.query(name)]

        try:
            self._until("recorded series", lambda: not missing())
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nwithout a value: {missing()}") from None

    def wait_panels(self, window: str, quiet: Collection[str] = ()) -> None:
        """Until every panel but `quiet` ones (`board: panel`) shows something: after a scrape that a busy machine made
        too late, nothing of that process is shown before the next one."""

        def empty() -> list[str]:
            return [name for name in empty_panels(self, window) if name not in quiet]

        try:
            self._until("something in every panel", lambda: not empty())
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nempty: {empty()}") from None

    def active(self, *names: str) -> set[tuple[str, str]]:
        """Name and instance of the alerts, among `names`, whose condition holds, whether for long enough or not."""
        labels = [alert["labels"] for alert in self._get("alerts")["alerts"]]
        return {(one["alertname"], one.get("instance", "")) for one in labels if one["alertname"] in names}

    def rule_errors(self) -> list[str]:
        groups = self._get("rules")["groups"]
        return [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]


def as_shown(board: Board, expression: str, window: str) -> str:
    """An expression with the variables' defaults filled in, as Grafana does it."""
    for variable in board.variables:
        expression = expression.replace(f"${variable.name}", variable.choices[0] if variable.choices else ".*")
    return expression.replace("$__rate_interval", window)


def empty_panels(prometheus: Prometheus, window: str) -> list[str]:
    """`board: panel` of every query that shows nothing."""
    return [
        f"{board.name}: {panel.title}"
        for board in BOARDS
        for panel in board.panels()
        if not all(prometheus.query(as_shown(board, query.expr, window)) for query in panel.queries)
    ]
