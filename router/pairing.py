"""What a prefill and a decode server must share to serve a request together. Pure.

`differences` lists every fact that keeps two servers apart; `check_pair` makes the error of it. The cache
stores compare the same facts again when they shake hands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from protos import worker_pb2
from rpc.block_sizes import block_sizes_fit
from rpc.errors import BatonError, ErrorCode
from rpc.tp_sizes import sizes_fit
from rpc.version import PROTOCOL_VERSION

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

_REQUIRED = ("protocol_version", "tp_size", "max_model_len", "vocab_size")
_GROUP_SIZES = ("num_layers", "num_kv_heads", "head_dim", "block_size")
_ROLE_NAMES: dict[int, Role] = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Layout of one cache group: per layer [num_blocks, 2, num_kv_heads, block_size, head_dim] of dtype."""

    tag: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change while a server's engine lives. `cache_store_addresses` are in rank order."""

    role: Role
    engine_id: str
    model_fingerprint: str
    kv_dtype: str
    groups: tuple[GroupFacts, ...]
    cache_store_addresses: tuple[str, ...]
    transports: tuple[str, ...]
    served_model_names: tuple[str, ...]
    protocol_version: int = PROTOCOL_VERSION
    tp_size: int = 1
    dtype: str = ""
    draft_model_fingerprint: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 0
    num_kv_blocks: int = 0
    allows_local_prefill: bool = False
    version: str = ""
    attention_backend: str = ""
    http_address: str = ""
    keeps_to_grammars: bool = False

    @classmethod
    def from_info(cls, info: worker_pb2.WorkerInfo) -> WorkerFacts:
        """The facts of a `Worker.GetInfo` answer. Raises UNKNOWN_ERROR that names what is absent."""
        absent = [name for name in _REQUIRED if not info.HasField(name)]  # type: ignore[arg-type]
        absent += [name for name in ("engine_id", "model_fingerprint", "groups") if not getattr(info, name)]
        absent += [f"groups.{name}" for name in _GROUP_SIZES if any(getattr(g, name) < 1 for g in info.groups)]
        role = _ROLE_NAMES.get(info.role)
        if role is None:
            absent.append("role")
        elif role == "prefill" and len(info.cache_store_addresses) != info.tp_size:
            absent.append("cache_store_addresses (one per rank)")
        if absent or role is None:
            raise BatonError(
                ErrorCode.UNKNOWN_ERROR,
                f"the server does not say: {', '.join(absent)}",
                metadata={"contract_breach": "absent_field", "absent": ", ".join(absent)},
            )
        return cls(
            role=role,
            engine_id=info.engine_id,
            model_fingerprint=info.model_fingerprint,
            kv_dtype=info.kv_dtype,
            groups=tuple(
                GroupFacts(g.tag, g.num_layers, g.num_kv_heads, g.head_dim, g.block_size, g.dtype) for g in info.groups
            ),
            cache_store_addresses=tuple(info.cache_store_addresses),
            transports=tuple(info.transports),
            served_model_names=tuple(info.served_model_names),
            protocol_version=info.protocol_version,
            tp_size=info.tp_size,
            dtype=info.dtype,
            draft_model_fingerprint=info.draft_model_fingerprint,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            max_num_seqs=info.max_num_seqs,
            num_kv_blocks=info.num_kv_blocks,
            allows_local_prefill=info.allows_local_prefill,
            version=info.version,
            attention_backend=info.attention_backend,
            http_address=info.http_address,
            keeps_to_grammars=info.keeps_to_grammars,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two servers that should form a pair differ. `rule`: what it takes, where that is not to be
    equal."""

    fact: str
    prefill: str
    decode: str
    rule: str = ""

    @property
    def values(self) -> str:
        rule = f" ({self.rule})" if self.rule else ""
        return f"prefill {self.prefill}, decode {self.decode}{rule}"

    def __str__(self) -> str:
        return f"{self.fact}: {self.values}"


def differences(prefill: WorkerFacts, decode: WorkerFacts) -> tuple[Difference, ...]:
    """Every fact that keeps these two apart; empty when they can serve a request together."""
    found: list[Difference] = []

    def compare(fact: str, p: object, d: object) -> None:
        if p != d:
            found.append(Difference(fact, _shown(p), _shown(d)))

    compare("role", prefill.role, "prefill")
    compare("role", "decode", decode.role)
    compare("protocol_version", prefill.protocol_version, decode.protocol_version)
    compare("model_fingerprint", prefill.model_fingerprint, decode.model_fingerprint)
    compare("kv_dtype", prefill.kv_dtype, decode.kv_dtype)
    compare("draft_model_fingerprint", prefill.draft_model_fingerprint, decode.draft_model_fingerprint)
    p_groups, d_groups = ({g.tag: g for g in facts.groups} for facts in (prefill, decode))
    compare("groups", sorted(p_groups), sorted(d_groups))
    for tag in sorted(p_groups.keys() & d_groups.keys()):
        p_group, d_group = p_groups[tag], d_groups[tag]
        for name in ("num_layers", "num_kv_heads", "head_dim", "dtype"):
            compare(f"{name}[{tag}]", getattr(p_group, name), getattr(d_group, name))
        sizes = (p_group.block_size, d_group.block_size)
        if not block_sizes_fit(*sizes):
            p_size, d_size = map(str, sizes)
            found.append(Difference(f"block_size[{tag}]", p_size, d_size, "one must be a multiple of the other"))
    heads = [g.num_kv_heads for g in prefill.groups + decode.groups]
    if not sizes_fit(prefill.tp_size, decode.tp_size, heads):
        found.append(Difference("tp_size", str(prefill.tp_size), str(decode.tp_size)))
    if not set(prefill.transports) & set(decode.transports):
        found.append(Difference("transports", _shown(prefill.transports), _shown(decode.transports)))
    return tuple(found)


# What each fact follows from, as servers are told it
_CAUSES = {
    "protocol_version": "run one version of Baton",
    "model_fingerprint": "--model: the same weights and config.json for all servers",
    "kv_dtype": "--dtype, --kv-cache-dtype",
    "block_size": "--block-size",
    "tp_size": "--tensor-parallel-size",
    "transports": "--kv-transport",
}


def _with_cause(fact: str) -> str:
    cause = _CAUSES.get(fact.partition("[")[0])
    return f"{fact} ({cause})" if cause else fact


def pair_error(found: Iterable[Difference]) -> BatonError:
    """INCOMPATIBLE_PEER with each differing fact in the metadata; ASYMMETRIC_TP_FAILED when it is TP
    alone."""
    found = tuple(found)
    names = sorted({d.fact for d in found})
    code = ErrorCode.ASYMMETRIC_TP_FAILED if names == ["tp_size"] else ErrorCode.INCOMPATIBLE_PEER
    return BatonError(
        code,
        f"no prefill and decode server fit together; they differ in {', '.join(map(_with_cause, names))}",
        metadata={d.fact: d.values for d in found},
    )


def version_error(facts: WorkerFacts) -> BatonError:
    """INCOMPATIBLE_PEER of a server that speaks another version of the protocol than the router."""
    return BatonError(
        ErrorCode.INCOMPATIBLE_PEER,
        f"the {facts.role} servers speak another version of the protocol than the router; run one version of Baton",
        metadata={"protocol_version": f"{facts.role} {facts.protocol_version}, router {PROTOCOL_VERSION}"},
    )


def reference_fingerprint(facts: Iterable[WorkerFacts]) -> str | None:
    """The model that the cluster serves: the fingerprint that most servers have, of equals the first one.

    A router has one tokenizer, hence one model; a server with another one must not get its requests.
    """
    counts = Counter(f.model_fingerprint for f in facts)
    return max(counts, key=lambda fingerprint: counts[fingerprint]) if counts else None


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(str(v) for v in value) or "none"
    return str(value) or "none"
