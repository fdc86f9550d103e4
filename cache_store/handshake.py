"""What two agents must share before the first load."""

from __future__ import annotations

from cache_store.checksum import MODES, stricter
from cache_store.geometry.layout import AgentIdentity
from cache_store.geometry.tp_mapping import peer_map
from cache_store.transports import IPC, TCP, Offer
from cache_store.wire import out_of_range, require
from protos import cache_store_pb2, common_pb2
from rpc.block_sizes import block_sizes_fit
from rpc.errors import BatonError, ErrorCode
from rpc.version import PROTOCOL_VERSION


def make_request(
    identity: AgentIdentity, expected_engine_id: str, checksum: str, offer: Offer
) -> cache_store_pb2.HandshakeRequest:
    return cache_store_pb2.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        engine_id=identity.engine_id,
        expected_engine_id=expected_engine_id,
        model_fingerprint=identity.model_fingerprint,
        kv_dtype=identity.kv_dtype,
        groups=[group.to_proto() for group in identity.groups],
        tp_size=identity.tp_size,
        rank=identity.rank,
        transports=offer.transports,
        checksum=checksum,
        host_id=offer.host_id,
    )


def restarted(expected: str, found: str) -> BatonError:
    return BatonError(
        ErrorCode.PEER_RESTARTED,
        "another engine than expected answers at this address",
        metadata={"expected_engine_id": expected, "engine_id": found},
    )


def _layout(group: common_pb2.KvGroup) -> str:
    return (
        f"layers {group.num_layers}, kv_heads {group.num_kv_heads}, head_dim {group.head_dim}, "
        f"block_size {group.block_size}, {group.dtype}"
    )


def _fits(theirs: common_pb2.KvGroup, own: common_pb2.KvGroup) -> bool:
    """Equal but for the block sizes, which fit."""
    if theirs == own:
        return True
    resized = common_pb2.KvGroup()
    resized.CopyFrom(theirs)
    resized.block_size = own.block_size
    return resized == own and block_sizes_fit(own.block_size, theirs.block_size)


def differing_facts(identity: AgentIdentity, request: cache_store_pb2.HandshakeRequest, offer: Offer) -> dict[str, str]:
    """Every fact that keeps the caller and `identity` from working as a pair: name to "caller's value / own value"."""
    facts: dict[str, str] = {}

    def compare(name: str, theirs: object, own: object) -> None:
        if theirs != own:
            facts[name] = f"{str(theirs)[:64]} / {str(own)[:64]}"

    compare("protocol_version", request.protocol_version, PROTOCOL_VERSION)
    compare("model_fingerprint", request.model_fingerprint, identity.model_fingerprint)
    compare("kv_dtype", request.kv_dtype, identity.kv_dtype)
    theirs = {group.tag: group for group in request.groups}
    own = {group.tag: group.to_proto() for group in identity.groups}
    compare("groups", ", ".join(sorted(theirs)), ", ".join(sorted(own)))
    for tag in sorted(theirs.keys() & own.keys())[:16]:
        if not _fits(theirs[tag], own[tag]):
            facts[f"group {tag[:32]}"] = f"{_layout(theirs[tag])[:128]} / {_layout(own[tag])}"
    if not offer.choose(request.transports, request.host_id):
        why = _impossible(request, offer)
        facts["transports"] = f"{', '.join(request.transports)[:64]} / {', '.join(offer.transports)}{why}"
    return facts


def _impossible(request: cache_store_pb2.HandshakeRequest, offer: Offer) -> str:
    """Why the ways that both sides name do not lead from one to the other, in brackets; empty when they name none."""
    reasons = []
    for transport in offer.transports:
        if transport not in request.transports:
            continue
        if not offer.serves(transport):
            reasons.append(f"{transport}: this side has no {'data port' if transport == TCP else 'memory to show'}")
        elif transport == IPC:
            reasons.append("ipc: they are on two machines")
    return f" ({', '.join(reasons)}; use --kv-transport auto)" if reasons else ""


def answer(
    identity: AgentIdentity,
    request: cache_store_pb2.HandshakeRequest,
    offer: Offer,
    checksum: str,
    lease_seconds: float,
    better_soon: bool = False,
) -> cache_store_pb2.HandshakeResponse:
    """The response, or ERROR_GENERATE_CONFIG_FORMAT (a field is absent), INVALID_PARAMS, PEER_RESTARTED,
    INCOMPATIBLE_PEER, ASYMMETRIC_TP_FAILED, in this order."""
    require(
        request, "", "protocol_version", "engine_id", "expected_engine_id", "tp_size", "rank", "transports", "checksum"
    )
    if request.checksum not in MODES:
        raise out_of_range("checksum", request.checksum, ", ".join(MODES))
    if request.rank >= request.tp_size:
        raise out_of_range("rank", request.rank, f"[0, tp_size {request.tp_size})")
    if request.expected_engine_id != identity.engine_id:
        raise restarted(request.expected_engine_id, identity.engine_id)
    facts = differing_facts(identity, request, offer)
    if facts.keys() == {"transports"}:
        message = f"no transport of the decode server leads to the prefill server: {facts['transports']}"
        raise BatonError(ErrorCode.INCOMPATIBLE_PEER, message, metadata=facts)
    if facts:
        raise BatonError(
            ErrorCode.INCOMPATIBLE_PEER,
            f"the two servers differ in {', '.join(facts)}; pair servers of one model and version, "
            "and of block sizes of which one is a multiple of the other",
            metadata=facts,
        )
    try:
        peer_map(identity.heads, request.tp_size, request.rank, identity.tp_size)
    except BatonError as error:
        raise error.with_context(tp_size=f"{request.tp_size} / {identity.tp_size}") from None
    transport = offer.choose(request.transports, request.host_id)
    return cache_store_pb2.HandshakeResponse(
        engine_id=identity.engine_id,
        tp_size=identity.tp_size,
        rank=identity.rank,
        transport=transport,
        memory=offer.memories.get(transport),
        data_port=offer.data_port if transport == TCP else 0,
        groups=[group.to_proto() for group in identity.groups],
        checksum=stricter(request.checksum, checksum),
        lease_seconds=lease_seconds,
        better_soon=better_soon,
    )


def result_of(error: BatonError) -> str:
    """Of a handshake that failed: the label of baton_kv_handshakes_total."""
    if error.code in (ErrorCode.INCOMPATIBLE_PEER, ErrorCode.ASYMMETRIC_TP_FAILED):
        return "incompatible"
    return "restarted" if error.code is ErrorCode.PEER_RESTARTED else "failed"
