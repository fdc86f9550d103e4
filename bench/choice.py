"""What it costs the router to choose servers for a request, by policy.

    python -m bench.choice                                  # a table in Markdown
    python -m bench.choice --prompt-tokens 8000 --servers 16

Each figure is the median over all rounds of the time of one `Chooser.choose`, which chooses a prefill and a decode
server: microseconds of this process, without a network. *New* prompts are in no cache; *cached* ones are there but for
their last block, on one of the servers of each role. Policies take turns, so that what else the machine does meets all
of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from router.choice import Chooser
from router.pairing import ROLES, GroupFacts, WorkerFacts
from router.policies import POLICIES
from router.prefix.blocks import PromptBlocks
from router.registry import WorkerRegistry
from router.requests import RouterRequest, Sampling
from rpc.channels import ChannelPool
from rpc.metrics import Registry

BLOCK = 16


def registry(servers: int, metrics: Registry) -> WorkerRegistry:
    """`servers` of each role, all of them ready, none of them real."""
    found = WorkerRegistry(ChannelPool(), metrics)
    groups = (GroupFacts("full", 32, 8, 128, BLOCK, "bfloat16"),)
    for role in ROLES:
        for number in range(servers):
            worker = found.add(role, f"10.0.{ROLES.index(role)}.{number}:50051")
            worker.facts = WorkerFacts(
                role, f"{role}-{number}", "f" * 32, "bfloat16", groups, (f"{worker.address}",), ("tcp",), ("m",)
            )
    for worker in found.workers():
        worker.state = "ready"
    return found


class Candidate:
    """A policy with servers of its own. `times` are seconds, `predicted` what a choice took to be
    cached."""

    def __init__(self, name: str, servers: int, prompt_tokens: int) -> None:
        self.name = name
        self.metrics = Registry("router", process_metrics=False)
        self.registry = registry(servers, self.metrics)
        self.chooser = Chooser(self.registry, self.metrics, prefill_policy=name, decode_policy=name)
        self.rng = random.Random(1)
        self.prompt_tokens = prompt_tokens
        self.times: dict[str, list[float]] = {"new": [], "cached": []}
        self.predicted: dict[str, list[int | None]] = {"new": [], "cached": []}
        if self.chooser.index is not None:
            for worker in self.registry.workers():
                self.chooser.index.add(worker)

    def measure(self, number: int) -> None:
        tokens = [self.rng.randrange(128_000) for _ in range(self.prompt_tokens)]
        self._choose("new", tokens, number)
        again = [*tokens[:-BLOCK], *(self.rng.randrange(128_000) for _ in range(BLOCK))]
        index = self.chooser.index
        if index is not None:
            # On one server of each role, as its prefix cache says.
            blocks = PromptBlocks(tokens, BLOCK)
            for worker in self.registry.workers():
                index.clear(worker)
            for role in ROLES:
                index.store(self.registry.workers(role)[number % 2], blocks.first(blocks.count))
        self._choose("cached", again, number)

    def _choose(self, kind: str, tokens: list[int], number: int) -> None:
        request = RouterRequest(
            request_id="r", model="m", prompt_token_ids=tokens, sampling=Sampling(64), session_id=f"s{number}"
        )
        began = time.perf_counter()
        choice = self.chooser.choose(request, 0)
        self.times[kind].append(time.perf_counter() - began)
        self.predicted[kind].append(choice.predicted_tokens)


def measure(servers: int, prompt_tokens: int, rounds: int) -> list[Candidate]:
    candidates = [Candidate(name, servers, prompt_tokens) for name in POLICIES]
    for number in range(rounds):
        for candidate in candidates:
            candidate.measure(number)
    return candidates


def report(candidates: list[Candidate]) -> str:
    lines = ["| policy | new prompt, us | cached prompt, us |", "|---|---|---|"]
    for candidate in candidates:
        new, cached = (1e6 * statistics.median(candidate.times[kind]) for kind in ("new", "cached"))
        lines.append(f"| {candidate.name} | {new:.0f} | {cached:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=4, help="of each role")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    print(f"{arguments.servers} servers of each role, {arguments.prompt_tokens} prompt tokens\n")
    print(report(measure(arguments.servers, arguments.prompt_tokens, arguments.rounds)))


if __name__ == "__main__":
    main()
