"""The Prefill service: computes a prompt and leaves its KV staged for a decode server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from engine.client import RequestStream
from engine.messages import FinishReason, PrefillInfo, PromptLogprob, RunMode, TokenOutput
from front.abort import abort_request
from front.reception import Reception, RequestScope
from front.validation import missing
from front.wire import prefill_result, timeline
from protos import prefill_pb2, prefill_pb2_grpc
from rpc.errors import BatonError, ErrorCode
from rpc.faults import fault_async

# An answer dropped by a fault point: the caller hears nothing until its deadline, or for this long.
LONGEST_SILENCE_S = 3600.0


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def Prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.PrefillResponse:
        """Answers with the first token. With `hold_kv` the request lives on until its staged KV ends."""
        hold = not request.HasField("hold_kv") or request.hold_kv

        def check() -> None:
            if not request.HasField("hold_kv"):
                raise missing("hold_kv")

        mode = RunMode.PREFILL if hold else RunMode.LOCAL
        async with self._reception.serve(context, mode) as scope:
            stream = scope.admit(request.input, check=check, single_token=not hold)
            response = await self._answer(request, scope, stream)
            if hold:
                response.engine_id = self._reception.engine.engine_id
            scope.answered(held=hold)
            if await fault_async("prefill.answer", request_key=scope.request.request_key):
                await asyncio.sleep(scope.request.deadline.timeout(at_most=LONGEST_SILENCE_S) or LONGEST_SILENCE_S)
        return response

    async def _answer(
        self, message: prefill_pb2.PrefillRequest, scope: RequestScope, stream: RequestStream
    ) -> prefill_pb2.PrefillResponse:
        token: TokenOutput | None = None
        info: PrefillInfo | None = None
        prompt_logprobs: list[PromptLogprob] | None = None
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        async for output in stream:
            scope.note(output)
            token = output.tokens[0] if output.tokens and token is None else token
            info = output.prefill if output.prefill is not None else info
            if output.prompt_logprobs is not None:
                prompt_logprobs = output.prompt_logprobs
            if output.finish_reason is not None:
                finish, stop_token_id = output.finish_reason, output.stop_token_id
        if finish is FinishReason.ABORT:
            raise BatonError(ErrorCode.CANCELLED, "request cancelled by client")
        if token is None or info is None:
            raise BatonError(ErrorCode.UNKNOWN_ERROR, "the engine ended the request without its first token")
        emitted = len(message.input.output_token_ids) + 1
        if finish is FinishReason.LENGTH and emitted < message.input.sampling.max_tokens:
            # This server was asked for one token; whether the request goes on is the caller's affair.
            finish = None
        request = scope.request
        response = prefill_pb2.PrefillResponse(
            result=prefill_result(token, info, prompt_logprobs, finish, stop_token_id),
            timeline=timeline(request.stages(), request.events, request.arrival_ns),
        )
        if message.hold_kv:
            response.kv_generation = info.kv_generation
        return response

    async def Abort(
        self,
        request: prefill_pb2.PrefillAbortRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefill_pb2.PrefillAbortResponse:
        return prefill_pb2.PrefillAbortResponse(found=abort_request(self._reception, request))
