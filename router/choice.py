"""Which servers serve a request: one pair, or one server alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from router.pairing import Role, pair_error, version_error
from router.policies import Policy, Tuning, make_policy
from router.prefix.index import INDEX_ENTRIES, PrefixIndex
from router.prefix.prompt import Prompt
from router.registry import WorkerRegistry
from router.requests import Path, RouterRequest
from router.worker import Worker
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry as Metrics
from rpc.version import PROTOCOL_VERSION

Decision = Literal["pd", "short_prompt", "single_token", "beam_or_n", "requested", "no_pair"]
Result = Literal["chosen", "fallback", "pinned"]

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Servers of one attempt. `prefill` alone: it computes the only token; `decode` alone: it does
    everything.

    `predicted_tokens` of the prompt are expected in the prefix cache of the server that computes it; None where the
    policy has not looked.
    """

    decision: Decision
    prefill: Worker | None
    decode: Worker | None
    prompt_tokens: int = 0
    predicted_tokens: int | None = None

    @property
    def uncached_tokens(self) -> int:
        """What the server that computes the prompt is expected to compute."""
        return self.prompt_tokens - (self.predicted_tokens or 0)

    @property
    def path(self) -> Path:
        return "pd" if self.prefill is not None and self.decode is not None else "colocated"


class Chooser:
    """Applies the pins, the pairing and the policy of each role to the registered servers.

    `index` is None when no policy looks at what is cached; else somebody has to feed it (router/prefix/feed.py).
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        metrics: Metrics,
        *,
        prefill_policy: str = "round_robin",
        decode_policy: str = "round_robin",
        disagg_min_prompt_tokens: int = 0,
        allow_pins: bool = False,
        tuning: Tuning | None = None,
        index_entries: int = INDEX_ENTRIES,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        rng = rng if rng is not None else random.Random()
        self._registry = registry
        self._metrics = metrics
        self._decisions = metrics.counters("baton_router_decisions_total", "role", "policy", "result")
        self._decision_seconds = metrics.histograms("baton_router_decision_seconds", "role", "policy")
        self._policies: dict[Role, Policy] = {
            "prefill": make_policy(prefill_policy, rng, tuning),
            "decode": make_policy(decode_policy, rng, tuning, generates=True),
        }
        self._prefix_tokens = metrics.counters("baton_router_prefix_tokens_total", "kind")
        self.index_roles = [role for role, policy in self._policies.items() if policy.uses_index]
        self.index: PrefixIndex[Worker] | None = PrefixIndex(index_entries) if self.index_roles else None
        self._disagg_min_prompt_tokens = disagg_min_prompt_tokens
        self._allow_pins = allow_pins
        self._clock = clock

    def choose(self, request: RouterRequest, emitted: int, avoid: Collection[Worker] = ()) -> Choice:
        """Servers for the next attempt at a request that has `emitted` tokens already.

        Servers of `avoid` (they failed it before) and those whose breaker is open are taken only when there
        are no others. Raises NO_PREFILL_WORKER, NO_DECODE_WORKER, INCOMPATIBLE_PEER or ASYMMETRIC_TP_FAILED
        (servers are there, but none fit together), INVALID_ROUTE_REQUEST (a pin that names no server).
        """
        pins = self._pins(request)
        prefills, decodes = self._ready("prefill", pins), self._ready("decode", pins)
        alone = [d for d in decodes if d.facts is not None and d.facts.allows_local_prefill]
        prompt_tokens = len(request.prompt_token_ids) + emitted
        prompt = Prompt(request, prompt_tokens, self.index)

        def by(decision: Decision, role: Role, candidates: Sequence[Worker]) -> Choice:
            """One server for all of it."""
            worker, predicted = self._pick(role, candidates, avoid, pins, prompt)
            prefill, decode = (worker, None) if role == "prefill" else (None, worker)
            return Choice(decision, prefill, decode, prompt_tokens, predicted)

        if request.single_server is not None:
            if alone and not pins.get("prefill"):
                return by(request.single_server, "decode", alone)
        elif request.sampling.max_tokens - emitted == 1:
            if prefills and not (pins.get("decode") and not pins.get("prefill")):
                return by("single_token", "prefill", prefills)
            if alone and not pins.get("prefill"):
                return by("single_token", "decode", alone)
        elif prompt_tokens < self._disagg_min_prompt_tokens and alone and not pins.get("prefill"):
            return by("short_prompt", "decode", alone)
        paired = [d for d in decodes if any(self._fit(p, d) for p in prefills)]
        if paired:
            decode, _ = self._pick("decode", paired, avoid, pins, prompt, computes=False)
            partners = [p for p in prefills if self._fit(p, decode)]
            prefill, predicted = self._pick("prefill", partners, avoid, pins, prompt)
            return Choice("pd", prefill, decode, prompt_tokens, predicted)
        if alone and not pins.get("prefill"):
            return by("no_pair", "decode", alone)
        raise self._none(prefills, decodes)

    def another_decode(
        self, prefill: Worker, request: RouterRequest, avoid: Collection[Worker], emitted: int = 0
    ) -> Worker | None:
        """A decode server other than those of `avoid` for a prompt that `prefill` computes already."""
        pins = self._pins(request)
        fitting = [d for d in self._ready("decode", pins) if d not in avoid and self._fit(prefill, d)]
        if not fitting:
            return None
        prompt = Prompt(request, len(request.prompt_token_ids) + emitted, self.index)
        return self._pick("decode", fitting, (), pins, prompt, computes=False)[0]

    def computed(self, choice: Choice, cached_tokens: int) -> None:
        """The server that was chosen to compute the prompt had this much of it in its prefix cache."""
        if choice.predicted_tokens is not None:
            self._prefix_tokens["predicted",].inc(choice.predicted_tokens)
            self._prefix_tokens["actual",].inc(cached_tokens)

    def ready(self) -> tuple[bool, list[str]]:
        """Whether some request can be served now, and if not, why."""
        prefills, decodes = self._ready("prefill", {}), self._ready("decode", {})
        if any(d.facts is not None and d.facts.allows_local_prefill for d in decodes):
            return True, []
        if any(self._fit(p, d) for p in prefills for d in decodes):
            return True, []
        reasons = [self._none(prefills, decodes).message]
        for worker in self._registry.workers():
            if worker.state != "ready":
                why = "; ".join(worker.reasons)
                reasons.append(f"{worker.role} {worker.address} is {worker.state}: {why}")
        return False, reasons

    def _fit(self, prefill: Worker, decode: Worker) -> bool:
        return not self._registry.pair_differences(prefill, decode)

    def _pins(self, request: RouterRequest) -> dict[Role, str]:
        if not self._allow_pins:
            return {}
        pins: dict[Role, str] = {}
        if request.pin_prefill:
            pins["prefill"] = request.pin_prefill
        if request.pin_decode:
            pins["decode"] = request.pin_decode
        for role, address in pins.items():
            if self._registry.get(role, address) is None:
                raise BatonError(
                    ErrorCode.INVALID_ROUTE_REQUEST,
                    f"x-baton-{role} names no registered {role} server",
                    param=f"x-baton-{role}",
                )
        return pins

    def _ready(self, role: Role, pins: dict[Role, str]) -> list[Worker]:
        pin = pins.get(role)
        return [
            w
            for w in self._registry.workers(role)
            if w.state == "ready" and w.facts is not None and (pin is None or w.address == pin)
        ]

    def _pick(
        self,
        role: Role,
        candidates: Sequence[Worker],
        avoid: Collection[Worker],
        pins: dict[Role, str],
        prompt: Prompt,
        *,
        computes: bool = True,
    ) -> tuple[Worker, int | None]:
        """The chosen server, and how much of the prompt it is expected to have cached; None where that is not known.

        `computes`: the server is to compute the prompt.
        """
        began = self._clock()
        policy = self._policies[role]
        result: Result = "pinned" if role in pins else "chosen"
        usable = [w for w in candidates if w not in avoid and w.breaker.passes()]
        if not usable:
            # One that failed this request before is still better than one that fails them all.
            usable = [w for w in candidates if w.breaker.passes()] or list(candidates)
            if role not in pins:
                result = "fallback"
        prompt.computes = computes
        pick = policy.choose(usable, prompt)
        worker = usable[pick.place]
        if pick.fallback and role not in pins:
            result = "fallback"
        predicted = None
        if policy.uses_index:
            predicted = prompt.cached_tokens((worker,))[0] if computes else None
            prompt.given_to(worker)
        self._decision_seconds[role, policy.name].observe(self._clock() - began)
        self._decisions[role, policy.name, result].inc()
        return worker, predicted

    def _none(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> BatonError:
        for prefill in prefills or self._incompatible("prefill"):
            for decode in decodes or self._incompatible("decode"):
                found = self._registry.pair_differences(prefill, decode)
                if found:
                    return pair_error(found)
        if not decodes:
            for worker in self._incompatible("decode"):
                if worker.facts is not None and worker.facts.protocol_version != PROTOCOL_VERSION:
                    return version_error(worker.facts)  # servers of one version fit each other, but not this router
            message = "no decode server is ready; try again later"
            return BatonError(ErrorCode.NO_DECODE_WORKER, message, retry_after_s=RETRY_AFTER_S)
        message = "no prefill server is ready; try again later"
        return BatonError(ErrorCode.NO_PREFILL_WORKER, message, retry_after_s=RETRY_AFTER_S)

    def _incompatible(self, role: Role) -> list[Worker]:
        return [w for w in self._registry.workers(role) if w.state == "incompatible" and w.facts is not None]

    def count_refusal(self, error: BatonError) -> None:
        """Books a request for which no server could be chosen."""
        result = {
            ErrorCode.NO_PREFILL_WORKER: ("prefill", "none_ready"),
            ErrorCode.NO_DECODE_WORKER: ("decode", "none_ready"),
            ErrorCode.INCOMPATIBLE_PEER: ("decode", "incompatible"),
            ErrorCode.ASYMMETRIC_TP_FAILED: ("decode", "incompatible"),
        }.get(error.code)
        if result is not None:
            role, name = result
            policy = self._policies["prefill" if role == "prefill" else "decode"].name
            self._metrics.inc("baton_router_decisions_total", role=role, policy=policy, result=name)
        self._metrics.inc("baton_router_rejections_total", code=error.code.name)
