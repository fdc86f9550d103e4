"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from router.answer import AnswerRequest, Choice, Collected, TextEvent, Usage, answer
from router.http.body import check_media_type, parse_object, read_body
from router.http.connection import while_connected
from router.http.errors import JSON_TYPE, ClientGone
from router.http.logprobs import chat_logprobs, completion_logprobs, echo_logprobs, prompt_logprobs
from router.http.schemas import ChatBody, CompletionBody
from router.http.services import HttpServices
from router.http.sse import DONE, Chunks, EventStream, Kind, encode, error_event, usage_object
from router.http.tool_calls import ToolDeltas, finish_reason, message_of
from router.open_requests import OpenRequest
from router.requests import FinishEvent, FinishReason, PrefillSummary
from router.validation import DECODE_PIN_KEY, PREFILL_PIN_KEY, SESSION_KEY, SINGLE_SERVER_KEY, GenerationParams
from rpc.errors import BatonError, ErrorCode
from rpc.faults import armed, fault_async
from rpc.ids import check_request_id, new_request_id
from rpc.server import PRIVATE_KEY, says_yes
from rpc.stages import in_stage
from rpc.timeline import TIMELINE_KEY, asks

GRAPH_HEADER = "x-baton-prefill-cuda-graph"
# A client that does not read is left this long after its request's own deadline.
SLOW_READER_GRACE_S = 5.0


class GenerationEndpoint:
    """The ASGI application of one of the two endpoints."""

    def __init__(self, services: HttpServices, kind: Kind) -> None:
        self._services = services
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        headers = Headers(scope=scope)
        state = scope["state"]
        try:
            check_media_type(headers)
            raw = await read_body(headers, receive, self._services.max_payload_bytes)
        except (BatonError, ClientGone) as error:
            self.refused(headers, state["request_id"], error if isinstance(error, BatonError) else None, arrival)
            raise
        content: dict[str, Any] = {}
        refusal: BatonError | None = None
        try:
            content = parse_object(raw)
        except BatonError as error:
            refusal = error
        request_id = state.get("header_request_id") or content.get("request_id")
        if not isinstance(request_id, str):
            request_id = new_request_id()
        try:
            check_request_id(request_id)
        except BatonError as error:
            self.refused(headers, state["request_id"], error, arrival)
            raise
        state["request_id"] = request_id
        model = content.get("model")
        gone = False
        with self._services.open_requests.open(
            request_id,
            api=self._kind,
            model=model if isinstance(model, str) else "",
            stream=content.get("stream") is True,
            arrival=arrival,
            private=content.get("private_request") is True or says_yes(headers.get(PRIVATE_KEY, "")),
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        ) as owner:
            if asks(headers.get(TIMELINE_KEY, "")):
                owner.wants_timeline = True
                state["timeline"] = owner.seconds
            if refusal is not None:
                raise refusal
            try:
                await _Generation(self._services, self._kind, owner, headers).serve(content, receive, send)
            except ClientGone:
                # No failure of the request's own: leaving it unfinished is how a client's departure is booked.
                gone = True
        if gone:
            raise ClientGone

    def refused(self, headers: Headers, request_id: str, error: BatonError | None, arrival: float) -> None:
        """Accounts for a request that came no further than its head or body."""
        self._services.open_requests.refused(
            request_id,
            error,
            api=self._kind,
            arrival=arrival,
            private=says_yes(headers.get(PRIVATE_KEY, "")),
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )


class _Generation:
    """One request, from its parsed body to the last byte of its response."""

    def __init__(self, services: HttpServices, kind: Kind, owner: OpenRequest, headers: Headers) -> None:
        self._services = services
        self._kind: Kind = kind
        self._owner = owner
        self._headers = headers
        self._id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{owner.request_id}"
        self._created = int(time.time())
        # What the request's first choice had to say, for the `baton` object.
        self._prefill: PrefillSummary | None = None
        self._finish: FinishEvent | None = None

    async def serve(self, content: dict[str, Any], receive: Receive, send: Send) -> None:
        with in_stage(self._owner.clock, self._owner.stop_check):
            if armed():
                await fault_async("router.stage", stage="validate", request_id=self._owner.request_id)
            body = (ChatBody if self._kind == "chat" else CompletionBody).parse(content)
            assert isinstance(body, ChatBody | CompletionBody)
            params = body.params()
            self._add_headers(params)
            self._owner.model = self._services.validator.check(params)
        stream = EventStream(send, self._services.ping_interval_s) if params.stream else None
        limit = self._owner.deadline.timeout()

        async def work() -> None:
            try:
                async with asyncio.timeout(None if limit is None else limit + SLOW_READER_GRACE_S):
                    with in_stage(self._owner.clock, self._owner.stop_check):
                        if armed():
                            await fault_async("router.stage", stage="tokenize", request_id=self._owner.request_id)
                        request = await self._services.validator.prepare(params, self._owner)
                    if stream is None:
                        await self._whole(request, params, send)
                    else:
                        await self._streamed(request, params, body, stream)
            except TimeoutError:
                if stream is None or not stream.started:
                    raise BatonError(
                        ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time"
                    ) from None
                self._owner.fail(BatonError(ErrorCode.OUTPUT_QUEUE_FULL, "the client reads its answer too slowly"))
                raise ClientGone from None

        await while_connected(receive, work, stream)

    def _add_headers(self, params: GenerationParams) -> None:
        get = self._headers.get
        params.session_id = get(SESSION_KEY, "")
        params.single_server = params.single_server or asks(get(SINGLE_SERVER_KEY, ""))
        params.pin_prefill = get(PREFILL_PIN_KEY, "")
        params.pin_decode = get(DECODE_PIN_KEY, "")
        params.traceparent, params.tracestate = self._owner.traceparent, self._owner.tracestate

    def _events(self, request: AnswerRequest) -> AsyncGenerator[TextEvent, None]:
        return answer(request, self._services.serving, self._services.tokenizer)

    def _note(self, event: TextEvent, usage: Usage) -> None:
        """Keeps what is told about the whole request."""
        if event.prefill is not None:
            # Each choice reports its own; what the request had cached is counted once per prompt.
            self._owner.cached_tokens = usage.cached_tokens or 0
            if event.choice == 0:
                self._prefill = event.prefill
        if event.finish is not None and event.choice == 0:
            self._finish = event.finish

    # -- in one piece

    async def _whole(self, request: AnswerRequest, params: GenerationParams, send: Send) -> None:
        collected = Collected(request)
        reason: FinishReason = "stop"
        async with aclosing(self._events(request)) as events:
            async for event in events:
                collected.add(event)
                self._note(event, collected.usage)
                self._owner.tokens_written(len(event.tokens), event.choice)
                reason = event.finish_reason or reason
        choices = [self._choice(choice, request, params) for choice in collected.choices()]
        response: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion" if self._kind == "chat" else "text_completion",
            "created": self._created,
            "model": request.template.model,
            "choices": choices,
            "usage": usage_object(collected.usage),
            "baton": self._baton(),
        }
        if self._kind == "chat" and params.prompt_logprobs is not None:
            response["prompt_logprobs"] = self._prompt_logprobs(request, 0, self._prefill)
        body = msgspec.json.encode(response)
        headers = [
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            *self._graph_header(),
        ]
        self._owner.finish(reason)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _choice(self, choice: Choice, request: AnswerRequest, params: GenerationParams) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        wants_logprobs = params.logprobs is not None
        if self._kind == "chat":
            logprobs = chat_logprobs(choice.tokens, self._services.tokenizer) if wants_logprobs else None
            message: dict[str, Any] = {"role": "assistant", "content": choice.text}
            if request.tool_format is not None:
                message, calls = message_of(choice.text, request.tool_format)
                end["finish_reason"] = finish_reason(choice.finish_reason, calls)
            return {"index": choice.index, "message": message, "logprobs": logprobs, **end}
        shown: dict[str, Any] = {"index": choice.index, "text": choice.text, "logprobs": None, **end}
        prompt_index = choice.index // request.n * request.candidates
        if wants_logprobs:
            shown["logprobs"] = completion_logprobs(
                choice.tokens,
                choice.offsets,
                self._services.tokenizer,
                self._echo_logprobs(request, prompt_index, choice.prefill),
            )
        if params.prompt_logprobs is not None:
            shown["prompt_logprobs"] = self._prompt_logprobs(request, prompt_index, choice.prefill)
        return shown

    # -- as a stream

    async def _streamed(
        self,
        request: AnswerRequest,
        params: GenerationParams,
        body: ChatBody | CompletionBody,
        stream: EventStream,
    ) -> None:
        chunks = Chunks(
            self._kind,
            id=self._id,
            created=self._created,
            model=request.template.model,
            usage_mode="continuous" if body.continuous_usage else "final" if body.include_usage else "none",
        )
        usage = Usage.of(request)
        begun: set[int] = set()
        open_choices = request.sequences
        reason: FinishReason = "stop"
        tools = None if request.tool_format is None else ToolDeltas(request.tool_format)
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    first = event.choice not in begun
                    begun.add(event.choice)
                    data = b""
                    if first and self._kind == "chat":
                        # Written together with the first token: some clients time this chunk.
                        data = chunks.role(event.choice, usage)
                    usage.add(event, request)
                    self._note(event, usage)
                    logprobs = b"null"
                    if params.logprobs is not None:
                        logprobs = self._chunk_logprobs(event, request, first)
                    text, calls, ended = event.text, b"", str(event.finish_reason)
                    if tools is not None:
                        text, entries, finished = tools.take(event)
                        calls, ended = encode(entries) if entries else b"", str(finished)
                    if event.finish_reason is None:
                        data += chunks.text(event.choice, text, usage, logprobs=logprobs, tool_calls=calls)
                    else:
                        open_choices -= 1
                        reason = event.finish_reason
                        data += chunks.text(
                            event.choice,
                            text,
                            usage,
                            logprobs=logprobs,
                            finish_reason=ended,
                            tool_calls=calls,
                            stop_reason=event.stop_reason,
                            baton=b"" if open_choices or body.include_usage else encode(self._baton()),
                        )
                    if not stream.started:
                        await stream.start(self._graph_header())
                    await stream.write(data)
                    self._owner.tokens_written(len(event.tokens), event.choice)
        except BatonError as error:
            if not stream.started:
                raise
            self._owner.fail(error)
            # By now the run has closed, and with it the clocks of what it waited for.
            told = self._owner.seconds() if self._owner.wants_timeline else None
            await stream.close(error_event(error, told) + DONE)
            return
        self._owner.finish(reason)
        await stream.close((chunks.usage(usage, encode(self._baton())) if body.include_usage else b"") + DONE)

    def _chunk_logprobs(self, event: TextEvent, request: AnswerRequest, first: bool) -> bytes:
        tokenizer = self._services.tokenizer
        if self._kind == "chat":
            return encode(chat_logprobs(event.tokens, tokenizer))
        prompt = self._echo_logprobs(request, event.choice, event.prefill) if first else None
        return encode(completion_logprobs(event.tokens, event.offsets, tokenizer, prompt))

    # -- parts of both

    def _graph_header(self) -> list[tuple[bytes, bytes]]:
        if self._prefill is None:
            return []
        return [(GRAPH_HEADER.encode(), self._prefill.prefill_cuda_graph_status.encode("latin-1", "replace"))]

    def _baton(self) -> dict[str, Any]:
        """What Baton adds to a response; of several choices the first one's."""
        owner, finish = self._owner, self._finish
        timeline = owner.seconds()
        if finish is not None:
            timeline |= finish.timeline
        path = self._prefill.path if self._prefill is not None else owner.path
        return {
            "prefill_cuda_graph_status": None if self._prefill is None else self._prefill.prefill_cuda_graph_status,
            "path": path,
            "attempts": owner.attempts if finish is None else finish.attempts,
            "speculative_draft_rounds": 0,
            "speculative_accepted_tokens_per_pos": [],
            "timeline": {stage: round(seconds, 6) for stage, seconds in timeline.items()},
        }

    def _echo_logprobs(
        self, request: AnswerRequest, sequence: int, prefill: PrefillSummary | None
    ) -> dict[str, Any] | None:
        if not request.echo:
            return None
        prompt = request.prompt_of(sequence)
        known = prefill.prompt_logprobs if prefill is not None else ()
        return echo_logprobs(prompt.token_ids, prompt.text or "", known, self._services.tokenizer)

    def _prompt_logprobs(self, request: AnswerRequest, sequence: int, prefill: PrefillSummary | None) -> list[Any]:
        known = prefill.prompt_logprobs if prefill is not None else ()
        return prompt_logprobs(len(request.prompt_of(sequence).token_ids), known, self._services.tokenizer)
