from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2, worker_pb2
from router.pairing import (
    GroupFacts,
    WorkerFacts,
    differences,
    pair_error,
    reference_fingerprint,
)
from rpc.errors import BatonError, ErrorCode
from rpc.version import PROTOCOL_VERSION

GROUP = GroupFacts("full", 2, 2, 16, 16, "float32")
PREFILL = WorkerFacts(
    role="prefill",
    engine_id="a" * 32,
    model_fingerprint="f" * 32,
    kv_dtype="float32",
    groups=(GROUP,),
    cache_store_addresses=("127.0.0.1:1",),
    transports=("ipc", "grpc"),
    served_model_names=("tiny",),
)
DECODE = replace(PREFILL, role="decode", engine_id="b" * 32, transports=("grpc",))


def test_differences_when_everything_is_shared_then_there_are_none():
    assert differences(PREFILL, DECODE) == ()


def _with_group(**change: object) -> WorkerFacts:
    return replace(DECODE, groups=(replace(GROUP, **change),))


@pytest.mark.parametrize(
    ("decode", "facts"),
    [
        (replace(DECODE, protocol_version=PROTOCOL_VERSION + 1), ["protocol_version"]),
        (replace(DECODE, model_fingerprint="0" * 32), ["model_fingerprint"]),
        (replace(DECODE, kv_dtype="bfloat16"), ["kv_dtype"]),
        (replace(DECODE, draft_model_fingerprint="d"), ["draft_model_fingerprint"]),
        (replace(DECODE, transports=("nixl",)), ["transports"]),
        (replace(DECODE, transports=()), ["transports"]),
        (replace(PREFILL, tp_size=2), ["role"]),
        (_with_group(block_size=24), ["block_size[full]"]),
        (_with_group(num_layers=3), ["num_layers[full]"]),
        (_with_group(num_kv_heads=4), ["num_kv_heads[full]"]),
        (_with_group(head_dim=32), ["head_dim[full]"]),
        (_with_group(dtype="bfloat16"), ["dtype[full]"]),
        (_with_group(tag="mla"), ["groups"]),
        (replace(DECODE, groups=(GROUP, replace(GROUP, tag="window"))), ["groups"]),
        (
            replace(_with_group(block_size=24, dtype="float16"), kv_dtype="float16", model_fingerprint=""),
            ["block_size[full]", "dtype[full]", "kv_dtype", "model_fingerprint"],
        ),
    ],
)
def test_differences_when_facts_differ_then_each_of_them_is_listed(decode, facts):
    assert sorted(d.fact for d in differences(PREFILL, decode)) == facts


@pytest.mark.parametrize(
    "change",
    [{"served_model_names": ("other",)}, {"max_model_len": 7}, {"version": "9"}, {"allows_local_prefill": True}],
)
def test_differences_when_a_fact_need_not_be_shared_then_it_is_not_listed(change):
    assert differences(PREFILL, replace(DECODE, **change)) == ()


@pytest.mark.parametrize("size", [4, 8, 32, 64, 1024])
def test_differences_when_one_block_size_is_a_multiple_of_the_other_then_the_servers_fit(size):
    assert differences(PREFILL, _with_group(block_size=size)) == ()


@given(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 2, st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_tp_sizes_when_one_divides_the_other_and_both_share_out_the_heads_then_they_fit(p, d, heads):
    fits = (p % d == 0 or d % p == 0) and all(heads % size == 0 or size % heads == 0 for size in (p, d))
    groups = (replace(GROUP, num_kv_heads=heads),)
    found = differences(replace(PREFILL, tp_size=p, groups=groups), replace(DECODE, tp_size=d, groups=groups))
    assert [f.fact for f in found] == ([] if fits else ["tp_size"])
    if found:
        assert pair_error(found).code is ErrorCode.ASYMMETRIC_TP_FAILED


def test_pair_error_when_several_facts_differ_then_the_metadata_has_each_with_both_values():
    error = pair_error(differences(PREFILL, replace(_with_group(block_size=24), kv_dtype="bfloat16", tp_size=2)))
    assert error.code is ErrorCode.INCOMPATIBLE_PEER
    assert error.metadata == {
        "block_size[full]": "prefill 16, decode 24 (one must be a multiple of the other)",
        "kv_dtype": "prefill float32, decode bfloat16",
    }
    assert error.message.endswith("block_size[full] (--block-size), kv_dtype (--dtype, --kv-cache-dtype)")
    assert "127.0.0.1" not in error.message


@pytest.mark.parametrize(
    ("fingerprints", "reference"), [("", None), ("a", "a"), ("ab", "a"), ("abb", "b"), ("abab", "a"), ("baab", "b")]
)
def test_reference_fingerprint_when_servers_disagree_then_most_of_them_decide(fingerprints, reference):
    assert reference_fingerprint(replace(PREFILL, model_fingerprint=f) for f in fingerprints) == reference


def _info() -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        role=worker_pb2.ROLE_PREFILL,
        engine_id="e",
        protocol_version=1,
        model_fingerprint="f",
        kv_dtype="float32",
        groups=[common_pb2.KvGroup(tag="full", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16)],
        tp_size=1,
        cache_store_addresses=["127.0.0.1:1"],
        max_model_len=8,
        vocab_size=9,
    )


def test_from_info_when_it_is_complete_then_the_facts_are_its():
    facts = WorkerFacts.from_info(_info())
    assert (facts.role, facts.tp_size, facts.vocab_size, facts.groups[0].block_size) == ("prefill", 1, 9, 16)


@pytest.mark.invariant("RPC-31")
@pytest.mark.parametrize(
    "field",
    ["role", "engine_id", "protocol_version", "model_fingerprint", "groups", "tp_size", "max_model_len", "vocab_size"],
)
def test_from_info_when_a_field_is_absent_then_it_is_refused_by_name(field):
    info = _info()
    info.ClearField(field)
    with pytest.raises(BatonError) as caught:
        WorkerFacts.from_info(info)
    assert caught.value.breach == "absent_field"
    assert field in caught.value.metadata["absent"]


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_from_info_when_a_group_of_layers_has_no_size_then_it_is_refused_by_name(field):
    info = _info()
    info.groups.add(tag="window", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16)
    info.groups[1].ClearField(field)
    with pytest.raises(BatonError) as caught:
        WorkerFacts.from_info(info)
    assert caught.value.breach == "absent_field"
    assert caught.value.metadata["absent"] == f"groups.{field}"


def test_from_info_when_a_prefill_server_has_no_cache_store_per_rank_then_it_is_refused():
    info = _info()
    info.tp_size = 2
    with pytest.raises(BatonError) as caught:
        WorkerFacts.from_info(info)
    assert "cache_store_addresses" in caught.value.metadata["absent"]
