"""The OpenAPI document of the HTTP API, served at `/openapi.json`: every path, body, answer and failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.http.openapi_fields import FIELDS, LOGPROBS_FLAG, LOGPROBS_NUMBER, Schema
from router.http.request_scope import OPEN_PATHS
from router.http.schemas import AbortBody, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, WorkerBody
from router.validation import MAX_SESSION_CHARS, SINGLE_SERVER_KEY
from rpc.errors import TABLE, ErrorCode
from rpc.server import PRIVATE_KEY
from rpc.version import version

JSON = "application/json"
# What a body must have beside its declared types.
_REQUIRED = {
    CompletionBody: ["prompt"],
    ChatBody: ["messages"],
    DetokenizeBody: ["tokens"],
    AbortBody: ["request_id"],
    WorkerBody: ["role", "address"],
}
_REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "id of the request from end to end; absent: a new one",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
}
_TIMELINE: Schema = {
    "name": "x-baton-timeline",
    "in": "header",
    "description": "1: the answer, or the error, says how long each stage of each process took",
    "schema": {"enum": ["1"]},
}
_YES: Schema = {"enum": ["1"]}
_CHOICE: tuple[Schema, ...] = (
    {
        "name": "X-Session-Id",
        "in": "header",
        "description": "what keeps requests together under --policy session",
        "schema": {"type": "string", "maxLength": MAX_SESSION_CHARS},
    },
    {
        "name": SINGLE_SERVER_KEY,
        "in": "header",
        "description": "1: one server does all of it, where one may",
        "schema": _YES,
    },
)
_PRIVATE: Schema = {
    "name": PRIVATE_KEY,
    "in": "header",
    "description": "1: nothing is logged of it but a failure",
    "schema": _YES,
}
_OBJECT: Schema = {"type": "object"}
_NULLABLE_NUMBER: Schema = {"type": ["number", "null"]}


def _body(kind: type[Body]) -> Schema:
    """The body's schema; unknown fields are ignored."""
    properties = {name: FIELDS.get(name, {}) for name in kind.model_fields}
    if kind is ChatBody:
        properties["logprobs"] = LOGPROBS_FLAG
    elif kind is CompletionBody:
        properties["logprobs"] = LOGPROBS_NUMBER
    return {"type": "object", "properties": properties, "required": _REQUIRED.get(kind, [])}


def _object(required: Iterable[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _strings(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)} if values else {"type": "string"}


_USAGE = _object(
    prompt_tokens={"type": "integer"},
    completion_tokens={"type": "integer"},
    total_tokens={"type": "integer"},
    prompt_tokens_details={"type": ["object", "null"]},
)
_BATON = _object(
    prefill_cuda_graph_status={"type": ["string", "null"]},
    path={"type": ["string", "null"], "enum": ["pd", "colocated", None]},
    attempts={"type": "integer"},
    speculative_draft_rounds={"type": "integer"},
    speculative_accepted_tokens_per_pos=_list({"type": "number"}),
    timeline={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
)


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices=_list(choice),
        usage=_USAGE,
        baton=_BATON,
    )


_END: dict[str, Schema] = {
    "index": {"type": "integer"},
    "logprobs": {"type": ["object", "null"]},
    "finish_reason": {"enum": ["stop", "length", "abort", "tool_calls"]},
    "stop_reason": {"type": ["string", "integer", "null"]},
}
SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            message={"type": "string", "minLength": 1},
            type={
                "enum": [
                    "invalid_request_error", "authentication_error", "timeout_error", "rate_limit_error",
                    "server_error", "service_unavailable_error",
                ]
            },
            param={"type": ["string", "null"]},
            code={"type": "string"},
            baton_code={"enum": [int(code) for code in ErrorCode if code is not ErrorCode.NONE_ERROR]},
        ),
    ),
    "CompletionRequest": _body(CompletionBody),
    "ChatRequest": _body(ChatBody),
    "TokenizeRequest": _body(TokenizeBody),
    "DetokenizeRequest": _body(DetokenizeBody),
    "AbortRequest": _body(AbortBody),
    "WorkerRequest": _body(WorkerBody),
    "Completion": _answer("text_completion", _object(text={"type": "string"}, **_END)),
    "Chat": _answer("chat.completion", _object(message=_object(("role",), role={"const": "assistant"}), **_END)),
    "Tokens": _object(
        tokens=_list({"type": "integer"}), count={"type": "integer"}, max_model_len={"type": "integer"}
    ),
    "Models": _object(
        object={"const": "list"},
        data=_list(
            _object(
                id={"type": "string"}, object={"const": "model"}, created={"type": "integer"},
                owned_by={"type": "string"}, root={"type": "string"}, max_model_len={"type": "integer"},
            )
        ),
    ),
    "Ready": _object(ready={"type": "boolean"}, reasons=_list({"type": "string"})),
}  # fmt: skip


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: Schema, *, stream: bool = False) -> Schema:
    content: Schema = {JSON: {"schema": schema}}
    if stream:
        event = _object(("data",), data={"type": "string", "description": "a chunk as JSON, or [DONE]"})
        content["text/event-stream"] = {"schema": {"description": "each event of the stream", **event}}
    return content


def _failures(statuses: Iterable[int]) -> dict[str, Schema]:
    """A response for each status, with the names of its codes."""
    found: dict[str, Schema] = {}
    for status in sorted(set(statuses)):
        names = [spec.name for spec in TABLE.values() if spec.http == status]
        found[str(status)] = {"description": ", ".join(names), "content": _content(_ref("Error"))}
    return found


# Failures that any path can have, those with a body, and those of a generation.
_ANY = (400, 401, 405, 500)
_WITH_BODY = (*_ANY, 404, 408, 413, 415, 504)
_GENERATION = tuple(spec.http for spec in TABLE.values() if spec.http is not None and spec.http >= 400)


def _operation(
    name: str,
    summary: str,
    answer: Schema,
    *,
    status: int = 200,
    body: str | None = None,
    failures: Iterable[int] = _ANY,
    parameters: Iterable[Schema] = (_REQUEST_ID,),
    opened: bool = False,
    more: dict[str, Schema] | None = None,
) -> Schema:
    operation: Schema = {
        "operationId": name,
        "summary": summary,
        "parameters": list(parameters),
        "responses": {str(status): {"description": summary, **answer}, **_failures(failures), **(more or {})},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(body)}}}
    if opened:
        operation["security"] = []
    return operation


def _probes() -> dict[str, Schema]:
    """What load balancers and scrapers ask, without a key."""
    empty: Schema = {}
    not_ready = {"503": {"description": "it cannot serve now"}}
    reasons = {"503": {"description": "why it cannot serve now", "content": _content(_ref("Ready"))}}
    version_page = {"content": _content(_object(("version",), version={"type": "string"}))}
    pages: dict[str, tuple[str, Schema, dict[str, Schema]]] = {
        "/live": ("whether the process runs", empty, {}),
        "/ready": ("whether it can serve", {"content": _content(_ref("Ready"))}, reasons),
        "/health": ("whether it can serve, without a body", empty, not_ready),
        "/version": ("the version", version_page, {}),
        "/metrics": ("figures for Prometheus", {"content": {"text/plain": {"schema": {"type": "string"}}}}, {}),
    }
    paths: dict[str, Schema] = {}
    other_names = {"/live": "/liveness", "/ready": "/readiness", "/health": "/ping"}
    for path, (summary, answer, more) in pages.items():
        for name in filter(None, (path, other_names.get(path))):
            operation = _operation(
                name.strip("/"), summary, answer, failures=(405,), parameters=(), opened=True, more=more
            )
            paths[name] = {"get": operation}
    assert paths.keys() == OPEN_PATHS, paths.keys() ^ OPEN_PATHS
    return paths


def _paths() -> dict[str, Schema]:
    generation: dict[str, Any] = {"failures": _GENERATION, "parameters": (_REQUEST_ID, _TIMELINE, _PRIVATE, *_CHOICE)}
    worker = [
        {"name": "role", "in": "path", "required": True, "schema": _strings("prefill", "decode")},
        {"name": "address", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[^/?#]+$"}},
    ]
    told = {"content": _content(_object(role=_strings(), address=_strings(), accepted={"const": True}))}
    removed = {"content": _content(_object(role=_strings(), address=_strings(), removed={"const": True}))}
    pages = {
        "/v1/completions": {
            "post": _operation(
                "completions", "an answer to a prompt", {"content": _content(_ref("Completion"), stream=True)},
                body="CompletionRequest", **generation,
            )
        },
        "/v1/chat/completions": {
            "post": _operation(
                "chat", "an answer to a conversation", {"content": _content(_ref("Chat"), stream=True)},
                body="ChatRequest", **generation,
            )
        },
        "/v1/models": {"get": _operation("models", "the served names", {"content": _content(_ref("Models"))})},
        "/tokenize": {
            "post": _operation(
                "tokenize", "text, or a conversation, as token ids", {"content": _content(_ref("Tokens"))},
                body="TokenizeRequest", failures=_WITH_BODY,
            )
        },
        "/detokenize": {
            "post": _operation(
                "detokenize", "token ids as text", {"content": _content(_object(prompt=_strings()))},
                body="DetokenizeRequest", failures=_WITH_BODY,
            )
        },
        "/abort_request": {
            "post": _operation(
                "abort_request", "ends a request, or refuses one that has yet to come",
                {"content": _content(_object(request_id=_strings(), found={"type": "boolean"}))},
                body="AbortRequest", failures=_WITH_BODY,
            )
        },
        "/workers": {
            "get": _operation(
                "workers", "the servers behind the router", {"content": _content(_object(workers=_list(_OBJECT)))}
            ),
            "post": _operation(
                "add_worker", "takes a server in, which gets requests once it fits", told, status=202,
                body="WorkerRequest", failures=(*_WITH_BODY, 409),
            ),
        },
        "/workers/{role}/{address}": {
            "delete": _operation(
                "remove_worker", "gives a server no more requests", removed, failures=(*_ANY, 404),
                parameters=(*worker, _REQUEST_ID),
            )
        },
        "/load": {
            "get": _operation(
                "load", "open and waiting requests",
                {"content": _content(_object(("inflight", "queued", "workers"), inflight=_NULLABLE_NUMBER))},
            )
        },
        "/flush_cache": {
            "post": _operation(
                "flush_cache", "empties every server's prefix cache, on its own disk too",
                {"content": _content(_object(results=_list(_OBJECT)))},
            )
        },
        "/server_info": {
            "get": _operation("server_info", "the configuration, without secrets", {"content": _content(_OBJECT)})
        },
        "/openapi.json": {"get": _operation("openapi", "this document", {"content": _content(_OBJECT)})},
    }  # fmt: skip
    return pages | _probes()


def _profiles() -> dict[str, Schema]:
    result = _object(("role", "address", "ok"), role=_strings("prefill", "decode"), ok={"type": "boolean"})
    answer: Schema = {"content": _content(_object(results=_list(result)))}
    return {
        "/start_profile": {"post": _operation("start_profile", "records what every engine does", answer)},
        "/stop_profile": {"post": _operation("stop_profile", "ends the recordings and says where they are", answer)},
    }


def document(*, needs_key: bool, profiling: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1 of the router. `needs_key`: it has been given an API key. `profiling`: profiles may be recorded."""
    content: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton router",
            "version": version(),
            "description": "OpenAI's completions and chat, and what operators need.",
        },
        "paths": _paths() | (_profiles() if profiling else {}),
        "components": {"schemas": SCHEMAS},
    }
    if needs_key:
        content["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        content["security"] = [{"key": []}]
    return content
