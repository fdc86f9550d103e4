"""The HTTP side of the command line: streamed chat completions and plain GETs against a router."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx


class ApiError(Exception):
    """The router answered with an error; `name` and `code` are those of the error table."""

    def __init__(self, status: int, name: str, code: int, message: str) -> None:
        # The status of a stream that has begun says nothing of how it ends.
        where = "in mid-stream" if status == 200 else f"HTTP {status}"
        super().__init__(f"{message} ({name} {code}, {where})")
        self.status, self.name, self.code = status, name, code


@dataclass
class StreamedAnswer:
    """What one streamed answer carried besides its text."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    baton: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def raise_api_error(status: int, body: bytes) -> NoReturn:
    """Raises the ApiError that an error answer stands for."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), int(error.get("baton_code", 0))
        name = str(error.get("code", ""))
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace") or "no router's answer; is --base-url right?"
        raise ApiError(status, "UNKNOWN_ERROR", 514, text) from None
    if status == 401:
        message = "the router wants its API key: --api-key, or BATON_API_KEY"  # its own words are for HTTP clients
    raise ApiError(status, name, code, message)


def auth_headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def get_json(base_url: str, path: str, api_key: str = "", timeout_s: float = 5.0) -> Any:
    """GET that returns the JSON body. Raises ApiError or httpx.HTTPError."""
    response = httpx.get(base_url + path, headers=auth_headers(api_key), timeout=timeout_s)
    if response.status_code != 200:
        raise_api_error(response.status_code, response.content)
    return response.json()


def stream_chat(
    base_url: str, body: dict[str, Any], answer: StreamedAnswer, api_key: str = "", timeout_s: float = 600.0
) -> Generator[str, None, None]:
    """Yields the pieces of text of one chat completion and fills `answer`. Raises ApiError, also in mid-stream."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = base_url + "/v1/chat/completions"
    timeout = httpx.Timeout(timeout_s, connect=5.0)
    with httpx.stream("POST", url, json=body, headers=auth_headers(api_key), timeout=timeout) as response:
        answer.headers = dict(response.headers)
        if response.status_code != 200:
            raise_api_error(response.status_code, response.read())
        done = False
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            payload = line[len("data: ") :]
            if payload == "[DONE]":
                done = True
                break
            event = json.loads(payload)
            if "error" in event:
                raise_api_error(response.status_code, payload.encode())
            answer.usage = event.get("usage") or answer.usage
            answer.baton.update(event.get("baton") or {})
            for choice in event["choices"]:
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                text = choice["delta"].get("content") or ""
                if text:
                    answer.text += text
                    yield text
        if not done:
            raise ApiError(response.status_code, "UNKNOWN_ERROR", 514, "the stream broke off before its end")
