"""One request as the policies see it, and what the prefix index says about its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from router.policies import Candidate
from router.prefix.blocks import PromptBlocks
from router.prefix.index import PrefixIndex
from router.requests import RouterRequest
from router.worker import Worker
from rpc.input_embeddings import digest_of

# A prompt is noted with the server that gets it up to this many blocks, so that a very long one does not hold up the
# others; the rest is known when the server says so.
MOST_EXPECTED = 1024


class Prompt:
    """Implements `router.policies.Ask`. Made for one choice of servers; `index` None: nothing is known to be cached.

    `computes` is set by the caller before each choice of a server. `prompt_tokens`: with those that a failed attempt
    has generated, which are looked for in no cache.
    """

    __slots__ = ("_blocks", "_index", "_request", "computes", "prompt_tokens")

    def __init__(self, request: RouterRequest, prompt_tokens: int, index: PrefixIndex[Worker] | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.computes = True
        self._request = request
        self._index = index
        self._blocks: dict[int, PromptBlocks] = {}

    @property
    def session(self) -> str:
        return self._request.session_id

    def cached_tokens(self, candidates: Sequence[Candidate]) -> list[int]:
        index = self._index
        # Servers compute at least one token, and all of them when the prompt's own probabilities are asked for.
        most = 0 if self._request.sampling.prompt_logprobs is not None else self.prompt_tokens - 1
        if index is None or most <= 0:
            return [0] * len(candidates)
        workers = cast(Sequence[Worker], candidates)
        found = [most] * len(workers)
        for size in {size for worker in workers for size in worker.block_sizes}:
            places = [i for i, worker in enumerate(workers) if size in worker.block_sizes]
            counts = index.matches([workers[i] for i in places], self._blocks_of(size))
            for i, count in zip(places, counts, strict=True):
                found[i] = min(found[i], count * size)
        # A server with several groups of layers uses what is cached in all of them.
        steps = (math.lcm(*worker.block_sizes) for worker in workers)
        return [tokens // step * step for tokens, step in zip(found, steps, strict=True)]

    def given_to(self, worker: Worker) -> None:
        """The server gets the request, and will have its prompt in its prefix cache."""
        if self._index is not None:
            for size in worker.block_sizes:
                self._index.expect(worker, self._blocks_of(size).first(MOST_EXPECTED))

    def _blocks_of(self, size: int) -> PromptBlocks:
        blocks = self._blocks.get(size)
        if blocks is None:
            request = self._request
            digest = digest_of(request.input_embeddings)
            blocks = PromptBlocks(request.prompt_token_ids, size, request.cache_salt, digest)
            self._blocks[size] = blocks
        return blocks
