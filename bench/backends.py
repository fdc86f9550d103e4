"""How the load generator talks to a server: OpenAI completions, OpenAI chat, or Baton's gRPC API.

Each back end sends one request and books every chunk into a RequestResult. The clock is read when the chunk was read
from the socket. A request counts as failed when it answers with an error, breaks off, lacks the end mark, or gives
another number of tokens than asked for under --ignore-eos.

A chunk's token count is the growth of `completion_tokens` in its running usage (`continuous_usage_stats`). A server
that does not send it has its chunks counted as one token each, and the total corrected by the usage at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.datasets import Prompt
from bench.http_stream import END_OF_EVENTS, HttpFailed, HttpPool
from bench.results import RequestResult
from protos import common_pb2, generation_pb2, generation_pb2_grpc

ERROR_TEXT_LENGTH = 200
END_TIMEOUT_S = 1.0  # from the end mark to the end of the answer
# Pieces of a malformed answer surface as one of these.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Target:
    """Where to send requests, and with what."""

    base_url: str  # http://host:port, or host:port for gRPC
    endpoint: str
    model: str
    ignore_eos: bool = True
    api_key: str = ""
    temperature: float = 0.0
    seed: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    itl_per_token: bool = True
    timeout_s: float = 600.0


class RequestFailed(Exception):
    """The server answered with an error or broke the stream off."""


class Backend(ABC):
    """One kind of client. `epoch` is the reading of `clock` at which the benchmark began."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self._clock = clock
        self.epoch = clock()

    def now(self) -> float:
        """Seconds since the benchmark began."""
        return self._clock() - self.epoch

    def restart_clock(self) -> None:
        """The benchmark begins now; what was sent before was warm-up."""
        self.epoch = self._clock()

    @abstractmethod
    async def _send(self, prompt: Prompt, result: RequestResult) -> None:
        """Sends and books; raises on any failure."""

    @abstractmethod
    async def close(self) -> None: ...

    async def send(self, prompt: Prompt, lateness_s: float = 0.0) -> RequestResult:
        """Runs one request to its end; failures are in `error`, never raised."""
        result = RequestResult(self.now(), len(prompt.token_ids), lateness_s)
        try:
            await self._send(prompt, result)
        except grpc.aio.AioRpcError as error:
            result.error = f"{error.code().name}: {error.details()}"
        except (RequestFailed, HttpFailed) as error:
            result.error = str(error)
        except TimeoutError:
            result.error = f"no end within {self.target.timeout_s:g} s"
        except _MALFORMED as error:
            result.error = f"malformed answer: {error!r}"[:ERROR_TEXT_LENGTH]
        else:
            if self.target.ignore_eos and result.output_tokens != prompt.output_tokens:
                result.error = f"{result.output_tokens} tokens instead of {prompt.output_tokens}"
            elif result.output_tokens == 0:
                result.error = "no token"
        result.ended_at = self.now() if result.error or result.last_token_at is None else result.last_token_at
        return result


class _OpenAi(Backend):
    def __init__(self, target: Target, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(target, clock)
        headers = dict(target.headers)
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._pool = HttpPool(target.base_url, headers, clock)

    @abstractmethod
    def _body(self, prompt: Prompt) -> dict[str, Any]: ...

    async def close(self) -> None:
        self._pool.close()

    async def _send(self, prompt: Prompt, result: RequestResult) -> None:
        target = self.target
        body = {
            "model": target.model,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._body(prompt),
            **({"ignore_eos": True} if target.ignore_eos else {}),
            **({"seed": target.seed} if target.seed is not None else {}),
            **target.extra_body,
        }
        encoded = json.dumps(body).encode()
        result.sent_at = self.now()
        async with asyncio.timeout(target.timeout_s), self._pool.post(target.endpoint, encoded) as answer:
            if await answer.wait_status() != 200:
                text = (await answer.body()).decode(errors="replace")
                raise RequestFailed(f"HTTP {answer.status}: {text[:ERROR_TEXT_LENGTH]}")
            async for at, data in answer.events():
                if data == END_OF_EVENTS:
                    await answer.finish(END_TIMEOUT_S)
                    return
                self._book(json.loads(data), at - self.epoch, result)
        raise RequestFailed("the stream ended without [DONE]")

    def _book(self, chunk: dict[str, Any], now: float, result: RequestResult) -> None:
        if "error" in chunk:
            raise RequestFailed(f"{chunk['error'].get('code')}: {chunk['error'].get('message')}")
        choices = chunk["choices"]
        deltas = [c.get("delta") or {} for c in choices]
        text = "".join(c.get("text") or d.get("content") or "" for c, d in zip(choices, deltas, strict=True))
        result.text += text
        usage = chunk.get("usage") or {}
        total = usage.get("completion_tokens")
        if total is None:
            # What a model thinks before its answer is made of tokens like any other.
            thought = any(d.get("reasoning_content") or d.get("reasoning") for d in deltas)
            result.chunk(now, 1 if text or thought else 0, self.target.itl_per_token)
        elif choices:
            result.chunk(now, int(total) - result.output_tokens, self.target.itl_per_token)
        else:
            result.correct_total(int(total))
        details = usage.get("prompt_tokens_details") or {}
        result.cached_tokens = int(details.get("cached_tokens") or result.cached_tokens)
        result.prompt_tokens = int(usage.get("prompt_tokens", result.prompt_tokens))
        details = chunk.get("baton") or {}
        result.path = details.get("path", result.path)
        result.timeline = details.get("timeline") or result.timeline


class OpenAiCompletions(_OpenAi):
    def _body(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt": prompt.token_ids, "max_tokens": prompt.output_tokens}


class OpenAiChat(_OpenAi):
    def _body(self, prompt: Prompt) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt.text}]
        return {"messages": messages, "max_completion_tokens": prompt.output_tokens}


class BatonGrpc(Backend):
    def __init__(self, target: Target, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(target, clock)
        address = target.base_url.removeprefix("http://")
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def _send(self, prompt: Prompt, result: RequestResult) -> None:
        target = self.target
        sampling = common_pb2.SamplingParams(
            max_tokens=prompt.output_tokens, temperature=target.temperature, ignore_eos=target.ignore_eos
        )
        if target.seed is not None:
            sampling.seed = target.seed
        request = generation_pb2.GenerateRequest(
            model=target.model,
            token_ids=generation_pb2.TokenIds(ids=prompt.token_ids),
            sampling=sampling,
            stream=True,
        )
        metadata = [(name.lower(), value) for name, value in target.headers.items()]
        if target.api_key:
            metadata.append(("authorization", f"Bearer {target.api_key}"))
        result.sent_at = self.now()
        finished = False
        call: Any = self._stub.Generate(request, metadata=tuple(metadata), timeout=target.timeout_s)
        async for message in call:
            result.chunk(self.now(), len(message.tokens), target.itl_per_token)
            result.text += message.text
            result.token_ids += [token.token_id for token in message.tokens]
            if message.HasField("usage"):
                result.cached_tokens = message.usage.cached_tokens
                result.prompt_tokens = message.usage.prompt_tokens
            result.path = message.baton.path or result.path
            result.timeline = dict(message.baton.timeline) or result.timeline
            finished = finished or message.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        if not finished:
            raise RequestFailed("the stream ended without a finish reason")


BACKENDS: dict[str, tuple[type[Backend], str, int]] = {
    # name: (class, endpoint, default port)
    "openai": (OpenAiCompletions, "/v1/completions", 8000),
    "openai-chat": (OpenAiChat, "/v1/chat/completions", 8000),
    "baton-grpc": (BatonGrpc, "", 8001),
}
