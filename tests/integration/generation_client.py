"""A client of the router's gRPC API that gets token ids: the one with which tests compare tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import common_pb2, generation_pb2, generation_pb2_grpc
from rpc.errors import BatonError
from rpc.ids import new_request_id
from rpc.status import details_payload, parse_status

TIMEOUT_S = 30.0
FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass
class Answer:
    """One choice of a complete answer."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_token_id: int | None = None
    path: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    graph_status: str = ""  # of the prefill graph, the same in every message of the choice
    timeline: dict[str, float] = field(default_factory=dict)


def assert_same_answer(found: Answer, expected: Answer) -> None:
    """Tokens, text, end, and how the prompt was computed; ids, times and the path may differ."""
    for name in ("token_ids", "text", "finish_reason", "stop_token_id", "prompt_tokens", "graph_status"):
        assert getattr(found, name) == getattr(expected, name), name


def request_of(
    prompt: Sequence[int] | Sequence[Mapping[str, str]],
    max_tokens: int,
    *,
    request_id: str = "",
    salt: str = "",
    n: int = 1,
    priority: int = 0,
    stop: Sequence[str] = (),
    **sampling: Any,
) -> generation_pb2.GenerateRequest:
    """`prompt`: token ids, or messages of a chat. Greedy, and on through the end-of-sequence token, unless `sampling`
    says otherwise."""
    values = {"temperature": 0.0, "ignore_eos": True, "seed": 1, **sampling}
    request = generation_pb2.GenerateRequest(
        request_id=request_id or new_request_id(),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **values),
        cache_salt=salt,
        priority=priority,
        n=n,
        stop=stop,
    )
    if isinstance(prompt[0], Mapping):
        request.messages.messages.extend(generation_pb2.ChatMessage(**message) for message in prompt)  # type: ignore
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request


class Generation:
    """A request whose stream is read on a thread of its own, so that a test can act in the middle of it."""

    def __init__(self, stub: Any, request: generation_pb2.GenerateRequest, timeout_s: float) -> None:
        self.request_id = request.request_id
        self.error: BatonError | None = None
        self.ended_at = 0.0  # time.monotonic()
        self._answers = [Answer(request.request_id) for _ in range(request.n)]
        self._news = threading.Condition()
        self._ended = False
        self._failure: BaseException | None = None
        self._call = stub.Generate(request, timeout=timeout_s)
        self._thread = threading.Thread(target=self._read, name=f"read-{request.request_id}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for message in self._call:
                with self._news:
                    self._take(message)
                    self._news.notify_all()
        except grpc.RpcError as failure:
            error = parse_status(details_payload(failure.trailing_metadata()))
            if error is None or failure.code() is not error.spec.grpc:
                self._failure = failure
            self.error = error
        except BaseException as failure:
            self._failure = failure
        finally:
            with self._news:
                self.ended_at = time.monotonic()
                self._ended = True
                self._news.notify_all()

    def _take(self, message: generation_pb2.GenerateResponse) -> None:
        answer = self._answers[message.index]
        for token in message.tokens:
            # Every index exactly once and in order, whatever failed behind the router.
            assert token.index == len(answer.token_ids), f"index {token.index} after {len(answer.token_ids)} tokens"
            answer.token_ids.append(token.token_id)
        answer.text += message.text
        if message.finish_reason:
            answer.finish_reason = FINISH[message.finish_reason]
            answer.stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
        status = message.baton.prefill_cuda_graph_status
        # Whoever had the first token had computed the prompt; an abort may come before.
        assert status or not message.tokens, f"no prefill CUDA-graph status in {message}"
        assert answer.graph_status in ("", status), f"{status!r} after {answer.graph_status!r}"
        answer.graph_status = status
        for each in self._answers:
            if message.HasField("baton"):
                each.path, each.attempts = message.baton.path or each.path, message.baton.attempts
                each.timeline = dict(message.baton.timeline)
            if message.HasField("usage"):
                each.prompt_tokens, each.cached_tokens = message.usage.prompt_tokens, message.usage.cached_tokens

    def cancel(self) -> None:
        """The client goes away."""
        self._call.cancel()

    @property
    def token_ids(self) -> list[int]:
        """What has come so far of the first choice."""
        with self._news:
            return list(self._answers[0].token_ids)

    def wait_tokens(self, count: int, limit_s: float = TIMEOUT_S) -> None:
        """Until the first choice has `count` tokens, while the stream goes on."""
        with self._news:
            answer = self._answers[0]
            self._news.wait_for(lambda: self._ended or len(answer.token_ids) >= count, limit_s)
            assert not self._ended, f"the stream ended after {len(answer.token_ids)} tokens: {self.error}"
            assert len(answer.token_ids) >= count, f"{len(answer.token_ids)} of {count} tokens within {limit_s:g} s"

    def wait_end(self, limit_s: float = TIMEOUT_S) -> None:
        """Until the stream has ended, in order or with `error`. An error without one of Baton's codes is raised."""
        with self._news:
            assert self._news.wait_for(lambda: self._ended, limit_s), (
                f"{self.request_id}: no end within {limit_s:g} s; {len(self._answers[0].token_ids)} tokens came"
            )
        if self._failure is not None:
            raise self._failure

    def answers(self, limit_s: float = TIMEOUT_S) -> list[Answer]:
        """All choices of a request that succeeds; raises its BatonError when it fails."""
        self.wait_end(limit_s)
        if self.error is not None:
            raise self.error
        assert all(answer.finish_reason for answer in self._answers), "a choice has no finish reason"
        return self._answers

    def answer(self, limit_s: float = TIMEOUT_S) -> Answer:
        """The only choice."""
        (answer,) = self.answers(limit_s)
        return answer


class GenerationClient:
    """The Generation service at one address. A context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.stub = generation_pb2_grpc.GenerationStub(self._channel)

    def __enter__(self) -> GenerationClient:
        return self

    def __exit__(self, *unused: object) -> None:
        self._channel.close()

    def open(self, prompt: Any, max_tokens: int, *, timeout_s: float = TIMEOUT_S, **options: Any) -> Generation:
        """Starts a request; `options` are those of `request_of`."""
        return Generation(self.stub, request_of(prompt, max_tokens, **options), timeout_s)

    def generate(self, prompt: Any, max_tokens: int, *, timeout_s: float = TIMEOUT_S, **options: Any) -> Answer:
        """One request to its end; raises BatonError."""
        return self.open(prompt, max_tokens, timeout_s=timeout_s, **options).answer(timeout_s)

    def abort(self, request_id: str) -> bool:
        return bool(self.stub.Abort(generation_pb2.AbortRequest(request_id=request_id), timeout=TIMEOUT_S).found)
