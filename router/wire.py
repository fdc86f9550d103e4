"""The router's records as messages to the servers."""

from __future__ import annotations

from collections.abc import Sequence

from protos import common_pb2
from router.requests import FinishReason, RouterRequest, Sampling
from router.worker import Worker
from rpc.grammar import not_offered

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


def sampling_params(sampling: Sampling, seed: int) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    if sampling.prompt_logprobs is not None:
        message.prompt_logprobs = sampling.prompt_logprobs
    return message


def generate_input(
    request: RouterRequest, key: str, sampling: common_pb2.SamplingParams, emitted: Sequence[int], worker: Worker
) -> common_pb2.GenerateInput:
    """The request as `worker` gets it; `emitted` are the tokens that earlier attempts generated.

    Raises INVALID_PARAMS for a request with a grammar and a server that does not say that it keeps to them: an older
    one would pass over it.
    """
    if request.grammar is not None and not (worker.facts is not None and worker.facts.keeps_to_grammars):
        raise not_offered()
    names = worker.facts.served_model_names if worker.facts is not None else ()
    # The router serves one model, whose name for clients may differ from the servers' own.
    model = request.model if request.model in names or not names else names[0]
    return common_pb2.GenerateInput(
        request_id=request.request_id,
        request_key=key,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=emitted,
        sampling=sampling,
        cache_salt=request.cache_salt,
        priority=request.priority,
        model=model,
        input_embeddings=[
            common_pb2.InputEmbedding(location=item.location, values=item.values, dtype=item.dtype)
            for item in request.input_embeddings
        ],
        grammar=None
        if request.grammar is None
        else common_pb2.Grammar(kind=request.grammar.kind.value, text=request.grammar.text),
    )


def kv_source(prefill: Worker) -> common_pb2.KvSource:
    facts = prefill.facts
    assert facts is not None
    return common_pb2.KvSource(
        engine_id=facts.engine_id,
        cache_store_addresses=facts.cache_store_addresses,
        tp_size=facts.tp_size,
    )


def finish_reason(value: int) -> FinishReason | None:
    """The reason's name for clients; None when the message has none."""
    return _FINISH_REASONS.get(value)
