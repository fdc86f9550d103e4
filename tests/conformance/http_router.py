"""A real HTTP server with the router's application on a free port; only the orchestrator behind it is a script."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from router.http.app import build_app
from router.http.services import HttpServices
from router.open_requests import OpenRequests
from router.requests import ModelFacts
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.validation import RequestValidator
from rpc.errors import BatonError, ErrorCode
from rpc.http_server import HttpServer
from rpc.metrics import Registry
from tests.unit.router import tokenizer_folders as folders
from tests.unit.router.scripted_serving import Script, ScriptedServing, answering

MODEL = "tiny"
CONTEXT = 256
ANSWER = "The capital of France is Paris."


class Workers:
    """A list of servers, which keeps what it is told."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], str] = {}

    def describe(self) -> list[dict[str, Any]]:
        return [{"role": role, "address": address, "state": state} for (role, address), state in self.known.items()]

    def add(self, role: str, address: str) -> object:
        if ":" not in address:
            raise BatonError(
                ErrorCode.INVALID_PARAMS, f"address {address!r} must have the form host:port", param="address"
            )
        self.known[role, address] = "unhealthy"
        return None

    def remove(self, role: str, address: str) -> bool:
        return self.known.pop((role, address), None) is not None


@dataclass
class Lines:
    """The access log."""

    records: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    written: asyncio.Event = field(default_factory=asyncio.Event)

    def arrived(self, **fields: Any) -> None:
        self.arrivals.append(fields)

    def record(self, *, request_id: str, code: str, **fields: Any) -> None:
        self.records.append({"request_id": request_id, "code": code, **fields})
        self.written.set()

    async def last(self) -> dict[str, Any]:
        """The newest line, once there is one."""
        async with asyncio.timeout(10):
            await self.written.wait()
        return self.records[-1]


@dataclass
class RunningRouter:
    url: str
    port: int
    client: httpx.AsyncClient
    serving: ScriptedServing
    tokenizer: Tokenizer
    metrics: Registry
    workers: Workers
    open_requests: OpenRequests
    access_log: Lines

    def play(self, script: Script) -> None:
        self.serving.script = script

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def eos(self) -> int:
        return self.serving.facts.eos_token_ids[0]

    def figure(self, name: str, **labels: str) -> float:
        """The value of a series (of a histogram: its count); 0 when there is none."""
        wanted = {**labels}
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in family.samples:
                if sample.name in (name, f"{name}_count") and wanted.items() <= sample.labels.items():
                    return sample.value
        return 0.0


@functools.cache
def chat_model() -> Path:
    """A model folder as far as the router reads one; made once a process."""
    folder = tempfile.TemporaryDirectory(prefix="baton-chat-model-")
    atexit.register(folder.cleanup)
    return folders.chat_folder(Path(folder.name))


class _Server(HttpServer):
    """Ends at once: a server that ends in order looks every tenth of a second whether all have left."""

    async def stop(self, grace_s: float = 0.0) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        work = list(self._server.server_state.tasks)
        for each in work:
            each.cancel()
        await asyncio.gather(task, *work, return_exceptions=True)


@asynccontextmanager
async def running_router(**options: Any) -> AsyncIterator[RunningRouter]:
    """`options` go to `HttpServices`, but for `chat` (False takes the chat template away), `log_content` and
    `request_timeout_s`."""
    folder = chat_model()
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens) if options.pop("chat", True) else None
    log_content = options.pop("log_content", False)
    eos = tokenizer.encode("<|im_end|>")[0]
    facts = ModelFacts((MODEL, "alias"), str(folder), CONTEXT, tokenizer.vocab_size, (eos,))
    metrics = Registry("router", process_metrics=False)
    access_log = Lines()
    open_requests = OpenRequests(
        metrics,
        request_timeout_s=options.pop("request_timeout_s", 60.0),
        served_names=lambda: facts.served_names,
        access_log=access_log,
    )
    script = answering([*tokenizer.encode(ANSWER), eos], stop_token_id=eos, cached=4)
    serving = ScriptedServing(facts, script, open_requests=open_requests)
    workers = Workers()

    async def flush_cache() -> list[dict[str, Any]]:
        return [{"role": role, "address": address, "ok": True} for role, address in workers.known]

    services = HttpServices(
        serving=serving,
        open_requests=open_requests,
        validator=RequestValidator(tokenizer, template, serving.model, log_content=log_content),
        workers=workers,
        metrics=metrics,
        flush_cache=flush_cache,
        load=lambda: {"inflight": len(open_requests), "queued": 0, "workers": []},
        server_info=lambda: {"model": MODEL},
        **options,
    )
    server = _Server(build_app(services))
    port = await server.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
            yield RunningRouter(url, port, client, serving, tokenizer, metrics, workers, open_requests, access_log)
    finally:
        await server.stop()
        tokenizer.close()


def events_of(body: str | bytes) -> list[Any]:
    """The parsed `data:` events of a stream; comments are left out, the end is the string `[DONE]`."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n")
    events: list[Any] = []
    for block in text.split("\n\n")[:-1]:
        assert "\n" not in block
        if block.startswith(": "):
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
