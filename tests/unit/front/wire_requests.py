"""Well-formed wire messages, to be spoilt one field at a time."""

from __future__ import annotations

from protos import common_pb2

REQUEST_ID = "req-1"
REQUEST_KEY = "req-1#0.0123abcd"
MODEL = "tiny"


def sampling(**fields: object) -> common_pb2.SamplingParams:
    values: dict[str, object] = {
        "max_tokens": 8, "seed": 7, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **fields,
    }  # fmt: skip
    return common_pb2.SamplingParams(**values)  # type: ignore[arg-type]


def generate_input(**fields: object) -> common_pb2.GenerateInput:
    values: dict[str, object] = {
        "request_id": REQUEST_ID, "request_key": REQUEST_KEY, "prompt_token_ids": [1, 2, 3],
        "sampling": sampling(), "model": MODEL, **fields,
    }  # fmt: skip
    return common_pb2.GenerateInput(**values)  # type: ignore[arg-type]


def kv_source(**fields: object) -> common_pb2.KvSource:
    values: dict[str, object] = {
        "engine_id": "ab" * 16, "cache_store_addresses": ["127.0.0.1:50061"], "tp_size": 1, **fields,
    }  # fmt: skip
    return common_pb2.KvSource(**values)  # type: ignore[arg-type]
