"""Role purity, and dashboards and rules on a real Prometheus, against two fresh clusters: a pair, and one server alone.

The first tests compare what each process exports after its first request with the list of its role; the others drive
requests of many kinds, failures among them, past a Prometheus that scrapes both clusters.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cache_store.nixl.agent import installed as nixl_installed
from deploy.grafana.boards import BOARDS
from rpc.metric_families import families_of
from tests.conformance import mixed_requests
from tests.conformance.mixed_requests import CHAT, Mixed, Seen, tally
from tests.extent import extent
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import GenerationClient
from tests.standstill import standing_still
from tests.unit.deploy.prometheus import Prometheus, needs_prometheus
from tests.unit.deploy.promql import mistakes
from tests.unit.deploy.series import RULE_FILES, Labels, recorded, rules
from tests.unit.engine.tiny_models import tiny_model

MODEL = "tiny"
COMPLETIONS = "/v1/completions"
# The long run is BATON_MIXED_REQUESTS=1000.
MIXED = int(os.environ.get("BATON_MIXED_REQUESTS", extent("60", "100")))
BLOCKS = 40
NAMES = ("--served-model-name", MODEL)
SERVER = (*NAMES, "--num-kv-blocks", str(BLOCKS), "--kv-checksum", "all")
# Where the load fails, the decode server itself computes the prompt.
PREFILL_FAULTS = (
    "cache_store.publish:raise=CACHE_STORE_STORE_FAILED,key=unpublished#0*;" + mixed_requests.PREFILL_FAULTS
)


@dataclass
class Pair:
    """Two clusters: prefill and decode apart, and a decode server that does both."""

    apart: Cluster
    together: Cluster

    def process(self, name: str) -> ServerProcess:
        cluster = self.together if name.startswith("colocated") else self.apart
        role = name.rpartition(" ")[2]
        return cluster.router if role == "router" else {"prefill": cluster.prefill, "decode": cluster.decode}[role][0]

    @property
    def processes(self) -> list[ServerProcess]:
        return [*self.apart.servers, self.apart.router, *self.together.servers, self.together.router]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    model = tiny_model("llama")
    apart = Cluster(
        1, 1, model=model, prefill_flags=SERVER, decode_flags=SERVER, router_flags=NAMES,
        prefill_env={"BATON_FAULTS": PREFILL_FAULTS}, decode_env={"BATON_FAULTS": mixed_requests.DECODE_FAULTS},
    )  # fmt: skip
    together = Cluster(0, 1, model=model, decode_flags=SERVER, router_flags=NAMES)
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as threads:  # side by side, they are up sooner
            for started in [threads.submit(stack.enter_context, cluster) for cluster in (apart, together)]:
                started.result()
        yield Pair(apart, together)


def post(cluster: Cluster, path: str = COMPLETIONS, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"http://{cluster.router.http}{path}", json=body, timeout=30, verify=False)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * i) % 380 + 2 for i in range(length)]


# -- role purity -------------------------------------------------------------------------------------------------

PROCESS = {"baton_build_info", "baton_ready", "baton_drain_state", "baton_drain_remaining_requests"}
CALLS = {
    "baton_rpc_requests_total method code=NONE_ERROR", "baton_rpc_duration_seconds method", "baton_rpc_inflight method",
}  # fmt: skip
SERVER_GAUGES = PROCESS | {
    "baton_model_info", "baton_engine_up", "baton_tombstones", "baton_num_requests_running",
    "baton_num_requests_waiting", "baton_kv_blocks_capacity", "baton_kv_cache_usage_ratio",
    "baton_kv_ledger_imbalance_blocks", "baton_kv_transfer_inflight", "baton_kv_transfer_queue_depth",
    *(f"baton_kv_blocks state={state}"
      for state in ("free", "running", "staged", "receiving", "quarantined", "cached", "reserved")),
    *(f"baton_peers state={state}" for state in ("connected", "incompatible", "lost")),
    "baton_prefill_cuda_graph_init status=not_requested",
}  # fmt: skip
STEP = ("baton_engine_step_seconds", "baton_engine_batch_requests", "baton_engine_batch_tokens")
LOOKUP = {"baton_prefix_cache_queried_tokens_total", "baton_prefix_cache_hit_tokens_total"}
HANDSHAKE = {"baton_handshakes_total result=ok", "baton_handshake_seconds result=ok"}
PROMPT_GRAPHS = {"baton_prefill_cuda_graph_requests_total status=not_requested"}

DECODE_ANY = SERVER_GAUGES | CALLS | LOOKUP | {
    "baton_num_requests_loading", "baton_async_decode_pending", "baton_grammar_validator_available",
    *(f"{name} kind=decode" for name in STEP),
    "baton_decode_cuda_graph_steps_total status=not_requested",
    *(f"baton_stage_seconds stage={stage}" for stage in ("admit", "generate", "release")),
}  # fmt: skip
ROUTER_ANY = PROCESS | {
    "baton_grammar_validator_available", "baton_retry_budget_ratio", "baton_router_queue_depth",
    "baton_router_index_entries", "baton_router_index_bytes", "baton_http_inflight_requests route",
    "baton_http_requests_total route method status=200", "baton_http_request_duration_seconds route method",
    "baton_requests_total api=completions stream=false outcome=length",
    "baton_request_prompt_tokens", "baton_request_generation_tokens",
    "baton_prompt_tokens_total", "baton_generation_tokens_total", "baton_cached_prompt_tokens_total",
    *(f"baton_stage_seconds stage={stage}"
      for stage in ("validate", "tokenize", "queue", "choose", "first_token", "stream")),
    *(f"baton_router_workers role={role} state={state}" for role in ("prefill", "decode")
      for state in ("ready", "draining", "unhealthy", "incompatible")),
}  # fmt: skip
LATENCIES = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
)  # fmt: skip


def in_order(series: set[str]) -> set[str]:
    """The same with the labels sorted."""
    return {" ".join([name, *sorted(labels)]) for name, *labels in (text.split() for text in series)}


def chosen(role: str) -> set[str]:
    """What a router says about a server that it has chosen."""
    return {
        f"baton_router_decisions_total role={role} policy result=chosen",
        f"baton_router_decision_seconds role={role} policy",
        f"baton_router_worker_inflight role={role} worker",
        f"baton_breaker_state role={role} worker",
    }


_LISTS = {
    "prefill": SERVER_GAUGES | CALLS | LOOKUP | HANDSHAKE | PROMPT_GRAPHS | {
        "baton_kv_leases_active", "baton_kv_lease_hold_seconds outcome=released",
        "baton_kv_publish_seconds", "baton_kv_transfer_bytes_total direction=sent",
        *(f"{name} kind=prefill" for name in STEP),
        *(f"baton_stage_seconds stage={stage}"
          for stage in ("admit", "queue", "match", "compute", "sample", "publish", "held")),
    },
    "decode": DECODE_ANY | HANDSHAKE | {
        "baton_kv_blocks_skipped_total",
        "baton_kv_transfer_seconds outcome=ok", "baton_kv_transfer_exposed_seconds", "baton_kv_transfer_size_bytes",
        "baton_kv_transfer_bytes_total direction=received", "baton_kv_transfer_pieces_total result=ok",
        "baton_kv_lease_proof_calls_total",  # none, and that is shown
        *(f"baton_stage_seconds stage={stage}" for stage in ("prepare", "allocate", "load", "wait_to_run")),
    },
    "router": ROUTER_ANY | chosen("prefill") | chosen("decode") | {
        "baton_router_path_total decision=pd",
        *(f"baton_stage_seconds stage={stage}" for stage in ("reserve", "prefill")),
        *(f"baton_{name} path=pd" for name in LATENCIES),
    },
    "colocated decode": DECODE_ANY | PROMPT_GRAPHS | {f"{name} kind=prefill" for name in STEP},
    "colocated router": ROUTER_ANY | chosen("decode") | {
        "baton_router_path_total decision=no_pair",
        *(f"baton_{name} path=colocated" for name in LATENCIES),
    },
}  # fmt: skip
LISTS = {name: in_order(series) for name, series in _LISTS.items()}
# One value in a test, or values that the test does not choose.
UNTOLD = {"model_name", "rank", "group", "transport", "le", "version", "revision", "python", "torch", "cuda", "dtype",
          "kv_cache_dtype", "block_size", "tp_size", "attention_backend", "kv_transport"}  # fmt: skip
OPEN = {"method", "route", "worker", "policy"}
SOMETIMES = {"baton_event_loop_lag_seconds"}  # booked by the clock, not by requests
if not nixl_installed():
    SOMETIMES.add("baton_kv_transport_fallbacks_total reason=absent")


def told(process: ServerProcess) -> set[str]:
    """The series of a process: family, then labels, in the words of LISTS."""
    found = set()
    for family in text_string_to_metric_families(process.metrics()):
        for sample in family.samples:
            if not family.name.startswith("baton_") or sample.name.endswith(("_bucket", "_sum")):
                continue
            if sample.labels.get("route") in ("/ready", "/metrics"):  # asked by the test itself
                continue
            name = sample.name.removesuffix("_count") if family.type == "histogram" else sample.name
            labels = dict(sample.labels)
            if not name.startswith(("baton_router_", "baton_breaker_")):
                assert labels.pop("role", process.role) == process.role, sample
            assert 0 <= sample.value < 1 << 50, f"a sentinel: {sample}"
            words = [label if label in OPEN else f"{label}={labels[label]}" for label in labels if label not in UNTOLD]
            found.add(" ".join([name, *words]))
    return in_order(found - SOMETIMES)


@pytest.fixture(scope="module")
def first(pair: Pair) -> dict[str, set[str]]:
    """One request to each router, of two processes that have served nothing; then the series of each process."""
    for cluster in (pair.apart, pair.together):
        response = post(cluster, prompt=prompt(1, 20), max_tokens=4)
        assert response.status_code == 200, response.text
        assert response.json()["baton"]["path"] == ("pd" if cluster is pair.apart else "colocated")
    found: dict[str, set[str]] = {}

    def complete() -> bool:
        # Servers book what their engines report with the next step, or once a second.
        found.update({name: told(pair.process(name)) for name in LISTS})
        return all(found[name] >= expected for name, expected in LISTS.items())

    with contextlib.suppress(TimeoutError):  # the tests say what is missing
        wait_for("the series of every role", complete, 15.0, poll_s=0.1)
    return found


@pytest.mark.invariant("RPC-2")
@pytest.mark.parametrize("name", LISTS)
def test_2_role_purity_when_scraped_after_one_request_then_the_series_are_those_of_the_role(
    first: dict[str, set[str]], name: str
) -> None:
    assert sorted(first[name] - LISTS[name]) == [], "not of this role, or did not happen"
    assert sorted(LISTS[name] - first[name]) == [], "missing"


# -- dashboards --------------------------------------------------------------------------------------------------

# What does not happen here, with the reason.
QUIET = {
    "no block is wanting for long enough": {
        ("prefill", "Retried stages"), ("prefill", "Waits between attempts"), ("decode", "Retried stages"),
        ("decode", "Waits between attempts"), ("prefill", "Preemptions"), ("decode", "Preemptions"),
        ("kv_ledger", "Refused reservations"),
    },
    "no lease comes near its end": {
        ("kv_transfer", "Renewals"), ("kv_transfer", "Expirations"), ("kv_transfer", "Stale references"),
    },
    "nothing is held, quarantined or late when it is asked for": {
        ("kv_ledger", "Oldest hold"), ("kv_transfer", "Quarantine"), ("kv_ledger", "Tombstone hits"),
    },
    "no server has several ranks": {("kv_transfer", "First and last rank of a load")},
    "no server has a tier below its pool": {
        ("kv_ledger", panel.title) for board in BOARDS for row in board.rows for panel in row.panels
        if row.title == "Tiers below the pool"
    },
    "nobody asks for a grammar": {("router", "Compiling grammars")},
    "no policy looks at what is cached": {
        ("router", "Prompt tokens expected in a cache"), ("router", "Found of what was expected"),
    },
    "there is no GPU": {
        ("cuda_graphs", title) for title in (
            "Share of replayed prompts", "Replays by bucket", "Padding share", "Share of replayed steps", "Padding",
            "Captured graphs", "Device memory of graphs", "Mean time of a capture",
        )
    },
    "no server dies, no peer breaks the contract": {
        ("router", "Channels given up"), ("router", "Contract breaches"), ("router", "Breakers that changed"),
        ("router", "Retries not made"), ("router", "Refused"), ("router", "Log records dropped"),
        ("kv_transfer", "Peers that were restarted"), ("kv_transfer", "Handshakes"),
        ("kv_transfer", "p99 of handshakes"), ("prefill", "Requests ended before their time"),
    },
}  # fmt: skip


def leave_in_the_middle(cluster: Cluster) -> None:
    """A client that reads one event of a long answer, the first token, and is gone before there is another one."""
    body = {"model": MODEL, "prompt": prompt(5, 20), "max_tokens": 400, "stream": True, "ignore_eos": True}
    url = f"http://{cluster.router.http}{COMPLETIONS}"
    with standing_still(cluster.decode[0].engine_pid):
        with httpx.stream("POST", url, json=body, timeout=30, verify=False) as response:
            assert next(response.iter_lines()).startswith("data: ")
        wait_for("the departure", lambda: cluster.router.page("/load")["inflight"] == 0, 30.0, poll_s=0.05)


def load(pair: Pair, round_: int) -> None:
    """One of each kind of request, some of them side by side."""
    apart, together = pair.apart, pair.together
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(post, apart, prompt=prompt(seed, 150), max_tokens=12)
            for seed in range(10 * round_, 10 * round_ + 6)
        ]
        futures += [threads.submit(post, together, prompt=prompt(round_, 40), max_tokens=6) for _ in range(2)]
        assert [future.result().status_code for future in futures] == [200] * len(futures)
    for _ in range(2):  # the second one finds its prompt in both caches
        assert post(apart, prompt=prompt(3, 40), max_tokens=4).status_code == 200
    chat = [{"role": "user", "content": "Say something about ledgers."}]
    assert post(apart, "/v1/chat/completions", messages=chat, max_tokens=5, stream=True).status_code == 200
    assert post(apart, prompt="x", temperature=9).status_code == 400
    for request_id, attempts in (("refused", 2), ("moved", 2), ("unpublished", 1)):
        answer = post(apart, prompt=prompt(7 + round_, 40), max_tokens=5, request_id=request_id)
        assert answer.status_code == 200, answer.text
        assert answer.json()["baton"]["attempts"] == attempts, (request_id, answer.text)
    leave_in_the_middle(apart)
    with GenerationClient(apart.router.grpc) as client:
        client.generate(prompt(2, 20), 4)


@pytest.fixture(scope="module")
def prometheus(
    pair: Pair, first: dict[str, set[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has seen the load twice: a rate needs a series that exists before it rises."""
    assert first
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus([process.http for process in pair.processes], folder) as running:
        for round_ in range(2):
            load(pair, round_)
            running.wait_scrapes(2)
        yield running


@needs_prometheus
def test_panels_when_requests_of_all_kinds_were_served_then_each_shows_them(prometheus: Prometheus) -> None:
    quiet = {f"{board}: {title}" for panels in QUIET.values() for board, title in panels}
    known = {f"{board.name}: {panel.title}" for board in BOARDS for panel in board.panels()}
    assert quiet <= known
    prometheus.wait_panels("2m", quiet)


@needs_prometheus
def test_rules_when_requests_of_all_kinds_were_served_then_they_record_and_none_fails(prometheus: Prometheus) -> None:
    names = {rule["record"] for name in RULE_FILES for rule in rules(name) if "record" in rule}
    unseen = {"rtp_llm_rpc_retry_times", "rtp_llm_rpc_retry_cost_time_ms"}  # no stage is retried here
    prometheus.wait_recorded(sorted(names - unseen))
    assert prometheus.rule_errors() == []
    assert not prometheus.active(
        "KVLedgerImbalance", "KVLeak", "LeaseExpiry", "TransferStall", "ChecksumMismatch", "ContractBreach",
        "NoReadyPair", "EngineDown", "RetryBudgetExhausted", "GraphFallback", "DrainStuck", "BreakerOpen",
    )  # fmt: skip


@needs_prometheus
def test_rates_when_compared_with_the_requests_then_they_count_the_same(prometheus: Prometheus, pair: Pair) -> None:
    """What Prometheus has stored is what the processes say."""
    router = pair.apart.router
    ((_, stored),) = prometheus.query(f'sum(baton_requests_total{{instance="{router.http}"}})')
    text = text_string_to_metric_families(router.metrics())
    said = sum(s.value for family in text for s in family.samples if s.name == "baton_requests_total")
    assert stored == said >= 2 * 13


def test_queries_when_compared_with_the_processes_then_they_name_families_and_labels_that_exist(pair: Pair) -> None:
    """Against `/metrics` itself: families by their TYPE lines, labels where there are samples."""
    labels: Labels = {"up": frozenset(("instance", "job"))}
    declared = set()
    for process in pair.processes:
        for family in text_string_to_metric_families(process.metrics()):
            name = family.name + ("_total" if family.type == "counter" else "")
            declared |= {name + end for end in ("_bucket", "_sum", "_count")} if family.type == "histogram" else {name}
            for sample in family.samples:
                seen = frozenset(sample.labels) | {"instance", "job"}
                labels[sample.name] = labels.get(sample.name, frozenset()) | seen
    labels |= recorded()
    expressions = [query.expr for board in BOARDS for panel in board.panels() for query in panel.queries]
    expressions += [rule["expr"] for name in RULE_FILES for rule in rules(name)]
    found = {mistake for expression in expressions for mistake in mistakes(expression, labels, {})}
    # Families without a sample yet: their labels are checked against the table they are made from.
    absent = {mistake.rpartition(" ")[2] for mistake in found if mistake.startswith("there is no series")}
    # Servers of several ranks, of which there are none here, have families that others do not even declare.
    of_ranks = families_of("decode", tensor_parallel=True).keys() - families_of("decode").keys()
    assert {name for name in absent - declared if name.removesuffix("_bucket") not in of_ranks} == set()
    assert {m for m in found if " has no label " in m} == set()


# -- the same numbers everywhere -----------------------------------------------------------------------------------


CUT_OFF = ("CANCELLED", "GENERATE_TIMEOUT")  # how a call ends whose client's time is over


class Counts:
    """Counters of a process, by family and the values of the labels that are asked for."""

    def __init__(self, process: ServerProcess) -> None:
        self._samples = [s for family in text_string_to_metric_families(process.metrics()) for s in family.samples]

    def by(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        found: Counter[tuple[str, ...]] = Counter()
        for sample in self._samples:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += round(sample.value)
        return +found


@dataclass
class Reconciled:
    """What clients saw, what each process counted meanwhile, and its lines of the access log."""

    seen: list[Seen]
    before: dict[str, Counts]
    after: dict[str, Counts]
    lines: dict[str, list[dict[str, Any]]]

    def grew(self, role: str, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        return self.after[role].by(name, *labels) - self.before[role].by(name, *labels)

    def logged(self, role: str, *fields: str) -> Counter[tuple[str, ...]]:
        return Counter(tuple(str(line.get(field, "")) for field in fields) for line in self.lines[role])


@pytest.fixture(scope="module")
def reconciled(pair: Pair) -> Reconciled:
    processes = {process.role: process for process in (*pair.apart.servers, pair.apart.router)}

    def access(role: str) -> list[dict[str, Any]]:
        return [line for line in processes[role].log_lines() if line.get("log") == "access"]

    wait_for("an idle router", lambda: pair.apart.router.page("/load")["inflight"] == 0, 30.0, poll_s=0.05)
    pair.apart.assert_clean_ledgers()
    logged = {role: len(access(role)) for role in processes}
    before = {role: Counts(process) for role, process in processes.items()}
    mixed = Mixed(pair.apart.router.http, pair.apart.router.grpc)
    try:
        seen = mixed.send(MIXED)
    finally:
        mixed.close()
    lines: dict[str, list[dict[str, Any]]] = {}
    after: dict[str, Counts] = {}

    def settled() -> bool:
        """Every call has been booked, and its line been written."""
        lines.update({role: access(role)[logged[role] :] for role in processes})
        after.update({role: Counts(process) for role, process in processes.items()})
        calls = {
            role: (after[role].by(name, "method") - before[role].by(name, "method"))[(method,)]
            for role, name, method in (
                ("prefill", "baton_rpc_requests_total", "baton.v1.Prefill/Prefill"),
                ("decode", "baton_rpc_requests_total", "baton.v1.Decode/Decode"),
            )
        }
        return (
            len(lines["router"]) == len(seen)
            and all(len(lines[role]) == count for role, count in calls.items())
            and pair.apart.router.page("/load")["inflight"] == 0
        )

    with contextlib.suppress(TimeoutError):  # the tests say what is missing
        wait_for("all calls booked and logged", settled, 30.0, poll_s=0.1)
    found = {str(line["request_id"]): str(line["code"]) for line in lines["router"]}
    for number, one in enumerate(seen):
        if one.cut_off and found.get(one.request_id) in CUT_OFF:
            seen[number] = replace(one, code=found[one.request_id])
    return Reconciled(seen, before, after, lines)


def test_counts_when_compared_then_router_log_and_clients_agree(reconciled: Reconciled) -> None:
    seen, grew, logged = reconciled.seen, reconciled.grew, reconciled.logged
    assert len(seen) >= 0.95 * MIXED
    outcomes = tally(seen, "api", "stream", "outcome")
    assert grew("router", "baton_requests_total", "api", "stream", "outcome") == outcomes
    assert Counter({(a, s.lower(), o): n for (a, s, o), n in logged("router", "api", "stream", "outcome").items()}) == (
        outcomes
    )
    failed = [one for one in seen if one.outcome == "error"]
    assert grew("router", "baton_request_errors_total", "api", "code", "phase") == tally(failed, "api", "code", "phase")
    assert logged("router", "request_id", "code") == tally(seen, "request_id", "code")
    assert logged("router", "phase")[("mid_stream",)] == tally(failed, "phase")[("mid_stream",)]


def test_counts_when_compared_then_statuses_are_those_that_clients_got(reconciled: Reconciled) -> None:
    over_http = [one for one in reconciled.seen if one.api != "grpc"]
    statuses = reconciled.grew("router", "baton_http_requests_total", "route", "status")
    for api, route in (("completions", COMPLETIONS), ("chat", CHAT)):
        expected = tally([one for one in over_http if one.api == api], "status")
        assert Counter({(status,): n for (path, status), n in statuses.items() if path == route}) == expected
    calls = reconciled.grew("router", "baton_rpc_requests_total", "method", "code")
    counted = Counter({(code,): n for (method, code), n in calls.items() if method.endswith("/Generate")})
    by_grpc = [one for one in reconciled.seen if one.api == "grpc"]
    expected = tally([one for one in by_grpc if not one.cut_off], "code")
    assert expected <= counted
    rest = counted - expected
    assert rest.total() == sum(one.cut_off for one in by_grpc)
    assert {code for (code,) in rest} <= set(CUT_OFF)


def test_counts_when_compared_then_tokens_and_attempts_agree(reconciled: Reconciled) -> None:
    seen, grew = reconciled.seen, reconciled.grew
    answered = [one for one in seen if one.code == "NONE_ERROR"]
    tokens = sum(one.tokens for one in seen)
    assert grew("router", "baton_generation_tokens_total").total() == tokens
    assert sum(int(str(line["generated_tokens"])) for line in reconciled.lines["router"]) == tokens
    assert grew("router", "baton_prompt_tokens_total").total() == sum(one.prompt_tokens for one in answered)
    for name in ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"):
        assert grew("router", f"baton_{name}_count").total() == len(answered), name
    again = sum(one.attempts - 1 for one in answered)
    # A prefill server that was out of sight is not asked: the decode server alone meets neither of the two faults.
    apart = Counter(
        str(line["request_id"])
        for line in reconciled.lines["router"]
        if line["code"] == "NONE_ERROR" and line["servers"][0]["prefill"]
    )
    assert again == apart["refused"] + apart["moved"]
    assert apart["refused"] and apart["moved"]
    # Before the first token a failed attempt is retried, after it the request migrates; which of the two is a race.
    retried = grew("router", "baton_retries_total", "role", "code")
    moved = grew("router", "baton_migrations_total", "result")
    assert retried[("prefill", "MALLOC_FAILED")] == apart["refused"]
    assert retried.total() + moved.total() == again
    assert set(moved) <= {("ok",)}


@pytest.mark.parametrize(
    ("role", "method"), [("prefill", "baton.v1.Prefill/Prefill"), ("decode", "baton.v1.Decode/Decode")]
)
def test_counts_when_compared_then_each_server_has_a_line_of_every_call(
    reconciled: Reconciled, role: str, method: str
) -> None:
    calls = reconciled.grew(role, "baton_rpc_requests_total", "method", "code")
    counted = Counter({(code,): count for (name, code), count in calls.items() if name == method})
    logged = reconciled.logged(role, "code")
    assert counted.total() == logged.total()
    # A request whose answer is held on its way out, or whose other leg has failed, can have an end of its own before
    # its call is cancelled: the line has the first cause, the call the last one.
    for code in ("EXECUTION_EXCEPTION", "INVALID_ROUTE_REQUEST", "MALLOC_FAILED"):
        assert counted[(code,)] == logged[(code,)], code
    cut_short = sum(one.code != "NONE_ERROR" or one.attempts > 1 for one in reconciled.seen)
    assert 0 <= logged[("NONE_ERROR",)] - counted[("NONE_ERROR",)] <= cut_short
    # As many as the router says it has opened there, but for those it took back before they were sent.
    opened = sum(bool(leg.get(role)) for line in reconciled.lines["router"] for leg in line["servers"])
    assert logged.total() <= opened <= logged.total() + cut_short


def test_clusters_when_all_is_done_then_ledgers_are_clean_and_open_work_is_zero(pair: Pair) -> None:
    pair.apart.assert_clean_ledgers()
    pair.together.assert_clean_ledgers()
    gauges = (
        "baton_num_requests_running", "baton_num_requests_waiting", "baton_num_requests_loading",
        "baton_kv_transfer_inflight", "baton_kv_leases_active", "baton_router_worker_inflight",
        "baton_router_queue_depth", "baton_kv_transfer_queue_depth",
    )  # fmt: skip

    def left() -> list[str]:
        found = []
        for process in pair.processes:
            for family in text_string_to_metric_families(process.metrics()):
                for sample in family.samples:
                    ours = sample.labels.get("method", "").endswith(("/Generate", "/Prefill", "/Decode"))
                    if sample.value and (sample.name in gauges or (sample.name == "baton_rpc_inflight" and ours)):
                        found.append(f"{process.name}: {json.dumps([sample.name, sample.labels, sample.value])}")
        return found

    wait_for(f"gauges of open work at 0: {left()}", lambda: not left(), 15.0, poll_s=0.1)


@needs_prometheus
def test_alerts_when_the_only_server_dies_then_they_name_it_and_its_router(prometheus: Prometheus, pair: Pair) -> None:
    """The last test: one of the clusters is broken by it."""
    before = prometheus.active("EngineDown", "NoReadyPair")
    assert before == set()
    dead, router = pair.together.decode[0].http, pair.together.router.http
    pair.together.decode[0].kill()
    expected = {("EngineDown", dead), ("NoReadyPair", router)}
    wait_for("both alerts", lambda: prometheus.active("EngineDown", "NoReadyPair") == expected, 20.0, poll_s=0.2)
