"""What the campaign asks: a fixed set of prompts and samplings with one right answer each, and how clients behave."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from protos import common_pb2

PREFIX_TOKENS = 48  # with which half of the prompts begin
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
SHORT_DEADLINES_S = (0.02, 1.5)
LEAVE_AFTER_S = (0.0, 0.8)


class Manner(StrEnum):
    """How a client ends its request."""

    STAYS = "stays"  # reads to the end
    CANCELS = "cancels"  # gives the call up
    ABORTS = "aborts"  # by the Abort call, and reads on
    DISCONNECTS = "disconnects"  # its connection is gone
    HURRIES = "hurries"  # has a short deadline


@dataclass(frozen=True)
class Case:
    """A prompt with its sampling: equal in every run of one seed and vocabulary."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None  # None is greedy

    def sampling(self) -> common_pb2.SamplingParams:
        fields = {"temperature": 0.0} if self.seed is None else {**SEEDED, "seed": self.seed}
        return common_pb2.SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Ask:
    """One request of the campaign. `door`: grpc or http. `after_s`: when its client leaves, or its deadline."""

    number: int
    case: Case
    door: str
    manner: Manner
    after_s: float
    salt: str  # of the prefix cache; empty: the prompt may be cached

    @property
    def request_id(self) -> str:
        return f"chaos-{self.number}"


def make_cases(seed: int, count: int, vocabulary: int, longest: int) -> list[Case]:
    """Prompts from one token to `longest` tokens; answers of one token to 40. Every second case draws its tokens."""
    draws = random.Random(f"cases:{seed}")
    shared = draws.choices(range(2, vocabulary), k=PREFIX_TOKENS)
    cases = []
    for number in range(count):
        length = 1 + int((longest - 1) * draws.random() ** 1.5)
        prompt = draws.choices(range(2, vocabulary), k=length)
        if number % 4 >= 2:
            prompt = (shared + prompt)[: max(length, PREFIX_TOKENS // 2)]
        max_tokens = 1 if number % 16 == 7 else draws.randint(2, 40)
        cases.append(Case(number, tuple(prompt), max_tokens, draws.randrange(1 << 40) if number % 2 else None))
    return cases


class Asks:
    """The requests of a campaign, one after the other, as the seed has them."""

    def __init__(self, seed: int, cases: Sequence[Case], manners: Sequence[Manner], share: float) -> None:
        """`share` of the clients behave as one of `manners` other than to stay."""
        self._draws = random.Random(f"asks:{seed}")
        self._cases = list(cases)
        self._manners = list(manners)
        self._share = share
        self.count = 0

    def next(self) -> Ask:
        draws = self._draws
        case = draws.choice(self._cases)
        door = "http" if draws.random() < 0.25 else "grpc"
        salt = f"salt-{self.count}" if draws.random() < 0.5 else ""
        manner, after_s = Manner.STAYS, 0.0
        if self._manners and draws.random() < self._share:
            manner = draws.choice(self._manners)
            after_s = draws.uniform(*(SHORT_DEADLINES_S if manner is Manner.HURRIES else LEAVE_AFTER_S))
            if door == "http" and manner in (Manner.HURRIES, Manner.ABORTS):  # of the gRPC API alone
                door = "grpc"
        self.count += 1
        return Ask(self.count - 1, case, door, manner, after_s, salt)
