"""What the load generator sends, and what says how it is made."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer


class DatasetError(Exception):
    """A data set that cannot be made; the message names the flag."""


@dataclass(frozen=True)
class Prompt:
    """One request to send: token ids (for back ends that take them) and the text they stand for. `at_s`: seconds after
    the first one at which a recorded request came."""

    token_ids: list[int]
    text: str
    output_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True)
class DatasetOptions:
    name: str
    num_prompts: int
    seed: int = 0
    input_len: int = 256  # tokens
    output_len: int = 64  # tokens
    range_ratio: float = 0.0  # lengths are drawn from [len * (1 - ratio), len * (1 + ratio)]
    prefix_len: int = 0  # tokens shared by all prompts of one prefix (prefix_repetition: by num_prefixes groups)
    num_prefixes: int = 8
    path: str = ""
    chunk_tokens: int = 512  # timed_trace: tokens for which one hash id stands
    seconds_per_unit: float = 0.001  # timed_trace: of its time stamps
    length_scale: float = 1.0  # timed_trace: of all lengths, to fit small models


def ordinary_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that stand for text."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return [i for i in range(tokenizer.get_vocab_size()) if i not in special]
