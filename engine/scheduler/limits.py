"""What the scheduler may do and what a request must keep to."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.messages import AddRequest, RunMode
from rpc.errors import BatonError, ErrorCode


@dataclass(frozen=True)
class Limits:
    """Sizes in tokens and requests, times in seconds."""

    block_size: int  # of the group whose table the runner gets
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    allow_local_prefill: bool = True
    load_failure_policy: str = "retry"
    queue_limit_s: float = 600.0
    reserve_attempts: int = 100  # after the first one
    reserve_timeout_s: float = 0.1
    reserve_interval_s: float = 0.001
    embedding_size: int = 0  # numbers of an input embedding's row; 0: the model takes none
    model_name: str = ""
    tier_timeout_s: float = 1.0  # longest delay of a prompt whose beginning may be in a tier below the pool
    tier_min_tokens: int = 256  # for fewer tokens than that no tier is asked

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        embedding_size: int = 0,
    ) -> Limits:
        return cls(
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill=config.enable_chunked_prefill,
            allow_local_prefill=config.allow_local_prefill or config.role == "prefill",
            load_failure_policy=config.kv_load_failure_policy,
            queue_limit_s=config.prefill_max_wait_timeout_ms / 1000,
            reserve_attempts=config.decode_retry_times,
            reserve_timeout_s=config.decode_retry_timeout_ms / 1000,
            reserve_interval_s=config.decode_retry_interval_ms / 1000,
            embedding_size=embedding_size,
            model_name=config.model_name,
            tier_timeout_s=config.kv_tier_timeout_ms / 1000,
            tier_min_tokens=config.kv_tier_min_tokens,
        )


def check_request(add: AddRequest, limits: Limits) -> None:
    """Raises what refuses a request for its own contents. The front checks most of it too, and earlier."""
    known = len(add.prompt_token_ids) + len(add.output_token_ids)
    if not add.prompt_token_ids:
        raise _invalid("prompt_token_ids", "is empty; give at least one token")
    for name, ids in (("prompt_token_ids", add.prompt_token_ids), ("output_token_ids", add.output_token_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
            raise BatonError(
                ErrorCode.OUT_OF_VOCAB_RANGE,
                f"{name} holds an id outside [0, {limits.vocab_size}); tokenize with this model's tokenizer",
                param=name,
            )
    if known + 1 > limits.max_model_len:
        raise BatonError(
            ErrorCode.LONG_PROMPT_ERROR,
            f"{known} tokens and one to generate exceed the model length of {limits.max_model_len}; shorten the prompt",
            param="prompt_token_ids",
        )
    if add.sampling.max_tokens <= len(add.output_token_ids):
        raise _invalid("max_tokens", f"is {add.sampling.max_tokens}, with {len(add.output_token_ids)} generated before")
    if add.mode is RunMode.LOCAL and not limits.allow_local_prefill:
        raise BatonError(
            ErrorCode.INVALID_ROUTE_REQUEST,
            "this server does not compute prompts (--no-allow-local-prefill); give a prefill server",
        )
    if (add.kv_source is not None) != (add.mode is RunMode.DECODE):
        raise _invalid("kv_source", f"must be given with mode decode and only then, not with {add.mode.value}")


def _invalid(name: str, message: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, f"{name} {message}", param=name)
