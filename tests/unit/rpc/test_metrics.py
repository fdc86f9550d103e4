"""The registry of a process: what it declares, what it refuses, what it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from rpc.metrics import BUCKETS, FAMILIES, MAX_WORKERS, HistogramSeries, Registry, Role, families_of

ROLES: list[Role] = ["router", "prefill", "decode"]


def exposition(registry: Registry) -> tuple[dict[str, str], dict[str, list[dict[str, str]]]]:
    """TYPE by family, and the labels of every sample by sample name."""
    types: dict[str, str] = {}
    samples: dict[str, list[dict[str, str]]] = {}
    for line in registry.render().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
        elif not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9_]+)(?:\{(.*)\})? .*", line)
            assert match, line
            labels = dict(re.findall(r'([a-z_]+)="([^"]*)"', match[2] or ""))
            samples.setdefault(match[1], []).append(labels)
    return types, samples


@pytest.mark.parametrize("role", ROLES)
def test_fresh_process_declares_every_family_of_its_role_and_no_other(role: Role) -> None:
    types, samples = exposition(Registry(role))
    own = {name for name in types if name.startswith("baton_")}
    assert own == set(families_of(role))
    for name in own:
        assert types[name] == FAMILIES[name].kind
    # State gauges have their value from the start; nothing else has a sample.
    for name, found in samples.items():
        if name.startswith("baton_"):
            assert FAMILIES[name].kind == "gauge"
            assert set(FAMILIES[name].all_labels(role)) <= {"role"}
            assert found == [{"role": role} if FAMILIES[name].own_role else {}]
    assert any(name.startswith("process_") for name in types)
    assert any(name.startswith("python_") for name in types)
    assert not any(name.endswith("_created") for name in samples)


@pytest.mark.invariant("RPC-2")
def test_roles_do_not_share_families_of_one_of_them() -> None:
    router, prefill, decode = (set(families_of(role)) for role in ROLES)
    assert "baton_kv_leases_active" in prefill - decode - router
    assert "baton_kv_transfer_seconds" in decode - prefill - router
    assert "baton_requests_total" in router - prefill - decode
    assert "baton_stage_seconds" in router & prefill & decode


def test_conditional_families_exist_only_under_their_condition() -> None:
    plain = set(families_of("decode"))
    tiers = {name for name in FAMILIES if name.startswith("baton_kv_tier_")}
    assert tiers and not tiers & plain
    assert set(families_of("decode", colocated=True)) - plain - tiers == {
        "baton_prefill_cuda_graph_requests_total",
        "baton_prefill_cuda_graph_init",
        "baton_prefill_cuda_graph_replays_total",
        "baton_prefill_cuda_graph_tokens_total",
    }
    assert set(families_of("decode", tensor_parallel=True)) - plain == {"baton_load_rank_seconds"}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family_follows_the_naming_rules(name: str) -> None:
    family = FAMILIES[name]
    assert re.fullmatch(r"baton_[a-z][a-z0-9_]*", name)
    assert (family.kind == "counter") == name.endswith("_total")
    assert (family.kind == "histogram") == bool(family.buckets)
    assert family.help
    if family.kind in ("counter", "histogram"):
        assert all(family.all_labels(role) for role in family.roles), "an unlabelled one would show 0 from start-up"
    unit = {"S": "_seconds", "B": "_bytes"}.get(family.buckets)
    assert unit is None or name.endswith(unit)


def test_bucket_sets() -> None:
    assert len(BUCKETS["S"]) == 20
    assert len(BUCKETS["T"]) == 22
    assert (BUCKETS["N"][:4], BUCKETS["N"][-1]) == ((1, 8, 16, 32), 131072)
    assert (BUCKETS["B"][0], BUCKETS["B"][1], BUCKETS["B"][-1]) == (4 << 10, 16 << 10, 16 << 30)
    assert (BUCKETS["Q"][0], BUCKETS["Q"][-1]) == (1, 1024)
    assert all(list(bounds) == sorted(set(bounds)) for bounds in BUCKETS.values())


def sample_value(label: str, role: Role, name: str) -> str:
    values = FAMILIES[name].values.get(label)
    return sorted(values)[0] if values else "x"


@pytest.mark.parametrize("role", ROLES)
def test_every_family_takes_an_event_and_shows_exactly_its_labels(role: Role) -> None:
    registry = Registry(role, colocated=True, tensor_parallel=True)
    for name, family in registry.families.items():
        labels = {
            label: sample_value(label, role, name)
            for label in family.all_labels(role)
            if not (label == "role" and family.own_role)
        }
        if family.kind == "counter":
            registry.inc(name, **labels)
        elif family.kind == "gauge":
            registry.set(name, 1, **labels)
        else:
            registry.observe(name, 1, **labels)
    _, samples = exposition(registry)
    for name, family in registry.families.items():
        sample = name + "_count" if family.kind == "histogram" else name
        assert [set(found) for found in samples[sample]] == [set(family.all_labels(role))]
        if family.own_role:
            assert samples[sample][0]["role"] == role


@pytest.mark.invariant("RPC-2")
def test_first_event_makes_the_series_and_a_measured_zero_is_shown() -> None:
    registry = Registry("decode")
    assert registry.value("baton_stage_seconds_count", stage="load") is None
    registry.observe("baton_stage_seconds", 0.0, stage="load")
    assert registry.value("baton_stage_seconds_count", stage="load") == 1
    assert registry.value("baton_stage_seconds_sum", stage="load") == 0
    assert registry.value("baton_stage_seconds_count", stage="generate") is None


@pytest.mark.parametrize(
    ("name", "labels", "error", "text"),
    [
        ("baton_nothing_total", {}, KeyError, "baton_nothing_total is unknown"),
        ("baton_requests_total", {}, KeyError, "baton_requests_total is of another role"),
        ("baton_aborts_total", {"leg": "decode"}, KeyError, "needs the label source"),
        ("baton_aborts_total", {"leg": "decode", "source": "client", "user": "u"}, KeyError, "no label user"),
        ("baton_aborts_total", {"leg": "elsewhere", "source": "client"}, ValueError, "leg='elsewhere'"),
        ("baton_tombstone_hits_total", {"role": "prefill"}, ValueError, "this process is decode"),
        ("baton_rpc_requests_total", {"method": "m", "code": "OOPS"}, ValueError, "code='OOPS'"),
    ],
)
def test_mistake_is_refused_at_once_and_named(
    name: str, labels: dict[str, str], error: type[Exception], text: str
) -> None:
    registry = Registry("decode")
    with pytest.raises(error, match=text):
        registry.inc(name, **labels)


def test_wrong_kind_is_refused() -> None:
    registry = Registry("decode")
    with pytest.raises(KeyError):
        registry.set("baton_tombstone_hits_total", 1)
    with pytest.raises(KeyError):
        registry.observe("baton_ready", 1)
    with pytest.raises(KeyError):
        registry.inc("baton_stage_seconds", stage="load")
    with pytest.raises(KeyError):
        registry.dec("baton_tombstone_hits_total")
    with pytest.raises(ValueError):
        registry.inc("baton_tombstone_hits_total", -1)


def test_figures_of_each_kind_have_the_value_that_was_booked() -> None:
    registry = Registry("router")
    registry.inc("baton_retries_total", role="decode", code="MALLOC_FAILED")
    registry.set("baton_router_queue_depth", 3)
    registry.observe("baton_request_prompt_tokens", 9, model_name="m")
    assert registry.value("baton_retries_total", role="decode", code="MALLOC_FAILED") == 1
    assert registry.value("baton_router_queue_depth") == 3
    assert registry.value("baton_request_prompt_tokens_sum", model_name="m") == 9


@pytest.mark.invariant("RPC-3")
def test_track_falls_on_every_exit() -> None:
    registry = Registry("decode")

    def work() -> None:
        with registry.track("baton_rpc_inflight", method="m"):
            assert registry.value("baton_rpc_inflight", method="m") == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert registry.value("baton_rpc_inflight", method="m") == 0


def test_worker_label_is_capped_and_a_removed_worker_frees_its_place() -> None:
    registry = Registry("router")
    for number in range(MAX_WORKERS + 10):
        registry.set("baton_breaker_state", 0, role="decode", worker=f"h:{number}")
    _, samples = exposition(registry)
    workers = {labels["worker"] for labels in samples["baton_breaker_state"]}
    assert len(workers) == MAX_WORKERS + 1
    assert "other" in workers
    registry.remove_worker("h:0")
    registry.set("baton_breaker_state", 1, role="decode", worker="new:1")
    assert registry.value("baton_breaker_state", role="decode", worker="new:1") == 1
    assert registry.value("baton_breaker_state", role="decode", worker="h:0") is None


def test_series_when_a_removed_worker_comes_back_then_it_is_counted_anew() -> None:
    registry = Registry("router")
    for _ in range(2):
        registry.inc("baton_channel_evictions_total", peer_role="decode", state="shutdown")
        registry.set("baton_breaker_state", 1, role="decode", worker="h:0")
    registry.remove_worker("h:0")
    registry.set("baton_breaker_state", 2, role="decode", worker="h:0")
    assert registry.value("baton_breaker_state", role="decode", worker="h:0") == 2
    assert registry.value("baton_channel_evictions_total", peer_role="decode", state="shutdown") == 2


def test_remove_makes_a_state_absent() -> None:
    registry = Registry("prefill")
    registry.set("baton_kv_oldest_hold_seconds", 3, rank="0", state="staged")
    registry.remove("baton_kv_oldest_hold_seconds", rank="0", state="staged")
    registry.remove("baton_kv_oldest_hold_seconds", rank="0", state="staged")
    assert registry.value("baton_kv_oldest_hold_seconds", rank="0", state="staged") is None
    registry.set("baton_kv_oldest_hold_seconds", 4, rank="0", state="staged")
    assert registry.value("baton_kv_oldest_hold_seconds", rank="0", state="staged") == 4


@dataclass
class Observation:
    name: str
    labels: dict[str, str]
    value: float = 1
    extra: Any = field(default=None)


def test_apply_books_by_kind_and_survives_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry("decode")
    news = [
        Observation("baton_preemptions_total", {"reason": "memory"}, 2),
        Observation("baton_no_such_thing", {}),
        Observation("baton_no_such_thing", {}),
        Observation("baton_engine_step_seconds", {"kind": "decode"}, 0.004),
        Observation("baton_peers", {"state": "connected"}, 3),
        Observation("baton_preemptions_total", {"why": "memory"}),
        Observation("baton_preemptions_total", {"reason": "memory"}, -1),
    ]
    assert registry.apply(news) == 4
    assert registry.value("baton_preemptions_total", reason="memory") == 2
    assert registry.value("baton_engine_step_seconds_bucket", kind="decode", le="0.005") == 1
    assert registry.value("baton_engine_step_seconds_bucket", kind="decode", le="0.003") == 0
    assert registry.value("baton_peers", state="connected") == 3
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 3


def test_build_info_names_what_runs() -> None:
    router = Registry("router")
    router.set_build_info("1.2", "abc")
    _, samples = exposition(router)
    assert set(samples["baton_build_info"][0]) == {"role", "version", "revision", "python"}
    decode = Registry("decode")
    decode.set_build_info("1.2", "abc", torch="2.11", cuda="")
    _, samples = exposition(decode)
    assert set(samples["baton_build_info"][0]) == {"role", "version", "revision", "python", "torch", "cuda"}


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_for_process_when_not_counting_then_everything_is_taken_and_only_families_are_shown(role: Role) -> None:
    registry = Registry.for_process(role, colocated=True, counting=False)
    registry.set_build_info("1", torch="2", cuda="")
    registry.inc("baton_rpc_requests_total", method="m", code="NONE_ERROR")
    registry.observe("baton_rpc_duration_seconds", 1.0, method="m")
    registry.set("baton_ready", 1)
    with registry.track("baton_rpc_inflight", method="m"):
        registry.dec("baton_rpc_inflight", method="m")
    registry.remove("baton_rpc_inflight", method="m")
    registry.remove_worker("127.0.0.1:1")
    found = registry.series("baton_rpc_duration_seconds", {"method": "m"})
    assert isinstance(found, HistogramSeries)
    found.observe(1.0)
    assert registry.apply([]) == 0
    types, samples = exposition(registry)
    assert types == exposition(Registry(role, colocated=True))[0]
    assert not any(label_sets[0] for name, label_sets in samples.items() if name.startswith("baton_"))
