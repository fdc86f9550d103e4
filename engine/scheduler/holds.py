"""Requests whose blocks wait for a peer, or that a transfer may still touch."""

from __future__ import annotations

from engine.kv_cache.cache import KvCache
from engine.messages import RunMode
from engine.requests import Request, RequestState, StepTime


class Holds:
    """By the requests' keys, each table in the order in which its holds began."""

    def __init__(self, kv: KvCache, time: StepTime) -> None:
        self._kv = kv
        self._time = time
        self.loading: dict[str, Request] = {}  # open; their KV is arriving
        self.staged: dict[str, Request] = {}  # answered, under a lease
        self.leaving: dict[str, Request] = {}  # ended, a transfer may still touch their blocks

    def load(self, request: Request) -> None:
        """Its KV arrives from now on, in blocks that receive."""
        self._add(request, self.loading)

    def stage(self, request: Request, ended: bool = False) -> None:
        """Its blocks stay until its lease ends. ended: it has failed, and nobody is to load them."""
        assert request.allocation is not None
        self._kv.stage(request.allocation)
        self._add(request, self.leaving if ended else self.staged)

    def quarantine(self, request: Request) -> None:
        """It ends while its KV arrives: its blocks stay until nothing writes to them."""
        del self.loading[request.key]
        assert request.allocation is not None
        self._kv.quarantine(request.allocation)
        self._add(request, self.leaving)

    def leave(self, key: str) -> None:
        """No transfer touches the blocks of this request, which has ended, any more."""
        request = self.leaving.pop(key)
        self.free(request)
        request.state = RequestState.ENDED

    def free(self, request: Request) -> None:
        """Its blocks go back to the pool, if it has any."""
        allocation = request.let_go()
        if allocation is not None:
            self._kv.free(allocation)

    def oldest_seconds(self) -> dict[str, float]:
        """Age of the oldest hold per state of its blocks; absent when there is none."""
        ages: dict[str, float] = {}
        for request in (*self.staged.values(), *self.leaving.values(), *self.loading.values()):
            if request.state is RequestState.LOADING:
                name = "receiving"
            else:
                name = "staged" if request.mode is RunMode.PREFILL else "quarantined"
            ages[name] = max(ages.get(name, 0.0), self._time.now - request.held_since_s)
        return ages

    def _add(self, request: Request, table: dict[str, Request]) -> None:
        request.held_since_s = self._time.now
        table[request.key] = request
