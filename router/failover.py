"""What happens after a failed attempt: another one, when, or the end. Pure but for its figures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from router.budget import Backoff, RetryBudget
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry as Metrics

# No server was found: the failure is not about one, and looking again is cheap.
NO_SERVER = frozenset(
    (
        ErrorCode.NO_PREFILL_WORKER,
        ErrorCode.NO_DECODE_WORKER,
        ErrorCode.INCOMPATIBLE_PEER,
        ErrorCode.ASYMMETRIC_TP_FAILED,
    )
)
# Refused before any work was done: trying another server adds no load.
_FREE = NO_SERVER | {ErrorCode.SERVER_DRAINING}
# A request that makes every server fail like this is the cause itself; it must not go round the cluster for ever.
_POISON = frozenset((ErrorCode.EXECUTION_EXCEPTION, ErrorCode.ENGINE_DEAD))


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """`patience_s`: after a failure, how long a request waits for some server to be ready again."""

    max_retries: int = 5
    migration_limit: int = 3
    backoff: Backoff = field(default_factory=Backoff)
    patience_s: float = 2.0


class Failover:
    """The history of one request's failures.

    Before the first token an attempt that failed is retried, within `max_retries` and the budget; after it the stream
    migrates to other servers, within `migration_limit`. The first cause is kept in the metadata of what is raised.
    """

    def __init__(
        self,
        settings: FailoverSettings,
        budget: RetryBudget,
        metrics: Metrics,
        rng: random.Random,
        deadline: Deadline,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._budget = budget
        self._metrics = metrics
        self._rng = rng
        self._deadline = deadline
        self._clock = clock
        self._first: BatonError | None = None
        self._failed_at: float | None = None
        self._retries = 0
        self._migrations = 0
        self._searches = 0
        self._migrating = False

    @property
    def migrating(self) -> bool:
        """A migration has begun and its first new token has not come yet."""
        return self._migrating

    def progressed(self) -> None:
        """A token came out."""
        if self._migrating:
            self._migrating = False
            self._metrics.inc("baton_migrations_total", result="ok")
        self._failed_at = None
        self._searches = 0

    def may_redirect(self, error: BatonError) -> bool:
        """Whether a failed reservation may be tried on another decode server within the attempt."""
        if self._retries >= self._settings.max_retries or not self._withdraw("decode"):
            return False
        self._retries += 1
        self._metrics.inc("baton_retries_total", role="decode", code=error.code.name)
        return True

    def after(self, error: BatonError, emitted: int, *, recovering: bool = False) -> float:
        """Seconds to wait before the next attempt, or raises what the client gets. `emitted` tokens are out.

        `recovering`: some server may be usable again within moments, so that finding none is not the last word.
        """
        now = self._clock()
        first = self._first is None
        if self._first is None:
            self._first = error
        if not error.spec.retryable:
            raise self._final(error)
        if self._deadline.passed():
            message = "the request's deadline has passed; allow it more time"
            raise self._final(BatonError(ErrorCode.GENERATE_TIMEOUT, message))
        if error.code in NO_SERVER:
            if first and not recovering:
                raise self._final(error)
            return self._search(error, now)
        self._failed_at = now
        if emitted:
            return self._migrate(error)
        return self._retry(error)

    def _search(self, error: BatonError, now: float) -> float:
        """A server may come back within moments: its connection broke, or another one is about to be ready."""
        if self._failed_at is None:
            self._failed_at = now
        wait_s = min(0.5, self._settings.backoff.wait_s(self._searches, self._rng))
        if now + wait_s > self._failed_at + self._settings.patience_s:
            raise self._final(error)
        self._searches += 1
        return max(0.01, wait_s)

    def _retry(self, error: BatonError) -> float:
        settings = self._settings
        if self._retries >= settings.max_retries:
            raise self._final(error)
        role = "prefill" if error.metadata.get("leg") == "prefill" else "decode"
        if error.code not in _FREE and not self._withdraw(role):
            assert self._first is not None
            raise BatonError(
                ErrorCode.RETRY_BUDGET_EXHAUSTED,
                "the request failed and too many are being retried already; try again later",
                stage=self._first.stage,
                metadata={**self._first.metadata, **_named(self._first)},
            )
        self._metrics.inc("baton_retries_total", role=role, code=error.code.name)
        wait_s = 0.0 if error.code in _FREE and not self._retries else settings.backoff.wait_s(self._retries, self._rng)
        self._retries += 1
        return wait_s

    def _migrate(self, error: BatonError) -> float:
        settings = self._settings
        if self._migrating:
            self._metrics.inc("baton_migrations_total", result="failed")
            self._migrating = False
        if self._migrations >= settings.migration_limit:
            self._metrics.inc("baton_migrations_total", result="limit")
            raise self._final(error)
        # The client is in the middle of its answer, so the first one does not wait.
        wait_s = settings.backoff.wait_s(self._migrations - 1, self._rng) if self._migrations else 0.0
        self._migrations += 1
        self._migrating = True
        return wait_s

    def _withdraw(self, role: str) -> bool:
        granted = self._budget.withdraw()
        self._metrics.set("baton_retry_budget_ratio", self._budget.left())
        if not granted:
            self._metrics.inc("baton_retry_budget_exhausted_total", role=role)
        return granted

    def _final(self, error: BatonError) -> BatonError:
        """What the client gets: `error`, with the first cause when that was another one."""
        if self._migrating:
            self._migrating = False
            self._metrics.inc("baton_migrations_total", result="failed")
        first = self._first
        assert first is not None
        if self._retries and error.code in _POISON and first.code in _POISON:
            return BatonError(
                ErrorCode.WORKER_EXECUTION_FAILED,
                "the request failed on every server that tried it",
                stage=error.stage,
                metadata={**error.metadata, **_named(first)},
            )
        if first is not error and first.code is not error.code:
            error.with_context(**_named(first))
        return error


def _named(first: BatonError) -> dict[str, str]:
    return {"first_cause_code": str(int(first.code)), "first_cause": first.code.name}
