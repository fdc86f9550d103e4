"""The Generation service: what the HTTP API offers, over gRPC."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio

from protos import common_pb2, generation_pb2, generation_pb2_grpc
from router.answer import AnswerRequest, Collected, TextEvent, Usage, answer
from router.grammar.keys import AskedGrammar, asked_grammar, wrong
from router.open_requests import AccessRecord, OpenRequest, OpenRequests
from router.requests import FinishEvent, FinishReason, Logprob, PrefillSummary, Serving, Token
from router.validation import (
    DECODE_PIN_KEY,
    PREFILL_PIN_KEY,
    SESSION_KEY,
    SINGLE_SERVER_KEY,
    GenerationParams,
    RequestValidator,
)
from rpc.errors import BatonError, ErrorCode
from rpc.faults import armed, fault_async
from rpc.ids import check_request_id, new_request_id, valid_request_id
from rpc.input_embeddings import InputEmbedding
from rpc.server import REQUEST_ID_KEY, RefusedCall, current_call, tell_timeline
from rpc.stages import in_stage
from rpc.timeline import asks

SERVICE = "baton.v1.Generation"

_FINISH_REASONS: dict[FinishReason, common_pb2.FinishReason.ValueType] = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORT,
}

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class GrpcServices:
    """What the service needs from the rest of the router. An empty `api_keys` means that no key is asked for."""

    serving: Serving
    open_requests: OpenRequests
    validator: RequestValidator
    api_keys: tuple[str, ...] = ()
    # Unix seconds at which the router started.
    created: int = 0


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Handlers raise BatonError; `rpc.server` makes the status of it."""

    def __init__(self, services: GrpcServices) -> None:
        self._services = services
        self._keys = [key.encode() for key in services.api_keys]

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Writes the answer itself, so that a client that leaves ends the legs before anything else."""
        call = current_call()
        request_id = request.request_id or (call.request_id if call.request_id_given else new_request_id())
        streamed = request.stream if request.HasField("stream") else True
        try:
            self._authenticate(context)
            check_request_id(request_id)
        except BatonError as error:
            self._services.open_requests.refused(
                request_id if valid_request_id(request_id) else new_request_id(),
                error,
                api="grpc",
                model=request.model,
                stream=streamed,
                private=call.private,
                traceparent=call.traceparent,
                tracestate=call.tracestate,
            )
            raise
        with self._services.open_requests.open(
            request_id,
            api="grpc",
            model=request.model,
            stream=streamed,
            deadline=call.deadline,
            private=call.private,
            traceparent=call.traceparent,
            tracestate=call.tracestate,
        ) as owner:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            owner.wants_timeline = tell_timeline(owner.seconds)
            with in_stage(owner.clock, owner.stop_check):
                if armed():
                    await fault_async("router.stage", stage="validate", request_id=request_id)
                params = generation_params(request, streamed)
                params.traceparent, params.tracestate = owner.traceparent, owner.tracestate
                for key, value in context.invocation_metadata() or ():
                    if key == SINGLE_SERVER_KEY and isinstance(value, str):
                        params.single_server = params.single_server or asks(value)
                    elif key == SESSION_KEY:
                        params.session_id = value if isinstance(value, str) else value.decode("utf-8", "replace")
                    elif key == PREFILL_PIN_KEY and isinstance(value, str):
                        params.pin_prefill = value
                    elif key == DECODE_PIN_KEY and isinstance(value, str):
                        params.pin_decode = value
                owner.model = self._services.validator.check(params)
            with in_stage(owner.clock, owner.stop_check):
                if armed():
                    await fault_async("router.stage", stage="tokenize", request_id=request_id)
                prepared = await self._services.validator.prepare(params, owner)
            generation = _Generation(prepared, owner)
            async with aclosing(answer(prepared, self._services.serving, self._services.validator.tokenizer)) as events:
                async for event in events:
                    for message in generation.take(event, streamed):
                        await context.write(message)
                    owner.tokens_written(len(event.tokens), event.choice)
            for message in generation.rest(streamed):
                await context.write(message)
            owner.finish(generation.reason)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        self._authenticate(context)
        check_request_id(request.request_id)
        return generation_pb2.AbortResponse(found=self._services.serving.abort(request.request_id))

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        self._authenticate(context)
        model = self._services.serving.model()
        return generation_pb2.ListModelsResponse(
            models=[
                generation_pb2.Model(
                    id=name, root=model.root, max_model_len=model.max_model_len, created=self._services.created
                )
                for name in model.served_names
            ]
        )

    def _authenticate(self, context: Context) -> None:
        """Compares with every key, each in constant time. Raises UNAUTHENTICATED."""
        if not self._keys:
            return
        given = b""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
                scheme, _, token = raw.partition(b" ")
                given = token.strip() if scheme.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise BatonError(
                ErrorCode.UNAUTHENTICATED, "the API key is missing or wrong; send metadata authorization: Bearer KEY"
            )


def account_for_refused(call: RefusedCall, open_requests: OpenRequests, access_log: AccessRecord) -> None:
    """Books calls for which nothing was done: a generation request like one that the service refuses, any other call by
    its line alone."""
    if call.method == f"{SERVICE}/Generate":
        if call.error.code is ErrorCode.UNAUTHENTICATED:
            return  # the service has booked it, with what its message says
        open_requests.refused(
            call.request_id,
            call.error,
            api="grpc",
            stream=True,
            private=call.private,
            traceparent=call.traceparent,
            tracestate=call.tracestate,
        )
        return
    access_log.record(
        request_id=call.request_id,
        code=call.error.code.name,
        private=call.private,
        error=call.error,
        api="grpc",
        method=call.method,
    )


def generation_params(request: generation_pb2.GenerateRequest, streamed: bool) -> GenerationParams:
    """The message as the surfaces' common form; a field that is not set is absent."""
    sampling = request.sampling
    params = GenerationParams(
        api="grpc",
        model=request.model or None,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        stream=streamed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        input_embeddings=_input_embeddings(request.input_embeddings),
    )
    if request.HasField("structured_output"):
        params.grammar = _structured_output(request.structured_output)
    if request.HasField("n"):
        params.n = request.n
    if sampling.HasField("max_tokens"):
        params.max_tokens = sampling.max_tokens
    if sampling.HasField("temperature"):
        params.temperature = sampling.temperature
    if sampling.HasField("top_p"):
        params.top_p = sampling.top_p
    if sampling.HasField("repetition_penalty"):
        params.repetition_penalty = sampling.repetition_penalty
    if sampling.HasField("seed"):
        params.seed = sampling.seed
    if sampling.HasField("logprobs"):
        params.logprobs = sampling.logprobs
    if sampling.HasField("prompt_logprobs"):
        params.prompt_logprobs = sampling.prompt_logprobs
    match request.WhichOneof("input"):
        case "prompt":
            params.prompt = request.prompt
        case "token_ids":
            # A list of lists, so that an empty one is an empty prompt and not no prompt.
            params.prompt = [list(request.token_ids.ids)]
        case "messages":
            params.messages = [{"role": m.role, "content": m.content} for m in request.messages.messages]
    return params


def _structured_output(message: generation_pb2.StructuredOutput) -> AskedGrammar:
    kind = message.WhichOneof("grammar")
    value: object = None
    if kind == "choice":
        value = list(message.choice.texts)
    elif kind is not None and (kind != "json_object" or message.json_object):
        value = getattr(message, kind)
    if kind is None or value is None:
        raise wrong("structured_output", "structured_output must have exactly one grammar")
    return asked_grammar(kind, value, f"structured_output.{kind}", "structured_output")


def _input_embeddings(messages: Iterable[common_pb2.InputEmbedding]) -> list[InputEmbedding]:
    found = []
    for number, message in enumerate(messages):
        if not message.HasField("location"):
            name = f"input_embeddings[{number}].location"
            raise BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, f"{name} is required", param=name)
        found.append(InputEmbedding(message.location, message.values, message.dtype or "float32"))
    return found


class _Generation:
    """Text events of one request to its messages. Pure."""

    def __init__(self, request: AnswerRequest, owner: OpenRequest) -> None:
        self.reason: FinishReason = "stop"
        self._request = request
        self._owner = owner
        self._collected = Collected(request)
        self._usage = Usage.of(request)
        self._begun: set[int] = set()
        self._open = request.sequences
        # What each choice had to say of its prompt, and the first one of its end.
        self._prefills: dict[int, PrefillSummary] = {}
        self._finish: FinishEvent | None = None

    def take(self, event: TextEvent, streamed: bool) -> Iterable[generation_pb2.GenerateResponse]:
        """Takes an event in; the message to send now, when streamed."""
        self._usage.add(event, self._request)
        if event.prefill is not None:
            self._owner.cached_tokens = self._usage.cached_tokens or 0
            self._prefills.setdefault(event.choice, event.prefill)
        if event.finish is not None and event.choice == 0:
            self._finish = event.finish
        if event.finish_reason is not None:
            self._open -= 1
            self.reason = event.finish_reason
        if not streamed:
            self._collected.add(event)
            return ()
        message = self._message(event.choice, event.text, event.tokens)
        if event.choice not in self._begun:
            self._begun.add(event.choice)
            self._add_prompt_logprobs(message, event.prefill)
        if event.finish_reason is not None:
            self._add_end(message, event.finish_reason, event.stop_reason, event.finish)
        self._add_info(message, self._prefills.get(event.choice), last=not self._open)
        return (message,)

    def rest(self, streamed: bool) -> Iterable[generation_pb2.GenerateResponse]:
        """What is left to send at the end: everything, one message a choice, when not streamed."""
        if streamed:
            return
        choices = self._collected.choices()
        for number, choice in enumerate(choices, 1):
            message = self._message(choice.index, choice.text, choice.tokens)
            self._add_prompt_logprobs(message, choice.prefill)
            assert choice.finish_reason is not None
            self._add_end(message, choice.finish_reason, choice.stop_reason, choice.finish)
            self._add_info(message, choice.prefill, last=number == len(choices))
            yield message

    def _message(self, index: int, text: str, tokens: Iterable[Token]) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(
            request_id=self._owner.request_id, index=index, text=text, tokens=[_token(token) for token in tokens]
        )

    def _add_prompt_logprobs(self, message: generation_pb2.GenerateResponse, prefill: PrefillSummary | None) -> None:
        if prefill is None:
            return
        for item in prefill.prompt_logprobs:
            message.prompt_logprobs.add(
                position=item.position,
                logprob=_logprob(item.logprob),
                top_logprobs=[_logprob(p) for p in item.top_logprobs],
            )

    def _add_end(
        self,
        message: generation_pb2.GenerateResponse,
        reason: FinishReason,
        stop_reason: str | int | None,
        finish: FinishEvent | None,
    ) -> None:
        message.finish_reason = _FINISH_REASONS[reason]
        if isinstance(stop_reason, str):
            message.stop_string = stop_reason
        elif reason == "stop" and finish is not None and finish.stop_token_id is not None:
            message.stop_token_id = finish.stop_token_id

    def _add_info(
        self, message: generation_pb2.GenerateResponse, prefill: PrefillSummary | None, *, last: bool
    ) -> None:
        info, finish = message.baton, self._finish
        if prefill is not None:
            info.prefill_cuda_graph_status = prefill.prefill_cuda_graph_status
            info.path = prefill.path
        info.attempts = self._owner.attempts if finish is None else finish.attempts
        if not last:
            return
        info.speculative_draft_rounds = 0
        timeline = self._owner.seconds()
        if finish is not None:
            timeline |= finish.timeline
        info.timeline.update(timeline)
        usage = message.usage
        usage.prompt_tokens = self._usage.prompt_tokens
        usage.completion_tokens = self._usage.completion_tokens
        if self._usage.cached_tokens is not None:
            usage.cached_tokens = self._usage.cached_tokens


def _token(token: Token) -> common_pb2.TokenOutput:
    message = common_pb2.TokenOutput(index=token.index, token_id=token.token_id)
    if token.logprob is not None:
        message.logprob.CopyFrom(_logprob(token.logprob))
        message.top_logprobs.extend(_logprob(p) for p in token.top_logprobs)
    return message


def _logprob(logprob: Logprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)
