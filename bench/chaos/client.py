"""The campaign's clients: one request each over gRPC or HTTP, and all that was seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any, cast

import grpc
import grpc.aio

from bench.chaos.verdict import Outcome
from bench.chaos.workload import SEEDED, Ask, Case, Manner
from bench.http_stream import END_OF_EVENTS, HttpFailed, HttpPool
from protos import common_pb2, generation_pb2, generation_pb2_grpc
from rpc.errors import ErrorCode
from rpc.status import details_payload, parse_status

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
_CALL_S = 5.0  # of a call that carries no request


class Clients:
    """Clients of one router. Belongs to one event loop; close it at the end."""

    def __init__(self, grpc_address: str, http_address: str, limit_s: float) -> None:
        """`limit_s`: a request without an end after this time is hung."""
        self._address = grpc_address
        self._limit_s = limit_s
        self._channel = grpc.aio.insecure_channel(grpc_address, options=_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._http = HttpPool(f"http://{http_address}", {}, time.monotonic)
        self.open: dict[str, float] = {}  # request id: when it was sent

    async def close(self) -> None:
        self._http.close()
        await self._channel.close()

    async def send(self, ask: Ask, pins: tuple[str, str] | None = None) -> Outcome:
        """Runs one request to its end, whatever that is. `pins`: addresses of the prefill and the decode server."""
        outcome = Outcome(began_s=time.monotonic())
        self.open[ask.request_id] = outcome.began_s
        try:
            async with asyncio.timeout(self._limit_s):
                if ask.door == "http":
                    await self._send_http(ask, outcome)
                else:
                    await self._send_grpc(ask, outcome, pins)
        except TimeoutError:
            outcome.hung = True
        finally:
            outcome.seconds = time.monotonic() - outcome.began_s
            del self.open[ask.request_id]
        return outcome

    # ---- gRPC

    async def _send_grpc(self, ask: Ask, outcome: Outcome, pins: tuple[str, str] | None) -> None:
        channel, stub = None, self._stub
        if ask.manner is Manner.DISCONNECTS:
            channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
            stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            request_id=ask.request_id, sampling=ask.case.sampling(), cache_salt=ask.salt
        )
        request.token_ids.ids.extend(ask.case.prompt)
        metadata = () if pins is None else (("x-baton-prefill", pins[0]), ("x-baton-decode", pins[1]))
        timeout = ask.after_s if ask.manner is Manner.HURRIES else None
        call = stub.Generate(request, timeout=timeout, metadata=metadata)
        leaving = asyncio.get_running_loop().create_task(self._leave(ask, call, channel))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._take(cast(generation_pb2.GenerateResponse, message), outcome)
            await call.code()
            if not outcome.finish_reason:
                outcome.untyped = "the stream ended in order, without a finish reason"
        except grpc.aio.AioRpcError as failure:
            self._take_failure(ask, failure, outcome)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            # Cancelled here, by `_leave`; by the limit it is cancelled from outside.
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            outcome.left = True
        finally:
            leaving.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            if channel is not None:
                await channel.close()

    async def _leave(self, ask: Ask, call: grpc.aio.Call, channel: grpc.aio.Channel | None) -> None:
        if ask.manner not in (Manner.CANCELS, Manner.ABORTS, Manner.DISCONNECTS):
            return
        await asyncio.sleep(ask.after_s)
        if ask.manner is Manner.CANCELS:
            call.cancel()
        elif ask.manner is Manner.DISCONNECTS:
            assert channel is not None
            await channel.close()
        else:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.Abort(generation_pb2.AbortRequest(request_id=ask.request_id), timeout=_CALL_S)

    def _take(self, message: generation_pb2.GenerateResponse, outcome: Outcome) -> None:
        for token in message.tokens:
            if token.index != len(outcome.tokens) and not outcome.out_of_order:
                outcome.out_of_order = f"token index {token.index} after {len(outcome.tokens)} tokens"
            outcome.tokens.append(token.token_id)
        if message.tokens and outcome.first_s is None:
            outcome.first_s = time.monotonic() - outcome.began_s
        if outcome.finish_reason:
            outcome.untyped = "a message after the finish reason" if message.tokens else outcome.untyped
        outcome.text += message.text
        if message.finish_reason:
            outcome.finish_reason = _REASONS.get(message.finish_reason, str(message.finish_reason))
        if message.HasField("baton"):
            outcome.attempts = message.baton.attempts
            outcome.path = message.baton.path or outcome.path

    def _take_failure(self, ask: Ask, failure: grpc.aio.AioRpcError, outcome: Outcome) -> None:
        status = failure.code()
        error = parse_status(details_payload(failure.trailing_metadata()))
        if error is not None:
            outcome.code, outcome.code_name = int(error.code), error.code.name
            if status is not error.spec.grpc:
                outcome.untyped = f"{error.code.name} with the gRPC status {status.name}"
        elif ask.manner is Manner.HURRIES and status is grpc.StatusCode.DEADLINE_EXCEEDED:
            outcome.left = True  # the client's own clock was faster than the answer
        elif ask.manner in (Manner.CANCELS, Manner.DISCONNECTS) and status is grpc.StatusCode.CANCELLED:
            outcome.left = True
        else:
            outcome.untyped = f"gRPC status {status.name} without a code: {failure.details()}"

    # ---- HTTP

    async def _send_http(self, ask: Ask, outcome: Outcome) -> None:
        leaves = ask.manner in (Manner.CANCELS, Manner.DISCONNECTS)
        body = json.dumps(_completion(ask.case, ask.salt)).encode()
        try:
            async with asyncio.timeout(ask.after_s if leaves else None) as until:
                async with self._http.post("/v1/completions", body) as answer:
                    if await answer.wait_status() != 200:
                        _take_error(json.loads(await answer.body()), outcome)
                        return
                    done = False
                    async for _, data in answer.events():
                        if data == END_OF_EVENTS:
                            done = True
                        else:
                            self._take_chunk(json.loads(data), outcome)
                    if not done and outcome.code is None:
                        outcome.untyped = "the stream ended without [DONE] or an error"
        except HttpFailed as failure:
            outcome.untyped = f"the connection broke: {failure}"
        except (ValueError, KeyError, TypeError) as error:
            outcome.untyped = f"malformed answer: {error!r}"
        except TimeoutError:
            if not leaves or not until.expired():
                raise
            outcome.left = True

    def _take_chunk(self, chunk: dict[str, Any], outcome: Outcome) -> None:
        if "error" in chunk:
            _take_error(chunk, outcome)
            return
        for choice in chunk["choices"]:
            if choice["text"] and outcome.first_s is None:
                outcome.first_s = time.monotonic() - outcome.began_s
            outcome.text += choice["text"]
            outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
        details = chunk.get("baton") or {}
        outcome.attempts = details.get("attempts", outcome.attempts)
        outcome.path = details.get("path") or outcome.path


def _completion(case: Case, salt: str) -> dict[str, object]:
    body: dict[str, object] = {
        "prompt": list(case.prompt), "max_tokens": case.max_tokens, "stream": True, "ignore_eos": True,
        "cache_salt": salt,
    }  # fmt: skip
    return body | ({"temperature": 0.0} if case.seed is None else {**SEEDED, "seed": case.seed})


def _take_error(body: dict[str, object], outcome: Outcome) -> None:
    error = body["error"]
    assert isinstance(error, dict)
    outcome.code = int(error["baton_code"])
    names = {int(code): code.name for code in ErrorCode}
    outcome.code_name = names.get(outcome.code, "")
