"""What the processes of a cluster say about a few requests: metrics, ledgers, debug pages, versions, settings.

The names, kinds and labels of the metrics come from docs/metrics.md. The values are differences of two scrapes around
the requests, so that it does not matter what the cluster has served before.
"""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from protos import common_pb2, generation_pb2
from tests.conformance.live_cluster import API_KEY, BLOCK, CHAT, COMPLETIONS, KEY_METADATA, MODEL, POOL_BLOCKS, Live
from tests.integration.cluster import ROOT, ServerProcess, wait_for

LAYERS, BLOCK_BYTES = 3, 2 * 2 * BLOCK * 16 * 4  # K and V, heads, tokens, head_dim, float32
LIMIT_S = 20.0
ROUTER_STAGES = ("validate", "tokenize", "queue", "choose", "first_token", "stream")
STATES = ("free", "running", "staged", "receiving", "quarantined", "cached")
SHORT = {"router": "R", "prefill": "P", "decode": "D"}


# -- names -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documented:
    """One row of docs/metrics.md. `by`: the letters of the processes that export it here."""

    kind: str
    buckets: str
    by: frozenset[str]
    labels: frozenset[str]
    more_labels: Mapping[str, frozenset[str]]


def documented() -> dict[str, Documented]:
    rows = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 5 or not cells[0].startswith("`baton_"):
            continue
        kind, _, buckets = cells[1].partition(" ")
        labels, *others = cells[3].split("; ")
        # This decode server may serve whole requests; no server here has more than one rank.
        by = re.sub(r"\w \(TP > 1\)", "", cells[2]).replace("(colocated)", "")
        more = {other.split()[0]: frozenset(re.findall(r"`(\w+)`", other)) for other in others}
        rows[cells[0].strip("`")] = Documented(
            kind, buckets, frozenset(by.split()), frozenset(re.findall(r"`(\w+)`", labels)), more
        )
    assert len(rows) > 80, "docs/metrics.md has no tables"
    return rows


def bounds() -> dict[str, list[float]]:
    """The sets of buckets of docs/metrics.md by letter."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    found = re.findall(r"^\* \*\*([A-Z])\*\* \([^)]*\): (.*)$", text, re.MULTILINE)
    return {letter: [float(bound) for bound in line.split()] for letter, line in found}


def families(process: ServerProcess) -> dict[str, Metric]:
    """Baton's families of a process by their documented names."""
    parsed = text_string_to_metric_families(process.metrics())
    named = ((family.name + ("_total" if family.type == "counter" else ""), family) for family in parsed)
    return {name: family for name, family in named if name.startswith("baton_")}


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_families_when_scraped_then_they_are_those_documented_for_the_role(live: Live, role: str) -> None:
    live.complete()
    rows, sets = documented(), bounds()
    process = next(process for process in live.processes if process.role == role)
    found = families(process)
    assert set(found) == {name for name, row in rows.items() if SHORT[role] in row.by}
    series = 0
    for name, family in found.items():
        row = rows[name]
        assert family.type == row.kind, name
        assert family.documentation, name
        labels = row.labels | row.more_labels.get(SHORT[role], frozenset())
        upper = set()
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            assert set(sample.labels) - {"le"} == labels, sample
            if "role" in labels and row.by != {"R"}:
                assert sample.labels["role"] == role, sample
            if sample.name.endswith("_bucket"):
                upper.add(float(sample.labels["le"]))
            series += 1
        if upper:
            assert sorted(upper) == [*sets[row.buckets], float("inf")], name
    assert series <= (5000 if role == "router" else 3000)
    assert "process_resident_memory_bytes" in process.metrics()
    assert "python_info" in process.metrics()


# -- values ------------------------------------------------------------------------------------------------------


class Scrape:
    """All samples of one process at one moment."""

    def __init__(self, process: ServerProcess) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(process.metrics()) for sample in family.samples
        ]

    def sum(self, name: str, /, **labels: str) -> float:
        """Sum of the samples of this name with these labels; 0 when there is none."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )


@dataclass
class Figures:
    """Scrapes before and after the requests."""

    before: dict[str, Scrape] = field(default_factory=dict)
    after: dict[str, Scrape] = field(default_factory=dict)

    def grew(self, process: str, name: str, /, **labels: str) -> float:
        return self.after[process].sum(name, **labels) - self.before[process].sum(name, **labels)


@dataclass
class Run:
    """What was asked and answered: per request its path and usage."""

    ids: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, request_id: str, usage: Mapping[str, Any], baton: Mapping[str, Any], seconds: float) -> None:
        self.ids.append(request_id)
        self.paths.append(baton["path"])
        self.usages.append(dict(usage))
        self.timelines.append(dict(baton["timeline"]))
        self.seconds.append(seconds)

    def tokens(self, name: str) -> int:
        return sum(usage[name] for usage in self.usages)

    def cached(self) -> int:
        return sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in self.usages)


PROMPTS = {"long": [(11 * i) % 380 + 2 for i in range(40)], "short": [(7 * i) % 380 + 2 for i in range(20)]}


def over_http(live: Live, run: Run, name: str, path: str = COMPLETIONS, **fields: Any) -> None:
    request_id = f"figures-{name}"
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "request_id": request_id, **fields}
    began = time.monotonic()
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
        with live.http.stream("POST", path, json=body) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        last = json.loads(events[-2])
    else:
        last = live.http.post(path, json=body).json()
    run.note(request_id, last["usage"], last["baton"], time.monotonic() - began)


def over_grpc(live: Live, run: Run, name: str, prompt: list[int], max_tokens: int) -> None:
    request = generation_pb2.GenerateRequest(
        request_id=f"figures-{name}", model=MODEL, token_ids=generation_pb2.TokenIds(ids=prompt), cache_salt=name,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )  # fmt: skip
    began = time.monotonic()
    stub = live.router.unary_stream("/baton.v1.Generation/Generate")
    data = list(stub(request.SerializeToString(), timeout=20, metadata=KEY_METADATA))[-1]
    last = generation_pb2.GenerateResponse.FromString(data)
    usage = {
        "prompt_tokens": last.usage.prompt_tokens,
        "completion_tokens": last.usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": last.usage.cached_tokens},
    }
    baton = {"path": last.baton.path, "timeline": dict(last.baton.timeline)}
    run.note(request.request_id, usage, baton, time.monotonic() - began)


def batch_tokens() -> tuple[int, int]:
    """What the decode server computes: all tokens but each answer's first, and the prompt of the two choices, which the
    second of them finds in the cache or not."""
    local = 2 * len(PROMPTS["short"]) - BLOCK
    return 7 + 7 + 4 + 5 + 3 + 3 + local, 7 + 7 + 4 + 5 + 3 + 3 + local + BLOCK


@dataclass
class Observed:
    run: Run
    figures: Figures


@pytest.fixture(scope="module")
def observed(live: Live) -> Observed:
    """Six answers and one refusal between two scrapes."""
    figures, run = Figures(), Run()
    figures.before = {process.role: Scrape(process) for process in live.processes}
    live.check_serving()

    def booked() -> bool:
        """Whether the request that was just answered is in all figures, so that none of its own come later."""
        figures.after = {process.role: Scrape(process) for process in live.processes}
        return (
            figures.grew("prefill", "baton_kv_lease_hold_seconds_count") >= 1
            and figures.grew("prefill", "baton_stage_seconds_count", stage="held") >= 1
            and figures.grew("decode", "baton_kv_transfer_size_bytes_count") >= 1
            and figures.grew("decode", "baton_engine_batch_tokens_sum") >= 11
        )

    wait_for("figures of the request before", booked, LIMIT_S, poll_s=0.05)
    figures.before = figures.after
    over_http(live, run, "first", prompt=PROMPTS["long"], max_tokens=8, cache_salt="figures")
    over_http(live, run, "again", prompt=PROMPTS["long"], max_tokens=8, cache_salt="figures", stream=True)
    chat = [{"role": "user", "content": "Say something about ledgers."}]
    over_http(live, run, "chat", CHAT, messages=chat, max_tokens=5, cache_salt="chat", stream=True)
    over_grpc(live, run, "grpc", PROMPTS["short"], 6)
    over_http(live, run, "single", prompt=PROMPTS["short"], max_tokens=1, cache_salt="single")
    over_http(live, run, "several", prompt=PROMPTS["short"], max_tokens=4, cache_salt="several", n=2)
    assert live.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "temperature": 9}).status_code == 400

    def settled() -> bool:
        # Servers book what their engines report once a second, or with the next step.
        figures.after = {process.role: Scrape(process) for process in live.processes}
        return (
            figures.grew("prefill", "baton_kv_lease_hold_seconds_count") >= 4
            and figures.grew("prefill", "baton_stage_seconds_count", stage="held") >= 4
            and figures.grew("decode", "baton_kv_transfer_size_bytes_count") >= 4
            and figures.grew("decode", "baton_prefix_cache_queried_tokens_total") >= 2 * len(PROMPTS["short"])
            and figures.grew("decode", "baton_engine_batch_tokens_sum") in batch_tokens()
            and figures.grew("prefill", "baton_engine_batch_requests_sum", kind="prefill") >= 5
            # A call is booked when its answer is on its way, which its client may have by then.
            and figures.grew("prefill", "baton_rpc_requests_total", method="baton.v1.Prefill/Prefill") >= 5
            and figures.grew("decode", "baton_rpc_requests_total", method="baton.v1.Decode/Decode") >= 6
            and figures.grew("router", "baton_rpc_requests_total", method="baton.v1.Generation/Generate") >= 1
            and figures.grew("router", "baton_http_requests_total", method="POST") >= 6
        )

    wait_for("figures of all requests", settled, LIMIT_S, poll_s=0.05)
    return Observed(run, figures)


def test_requests_when_counted_then_they_are_those_that_were_made(observed: Observed) -> None:
    run, grew = observed.run, observed.figures.grew
    assert run.paths == ["pd", "pd", "pd", "pd", "colocated", "colocated"]
    total: Any = "baton_requests_total"
    assert grew("router", total, api="completions", stream="false", outcome="length", model_name=MODEL) == 3
    assert grew("router", total, api="completions", stream="true", outcome="length") == 1
    assert grew("router", total, api="chat", stream="true", outcome="length") == 1
    assert grew("router", total, api="grpc", stream="true", outcome="length") == 1
    assert grew("router", total, api="completions", stream="false", outcome="error") == 1
    assert grew("router", total) == 7
    assert grew("router", "baton_request_errors_total") == 1
    assert grew("router", "baton_request_errors_total", code="INVALID_PARAMS", phase="before_first_token") == 1
    assert grew("router", "baton_http_requests_total", route=COMPLETIONS, method="POST", status="200") == 4
    assert grew("router", "baton_http_requests_total", route=COMPLETIONS, method="POST", status="400") == 1
    assert grew("router", "baton_http_requests_total", route=CHAT, status="200") == 1
    assert grew("router", "baton_rpc_requests_total", method="baton.v1.Generation/Generate", code="NONE_ERROR") == 1
    assert grew("prefill", "baton_rpc_requests_total", method="baton.v1.Prefill/Prefill", code="NONE_ERROR") == 5
    assert grew("decode", "baton_rpc_requests_total", method="baton.v1.Decode/Decode", code="NONE_ERROR") == 6
    assert observed.figures.after["router"].sum("baton_http_inflight_requests", route=COMPLETIONS) == 0


def test_tokens_when_counted_then_they_are_those_of_the_usage(observed: Observed) -> None:
    run, grew = observed.run, observed.figures.grew
    assert run.tokens("completion_tokens") == 8 + 8 + 5 + 6 + 1 + 2 * 4
    assert grew("router", "baton_prompt_tokens_total", model_name=MODEL) == run.tokens("prompt_tokens")
    assert grew("router", "baton_generation_tokens_total") == run.tokens("completion_tokens")
    assert grew("router", "baton_cached_prompt_tokens_total") == run.cached() >= 32
    for name in ("prompt", "generation"):
        assert grew("router", f"baton_request_{name}_tokens_count") == 6
    assert grew("router", "baton_request_prompt_tokens_sum") == run.tokens("prompt_tokens")
    assert grew("router", "baton_request_generation_tokens_sum") == run.tokens("completion_tokens")


def test_latencies_when_observed_then_each_request_and_token_counts_once(observed: Observed) -> None:
    run, grew = observed.run, observed.figures.grew
    for path, requests in (("pd", 4), ("colocated", 2)):
        assert grew("router", "baton_time_to_first_token_seconds_count", path=path) == requests
        assert grew("router", "baton_e2e_request_latency_seconds_count", path=path) == requests
        first = grew("router", "baton_time_to_first_token_seconds_sum", path=path)
        whole = grew("router", "baton_e2e_request_latency_seconds_sum", path=path)
        measured = sum(seconds for seconds, each in zip(run.seconds, run.paths, strict=True) if each == path)
        assert 0 < first <= whole <= measured
    assert grew("router", "baton_inter_token_latency_seconds_count", path="pd") == 7 + 7 + 4 + 5
    assert grew("router", "baton_inter_token_latency_seconds_count", path="colocated") == 3 + 3
    assert grew("router", "baton_time_per_output_token_seconds_count", path="pd") == 4
    assert grew("router", "baton_time_per_output_token_seconds_count", path="colocated") == 1


def test_stages_when_added_up_then_they_fit_into_the_calls(observed: Observed) -> None:
    grew = observed.figures.grew

    def stages(role: str, *names: str) -> float:
        return sum(grew(role, "baton_stage_seconds_sum", stage=name) for name in names)

    def counts(role: str, *names: str) -> list[float]:
        return [grew(role, "baton_stage_seconds_count", stage=name) for name in names]

    calls = grew("router", "baton_rpc_duration_seconds_sum", method="baton.v1.Generation/Generate")
    calls += sum(grew("router", "baton_http_request_duration_seconds_sum", route=path) for path in (COMPLETIONS, CHAT))
    assert 0 < stages("router", *ROUTER_STAGES) <= calls
    assert counts("router", *ROUTER_STAGES) == [7, 6, 6, 6, 6, 6]
    assert counts("router", "reserve", "prefill") == [4, 5]

    prefill = grew("prefill", "baton_rpc_duration_seconds_sum", method="baton.v1.Prefill/Prefill")
    assert 0 < stages("prefill", "admit", "queue", "match", "compute", "sample") <= prefill
    assert prefill <= stages("router", "prefill")
    assert counts("prefill", "admit", "queue", "match", "compute", "sample") == [5] * 5
    assert counts("prefill", "publish", "held") == [4, 4]

    decode = grew("decode", "baton_rpc_duration_seconds_sum", method="baton.v1.Decode/Decode")
    names = ("admit", "prepare", "allocate", "load", "wait_to_run", "generate", "release")
    assert 0 < stages("decode", *names) <= decode
    assert counts("decode", "load") == [4]
    assert counts("decode", "admit", "generate") == [6, 6]
    assert grew("prefill", "baton_aborts_total") == grew("decode", "baton_aborts_total") == 0


def test_timelines_when_they_come_with_the_answers_then_no_stage_exceeds_the_answer(observed: Observed) -> None:
    run = observed.run
    for name, path, timeline, seconds in zip(run.ids, run.paths, run.timelines, run.seconds, strict=True):
        own = sum(timeline.get(f"router.{stage}", 0.0) for stage in ROUTER_STAGES)
        assert 0 < own <= seconds, name
        assert all(0 <= value <= seconds for value in timeline.values()), name
        assert ("decode.load" in timeline) == (path == "pd"), name
        assert "prefill.compute" in timeline or "decode.compute" in timeline, name


def test_choices_when_counted_then_each_request_was_routed_once(observed: Observed) -> None:
    grew = observed.figures.grew
    assert grew("router", "baton_router_path_total", decision="pd") == 4
    assert grew("router", "baton_router_path_total", decision="single_token") == 1
    assert grew("router", "baton_router_path_total", decision="beam_or_n") == 2  # one for each choice
    assert grew("router", "baton_router_decisions_total", role="prefill", result="chosen") == 5
    assert grew("router", "baton_router_decisions_total", role="decode", result="chosen") == 6
    for name in ("baton_retries_total", "baton_migrations_total", "baton_breaker_transitions_total"):
        assert grew("router", name) == 0
    after = observed.figures.after["router"]
    assert after.sum("baton_router_workers", state="ready") == 2
    assert after.sum("baton_router_workers") == 2
    assert after.sum("baton_router_worker_inflight") == after.sum("baton_breaker_state") == 0
    assert after.sum("baton_retry_budget_ratio") == 1


def test_transfers_when_counted_then_their_bytes_are_those_of_the_blocks(observed: Observed) -> None:
    run, figures = observed.run, observed.figures
    grew = figures.grew
    prompts = [usage["prompt_tokens"] for usage, path in zip(run.usages, run.paths, strict=True) if path == "pd"]
    skipped = len(PROMPTS["long"]) // BLOCK  # the second time the decode server has these blocks itself
    blocks = sum(-(-tokens // BLOCK) for tokens in prompts) - skipped
    moved = blocks * LAYERS * BLOCK_BYTES
    assert grew("decode", "baton_kv_blocks_skipped_total") == skipped
    assert grew("prefill", "baton_kv_transfer_bytes_total", direction="sent") == moved
    assert grew("decode", "baton_kv_transfer_bytes_total", direction="received") == moved
    assert grew("decode", "baton_kv_transfer_size_bytes_sum") == moved
    assert grew("decode", "baton_kv_transfer_pieces_total", result="ok") == blocks * LAYERS
    assert grew("decode", "baton_kv_transfer_pieces_total") == blocks * LAYERS
    assert grew("decode", "baton_kv_transfer_seconds_count", outcome="ok", transport="ipc") == 4
    assert grew("decode", "baton_kv_transfer_exposed_seconds_count") == 4
    exposed, whole = (grew("decode", f"baton_kv_transfer{kind}_seconds_sum") for kind in ("_exposed", ""))
    assert 0 <= exposed <= whole <= grew("decode", "baton_stage_seconds_sum", stage="load")
    assert grew("prefill", "baton_kv_publish_seconds_count") > 0
    assert grew("prefill", "baton_kv_lease_hold_seconds_count", outcome="released") == 4
    assert grew("prefill", "baton_kv_lease_hold_seconds_count") == 4
    for role in ("prefill", "decode"):
        assert grew(role, "baton_kv_transfer_failures_total") == 0
        assert figures.after[role].sum("baton_kv_transfer_inflight") == 0
        assert figures.after[role].sum("baton_handshakes_total", result="ok") >= 1
    assert figures.after["prefill"].sum("baton_kv_leases_active") == 0
    assert figures.after["decode"].sum("baton_peers", state="connected") == 1


def test_engines_when_counted_then_every_token_was_computed_once(observed: Observed) -> None:
    run, grew = observed.run, observed.figures.grew
    on_prefill = [usage for name, usage in zip(run.ids, run.usages, strict=True) if name != "figures-several"]
    asked = sum(usage["prompt_tokens"] for usage in on_prefill)
    hit = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in on_prefill)
    assert hit == len(PROMPTS["long"]) // BLOCK * BLOCK
    assert grew("prefill", "baton_prefix_cache_queried_tokens_total") == asked
    assert grew("prefill", "baton_prefix_cache_hit_tokens_total") == hit
    assert grew("prefill", "baton_engine_batch_tokens_sum") == asked - hit
    assert grew("prefill", "baton_engine_batch_requests_sum", kind="prefill") == 5
    assert grew("prefill", "baton_engine_step_seconds_count", kind="prefill") == 5
    assert grew("prefill", "baton_prefill_cuda_graph_requests_total", status="not_requested") == 5
    assert grew("decode", "baton_engine_batch_tokens_sum") in batch_tokens()
    for role in ("prefill", "decode"):
        assert grew(role, "baton_preemptions_total") == 0
        steps_s = grew(role, "baton_engine_step_seconds_sum")
        assert 0 < steps_s < sum(run.seconds)


# -- pages -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("observed")
def test_ledgers_when_nothing_runs_then_page_metrics_and_status_agree(live: Live) -> None:
    live.cluster.assert_clean_ledgers()
    for server in live.cluster.servers:
        (counts,) = server.ledger()
        scrape = Scrape(server)
        assert counts["total"] == POOL_BLOCKS == sum(counts[state] for state in STATES)
        assert counts["imbalance"] == 0
        labels = {"rank": "0", "group": "full"}
        for state in (*STATES, "reserved"):
            assert scrape.sum("baton_kv_blocks", state=state, **labels) == counts[state]
        assert scrape.sum("baton_kv_blocks_capacity", **labels) == counts["total"]
        assert scrape.sum("baton_kv_ledger_imbalance_blocks", **labels) == 0
        assert scrape.sum("baton_kv_cache_usage_ratio", **labels) == 0
        assert scrape.sum("baton_kv_oldest_hold_seconds") == 0
        page = server.page("/debug/ledger")
        assert (page["role"], page["engine_id"]) == (server.role, server.engine_id)
        assert page["ranks"][0]["running_requests"] == page["ranks"][0]["waiting_requests"] == 0


def test_requests_page_when_all_have_ended_then_it_has_the_record_of_each(live: Live, observed: Observed) -> None:
    for server in live.cluster.servers:
        page = server.requests()
        assert page["open"] == []
        records = {record["request_id"]: record for record in page["finished"]}
        absent = "figures-several" if server.role == "prefill" else "figures-single"
        assert {name for name in records if name.startswith("figures-")} == set(observed.run.ids) - {absent}
        for name in set(observed.run.ids) - {absent}:
            record = records[name]
            assert (record["code"], record["state"]) == (0, "ended")
            assert record["request_key"].startswith(f"{name}#0.")
            assert all(seconds >= 0 for seconds in record["stages"].values())
        split = records["figures-again"]
        if server.role == "prefill":
            assert split["kv"]["outcome"] == "released"
            assert split["cached_tokens"] == 32
        else:
            assert split["generated_tokens"] == 8
    first = [server.finished("figures-first")["request_key"] for server in live.cluster.servers]
    assert len(set(first)) == 1


def access_lines(process: ServerProcess, request_id: str, count: int) -> list[dict[str, Any]]:
    """The request's lines in the access log of the process, once there are `count`; they are written a little later."""
    found = [
        line for line in process.log_lines() if (line.get("log"), line.get("request_id")) == ("access", request_id)
    ]
    return found if len(found) >= count else []


def test_access_log_when_requests_were_served_then_each_process_has_one_line_of_each(
    live: Live, observed: Observed
) -> None:
    for process in live.processes:
        for name in observed.run.ids:
            if (process.role, name) in (("prefill", "figures-several"), ("decode", "figures-single")):
                continue
            expected = 2 if (process.role, name) == ("decode", "figures-several") else 1
            mine = wait_for(f"{expected} lines of {name}", lambda: access_lines(process, name, expected), LIMIT_S)  # noqa: B023
            assert [line["code"] for line in mine] == ["NONE_ERROR"] * expected, (process.name, name)
            assert all(line["prompt_tokens"] > 0 for line in mine)
            assert "Say something about ledgers" not in json.dumps(mine)


def test_metrics_when_scraped_then_no_label_names_a_request(live: Live, observed: Observed) -> None:
    for process in live.processes:
        text = process.metrics()
        for forbidden in (*observed.run.ids, API_KEY, *(server.engine_id for server in live.cluster.servers)):
            assert forbidden not in text


def test_server_info_when_asked_then_it_shows_the_settings_and_no_secret(live: Live) -> None:
    for process in live.processes:
        page = live.http.get("/server_info") if process.role == "router" else process.get("/server_info")
        assert page.status_code == 200
        info = page.json()
        assert (info["role"], info["pid"]) == (process.role, process.pid)
        assert info["settings"]["served_model_name"] == [MODEL]
        assert API_KEY not in page.text
        assert API_KEY not in process.log()
        if process.role == "router":
            assert info["settings"]["api_key"] == "***"
        else:
            assert info["settings"]["num_kv_blocks"] == info["engine"]["num_blocks"] == POOL_BLOCKS
            assert info["engine"]["engine_id"] == process.engine_id


def test_version_when_asked_then_every_process_has_that_of_the_project(live: Live) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for process in live.processes:
        assert process.page("/version")["version"] == version
        assert Scrape(process).sum("baton_build_info", version=version) == 1
        assert Scrape(process).sum("baton_ready") == 1
        for path in ("/live", "/ready", "/health"):
            assert process.get(path).status_code == 200


def test_load_when_nothing_runs_then_it_is_zero(live: Live) -> None:
    load = live.http.get("/load").json()
    assert (load["inflight"], load["queued"]) == (0, 0)
    assert [(worker["role"], worker["inflight"]) for worker in load["workers"]] == [("prefill", 0), ("decode", 0)]


def test_log_when_figures_were_read_then_it_has_no_defect(live: Live) -> None:
    assert live.defects() == []
