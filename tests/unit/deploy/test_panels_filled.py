"""Every panel, recorded series and annotation shows something when everything that can happen does happen.

One registry per role books an event on each of its families, over and over; a real Prometheus scrapes the three.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rpc.metric_families import Family, Role
from rpc.metrics import CONTENT_TYPE, Registry
from tests.unit.deploy.prometheus import Prometheus, needs_prometheus
from tests.unit.deploy.series import RULE_FILES, rules

CODES = ["NONE_ERROR", "EXECUTION_EXCEPTION", "INVALID_PARAMS"]
# Values of labels without a closed set.
SOME = {
    "status": "replayed", "model_name": "m", "rank": "0", "group": "full", "worker": "127.0.0.1:1", "policy": "random",
    "method": "a/B", "route": "/v1/chat/completions", "reason": "blocks", "bucket": "64", "code": "INVALID_PARAMS",
}  # fmt: skip


def label_sets(family: Family, role: Role) -> list[dict[str, str]]:
    """As many as the largest set of a label has values, so that each value occurs; of codes those that matter here."""
    names = [label for label in family.all_labels(role) if not (label == "role" and family.own_role)]
    choices = [sorted(family.values.get(name, ())) or [SOME.get(name, "x")] for name in names]
    choices = [values if len(values) < 40 else CODES for values in choices]
    return [
        {name: values[number % len(values)] for name, values in zip(names, choices, strict=True)}
        for number in range(max((len(values) for values in choices), default=1))
    ]


class Busy:
    """A process of a role in which everything happens once between two scrapes."""

    def __init__(self, role: Role) -> None:
        self.registry = Registry(role, colocated=True, tensor_parallel=True)
        self._role: Role = role

    def scraped(self) -> bytes:
        for family in self.registry.families.values():
            for labels in label_sets(family, self._role):
                if family.kind == "counter":
                    self.registry.inc(family.name, **labels)
                elif family.kind == "gauge":
                    self.registry.set(family.name, 1, **labels)
                else:
                    self.registry.observe(family.name, 0.2, **labels)
        return self.registry.render()


@contextmanager
def serving(process: Busy) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = process.scraped()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@needs_prometheus
def test_panels_when_everything_happens_then_none_is_empty(tmp_path: Path) -> None:
    with (
        serving(Busy("router")) as router, serving(Busy("prefill")) as prefill, serving(Busy("decode")) as decode,
        Prometheus([router, prefill, decode], tmp_path) as prometheus,
    ):  # fmt: skip
        prometheus.wait_scrapes(2)
        prometheus.wait_panels("1m")
        prometheus.wait_recorded([rule["record"] for name in RULE_FILES for rule in rules(name) if "record" in rule])
        assert prometheus.rule_errors() == []
