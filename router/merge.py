"""Merging the tokens of several servers and attempts into one sequence. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from protos import common_pb2
from router.requests import Logprob, PromptLogprob, Token
from rpc.errors import BatonError, ErrorCode

# Tokens that may wait for one that is missing before them. No server sends out of order, so a gap is a breach.
MAX_WAITING = 64


class TokenMerge:
    """The generated tokens of one request: every index comes out exactly once, in order.

    The prefill server's first token and the decode server's repetition of it are one; two different tokens with the
    same index are a failure of the later one's sender.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._waiting: dict[int, Token] = {}

    @property
    def next_index(self) -> int:
        """Index of the next token to come out; the number of tokens that have."""
        return len(self.token_ids)

    @property
    def complete(self) -> bool:
        """Whether no token waits for one before it."""
        return not self._waiting

    def add(self, outputs: Iterable[common_pb2.TokenOutput]) -> list[Token]:
        """Takes tokens in and returns those that can go out, in order; often one, sometimes none.

        Raises REMOTE_GENERATE_FAILED for tokens without index or id, contradicting ones and large gaps.
        """
        ready: list[Token] = []
        token_ids = self.token_ids
        for output in outputs:
            if not (output.HasField("index") and output.HasField("token_id")):
                raise breach("a token without index or id", kind="absent_field")
            index = output.index
            if index < len(token_ids):
                if token_ids[index] != output.token_id:
                    raise breach(f"two servers disagree about token {index}")
                continue
            token = to_token(output)
            if index > len(token_ids):
                if self._waiting.setdefault(index, token).token_id != output.token_id:
                    raise breach(f"two servers disagree about token {index}")
                if len(self._waiting) > MAX_WAITING:
                    raise breach(f"token {len(token_ids)} is missing")
                continue
            ready.append(token)
            token_ids.append(token.token_id)
            while self._waiting:
                waiting = self._waiting.pop(len(token_ids), None)
                if waiting is None:
                    break
                ready.append(waiting)
                token_ids.append(waiting.token_id)
        return ready

    def forget_waiting(self) -> None:
        """A new attempt starts at `next_index`; what an older one sent beyond it will come again."""
        self._waiting.clear()


def breach(what: str, *, kind: str = "missing_result") -> BatonError:
    """A server's answer that breaks the contract between the processes; another server may keep it."""
    return BatonError(
        ErrorCode.REMOTE_GENERATE_FAILED,
        "a server of the cluster answered with something that cannot be right",
        metadata={"contract_breach": kind, "breach": what},
    )


def to_token(output: common_pb2.TokenOutput) -> Token:
    """The message as a record; index and id are set."""
    if not output.HasField("logprob"):
        return Token(output.index, output.token_id)
    top = tuple(to_logprob(p) for p in output.top_logprobs)
    return Token(output.index, output.token_id, to_logprob(output.logprob), top)


def to_logprob(message: common_pb2.TokenLogprob) -> Logprob:
    return Logprob(message.token_id, message.logprob, message.rank)


def to_prompt_logprobs(messages: Iterable[common_pb2.PromptLogprob]) -> tuple[PromptLogprob, ...]:
    return tuple(
        PromptLogprob(m.position, to_logprob(m.logprob), tuple(to_logprob(p) for p in m.top_logprobs)) for m in messages
    )
