"""The Decode service: loads a prompt's KV from a prefill server, or computes it here, and generates."""

from __future__ import annotations

from typing import Any

import grpc.aio

from engine.client import RequestStream
from engine.messages import FinishReason, KvSource, RequestOutput, RunMode
from front.abort import abort_request
from front.reception import Reception, RequestScope
from front.validation import missing, read_kv_source
from front.wire import FINISH_REASONS, prefill_result, timeline, token_output
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from rpc.errors import BatonError, ErrorCode
from rpc.faults import armed, fault_async

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """`allow_local_prefill`: whether whole requests are served here (colocated)."""

    def __init__(self, reception: Reception, *, allow_local_prefill: bool) -> None:
        self._reception = reception
        self._allow_local_prefill = allow_local_prefill

    # A coroutine that writes, in place of an asynchronous generator: when the call is cancelled while an
    # event is being sent, a generator would be closed by the garbage collector, at some later time.
    async def Decode(  # type: ignore[override]
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> None:
        """Writes the events of the request: Reserved, Loaded, Tokens, Finished; one Tokens event per engine
        step.
        """
        kind = request.WhichOneof("kv")

        def check() -> None:
            if kind is None:
                raise missing("kv_source or local_prefill")
            if kind == "local_prefill" and not self._allow_local_prefill:
                raise BatonError(
                    ErrorCode.INVALID_ROUTE_REQUEST,
                    "this decode server computes no prompts (--no-allow-local-prefill); name a kv_source",
                    param="local_prefill",
                )

        def source() -> KvSource:
            return read_kv_source(request.kv_source)

        mode = RunMode.LOCAL if kind == "local_prefill" else RunMode.DECODE
        async with self._reception.serve(context, mode) as scope:
            stream = scope.admit(request.input, kv_source=source if mode is RunMode.DECODE else None, check=check)
            await self._write_events(scope, stream, context)

    async def _write_events(self, scope: RequestScope, stream: RequestStream, context: Context) -> None:
        request = scope.request
        last: RequestOutput | None = None
        async for output in stream:
            scope.note(output)
            if output.reserved and not await fault_async("decode.reserved", request_key=request.request_key):
                reserved = decode_pb2.Reserved(blocks_in_cache=output.blocks_in_cache)
                await context.write(decode_pb2.DecodeEvent(reserved=reserved))
            if output.loaded:
                loaded = decode_pb2.Loaded(prefill=_prefill_of(output))
                await context.write(decode_pb2.DecodeEvent(loaded=loaded))
            if output.tokens:
                if armed():
                    await fault_async("decode.tokens", request_key=request.request_key)
                tokens = decode_pb2.Tokens(tokens=[token_output(token) for token in output.tokens])
                if output.prefill is not None and not output.loaded:  # the prompt was computed here
                    tokens.prefill.CopyFrom(_prefill_of(output))
                await context.write(decode_pb2.DecodeEvent(tokens=tokens))
            last = output
        if last is None or last.finish_reason is None:
            raise BatonError(ErrorCode.UNKNOWN_ERROR, "the engine ended the request without a reason")
        finished = decode_pb2.Finished(
            finish_reason=FINISH_REASONS[last.finish_reason],
            timeline=timeline(request.stages(), request.events, request.arrival_ns),
            preemptions=last.preemptions,
        )
        if last.finish_reason is FinishReason.STOP and last.stop_token_id is not None:
            finished.stop_token_id = last.stop_token_id
        await context.write(decode_pb2.DecodeEvent(finished=finished))

    async def Abort(self, request: decode_pb2.DecodeAbortRequest, context: Context) -> decode_pb2.DecodeAbortResponse:
        return decode_pb2.DecodeAbortResponse(found=abort_request(self._reception, request))


def _prefill_of(output: RequestOutput) -> common_pb2.PrefillResult:
    """The prompt's result inside the output that brings the first token."""
    if not output.tokens or output.prefill is None:
        raise BatonError(ErrorCode.UNKNOWN_ERROR, "the engine has a prompt's KV without its result")
    ends = len(output.tokens) == 1
    return prefill_result(
        output.tokens[0],
        output.prefill,
        output.prompt_logprobs,
        output.finish_reason if ends else None,
        output.stop_token_id if ends else None,
    )
