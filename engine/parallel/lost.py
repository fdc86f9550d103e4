"""The end of an engine of several ranks because of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rpc.errors import BatonError, ErrorCode


class RankLost(BatonError):
    """ENGINE_DEAD: a rank has failed, is gone, or does not answer, and the engine ends with it.

    `metadata` has the `rank` that is at fault and the `cause`: the name of its own error, or how it was lost (`closed`,
    `silent`, `not_reading`, `protocol`).
    """

    def __init__(self, rank: int, cause: str, how: str, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
        """how: continues "rank 3 of the engine …". metadata: more of it."""
        super().__init__(
            ErrorCode.ENGINE_DEAD,
            f"rank {rank} of the engine {how}",
            metadata={**metadata, "rank": str(rank), "cause": cause},
        )
        self.rank = rank

    @classmethod
    def of(cls, rank: int, error: BatonError) -> RankLost:
        """A rank that said itself why it cannot go on."""
        cause = error.metadata.get("cause", error.code.name)
        return cls(rank, cause, f"failed: {error.message}", {**error.metadata, "cause_code": error.code.name})
