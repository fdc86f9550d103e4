"""Invariants 8 to 11 of docs/cuda_graphs.md: topology, experts, backends, and one status for each refusal."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

from engine.attention.backend import AttentionBackend, Capabilities, GraphSelectionMode
from engine.runner.prefill_graph.gate import (
    GateFacts,
    ModelFacts,
    MoeFacts,
    PrefillGraphUnsupported,
    Topology,
    ask,
    capable_backend,
    effective,
)
from rpc.graph_status import PrefillGraphStatus as Status

ROOT = Path(__file__).resolve().parents[4]
MOE = MoeFacts(num_experts=8, top_k=2, executor="masked_grouped_gemm")


def facts(**changes):
    values = {"requested": True, "prefills": True, "cuda_graphs": True, "choose_backend": lambda: None, **changes}
    return GateFacts(**values)


class Backend(AttentionBackend):
    """Real selection code, without the attention that these tests do not reach."""

    name = "some"
    capabilities = Capabilities(cpu=True)

    def bind(self, pool):
        return pool

    def plan(self, rows):
        return rows

    def attend(self, plan, layer, q, kv, window):
        raise AssertionError("not reached")


class Capable(Backend):
    name = "capable"
    capabilities = Capabilities(cuda=True, prefill_graph=True)


# -- 8: topology ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(("tensor", "data", "pipeline", "expert"), list(itertools.product((1, 2), repeat=4)))
def test_topology_when_any_size_is_not_one_then_there_are_no_graphs(tensor, data, pipeline, expert, moe):
    topology = Topology(tensor=tensor, data=data, pipeline=pipeline, expert=expert, world=tensor * data * pipeline)
    answer = ask(facts(topology=topology, model=ModelFacts(moe=moe)))
    alone = (tensor, data, pipeline, expert) == (1, 1, 1, 1)
    assert answer.status is (Status.CAPTURED if alone else Status.UNSUPPORTED_TOPOLOGY)


@pytest.mark.parametrize("topology", [Topology(world=2), Topology(layer_micro_batches=True)])
def test_topology_when_ranks_share_or_layers_alternate_then_there_are_no_graphs(topology):
    assert ask(facts(topology=topology)).status is Status.UNSUPPORTED_TOPOLOGY


# -- 9: experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 9),
        ("top_k", 0),
        ("redundant_experts", 1),
        ("all_to_all", "deepep"),
        ("all_to_all", "mori"),
        ("forced_experts", True),
        ("executor", "fused_moe"),
        ("executor", ""),
    ],
)
def test_experts_when_one_condition_does_not_hold_then_the_configuration_is_refused(field, value):
    answer = ask(facts(model=ModelFacts(moe=dataclasses.replace(MOE, **{field: value}))))
    assert answer.status is Status.UNSUPPORTED_MOE_CONFIG
    assert answer.detail


def test_experts_when_every_condition_holds_or_there_are_none_then_graphs_are_captured():
    assert ask(facts(model=ModelFacts(moe=MOE))).open
    assert ask(facts()).open
    tested = {"top_k", "num_experts", "redundant_experts", "all_to_all", "forced_experts", "executor"}
    assert {field.name for field in dataclasses.fields(MoeFacts)} == tested  # a new condition needs its case above


def test_facts_when_they_are_built_then_every_field_is_given_by_its_name():
    names = {"GateFacts", "ModelFacts", "MoeFacts", "Topology"}
    built = [
        node
        for path in (ROOT / "engine").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    assert built
    assert not [node for node in built if node.args]
    with pytest.raises(TypeError):
        MoeFacts(8, 2)  # type: ignore[misc]


# -- 10: backends -----------------------------------------------------------------------------------------------


def test_backend_when_it_says_nothing_then_it_admits_eager_steps_alone():
    backend = Backend()
    assert backend.admits(selection_mode=GraphSelectionMode.EAGER)
    assert not backend.admits(selection_mode=GraphSelectionMode.DECODE_GRAPH)
    assert not backend.admits(selection_mode=GraphSelectionMode.PREFILL_GRAPH)
    assert not Backend.capabilities.prefill_graph


@pytest.mark.parametrize("mode", ["graph", "", None, 0])
def test_backend_when_the_mode_is_unknown_then_it_raises(mode):
    with pytest.raises(ValueError, match="selection mode"):
        Backend().admits(selection_mode=mode)


def test_backend_when_the_mode_is_positional_then_it_raises():
    with pytest.raises(TypeError):
        Backend().admits(GraphSelectionMode.EAGER)  # type: ignore[misc]


def test_backend_when_the_best_one_is_incapable_then_the_next_is_taken():
    mode = GraphSelectionMode.PREFILL_GRAPH
    capable = Capable()
    assert capable_backend([Backend(), capable, Capable()], selection_mode=mode) is capable
    first = Backend()
    assert capable_backend([first, capable], selection_mode=GraphSelectionMode.EAGER) is first


@pytest.mark.parametrize("candidates", [[], [Backend()], [Backend(), Backend()]])
def test_backend_when_none_is_capable_then_the_refusal_has_a_type_of_its_own(candidates):
    def choose():
        return capable_backend(candidates, selection_mode=GraphSelectionMode.PREFILL_GRAPH)

    with pytest.raises(PrefillGraphUnsupported):
        choose()
    answer = ask(facts(choose_backend=choose))
    assert answer.status is Status.UNSUPPORTED_BACKEND


def test_backend_when_choosing_fails_for_another_reason_then_it_is_no_refusal():
    def choose():
        raise RuntimeError("PrefillGraphUnsupported")  # the text does not make it one

    with pytest.raises(RuntimeError):
        ask(facts(choose_backend=choose))


def test_backends_when_they_run_on_a_cpu_then_none_admits_a_prefill_graph():
    from engine.attention.native_backend import NativeBackend
    from engine.attention.torch_backend import TorchBackend

    for kind in (TorchBackend, NativeBackend):
        assert not kind.capabilities.prefill_graph
        assert kind.admits is AttentionBackend.admits


# -- 11: one status for each refusal ----------------------------------------------------------------------------


def unsupported():
    raise PrefillGraphUnsupported("none")


REFUSALS = [
    ({"requested": False}, Status.NOT_REQUESTED),
    ({"prefills": False}, Status.NOT_REQUESTED),
    ({"cuda_graphs": False}, Status.FEATURE_DISABLED),
    ({"graphs_allowed": False}, Status.FEATURE_DISABLED),
    ({"topology": Topology(tensor=2)}, Status.UNSUPPORTED_TOPOLOGY),
    ({"model": ModelFacts(latent_attention=True)}, Status.UNSUPPORTED_MODEL),
    ({"model": ModelFacts(sparse_attention=True)}, Status.UNSUPPORTED_MODEL),
    ({"model": ModelFacts(static_shapes=False)}, Status.UNSUPPORTED_MODEL),
    ({"has_kv": False}, Status.CAPTURE_UNAVAILABLE),
    ({"model": ModelFacts(moe=dataclasses.replace(MOE, executor="other"))}, Status.UNSUPPORTED_MOE_CONFIG),
    ({"choose_backend": unsupported}, Status.UNSUPPORTED_BACKEND),
]


@pytest.mark.parametrize(("change", "status"), REFUSALS)
def test_gate_when_one_test_fails_then_its_own_status_is_the_answer(change, status):
    answer = ask(facts(**change))
    assert answer.status is status
    assert not answer.open


def test_gate_when_several_tests_fail_then_the_first_decides():
    for count in range(1, len(REFUSALS) + 1):
        changes = {}
        for change, _ in reversed(REFUSALS[-count:]):
            changes |= change
        assert ask(facts(**changes)).status is REFUSALS[-count][1]


def test_gate_when_the_feature_is_not_wanted_or_not_allowed_then_its_settings_are_not_looked_at():
    for change, status in REFUSALS:
        early = status in (Status.NOT_REQUESTED, Status.FEATURE_DISABLED)
        assert effective(facts(**change)).open is not early
