"""What an engine process decides before it serves: its configuration, its memory, its graph status."""

import subprocess
import sys

import msgspec
import pytest

from engine.config import EngineConfig
from engine.graph_settings import PrefillGraphSettings
from engine.memory import (
    DEFAULT_BYTES,
    DEVICE_MARGIN_BYTES,
    GRAPH_BYTES,
    DeviceMemory,
    device_kv_blocks,
    free_memory_bytes,
    kv_blocks,
)
from engine.scheduler.limits import Limits
from rpc.errors import BatonError, ErrorCode

PER_BLOCK = 1000


def config(**options):
    return EngineConfig(**{"role": "prefill", "model": "/models/tiny", "block_size": 16, **options})


def test_configuration_when_it_crosses_to_the_engine_then_every_field_arrives():
    values = {}
    for index, field in enumerate(msgspec.structs.fields(EngineConfig)):
        kind = {str: f"text{index}", int: 1000 + index, float: 0.375 + index, bool: True}
        kind |= {bool | None: True, int | None: 1000 + index, tuple[int, ...]: (index, index + 1)}
        kind[PrefillGraphSettings] = PrefillGraphSettings(enabled=True, buckets=(3, 7), max_padding_ratio=0.375)
        default = field.default
        values[field.name] = (not default) if isinstance(default, bool) else kind[field.type]
    sent = EngineConfig(**values)
    assert EngineConfig.from_json(sent.to_json()) == sent
    assert len({repr(value) for value in values.values() if not isinstance(value, bool)}) > 20


def test_configuration_when_a_field_is_missing_then_it_has_its_default():
    assert EngineConfig.from_json(b'{"role": "decode", "model": "m"}').max_num_seqs == 64


@pytest.mark.parametrize("text", [b"", b"[]", b'{"role": "decode"}', b'{"role": "decode", "model": "m", "x": 1}'])
def test_configuration_when_it_is_not_of_this_version_then_it_is_refused(text):
    with pytest.raises(BatonError) as refusal:
        EngineConfig.from_json(text)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"role": "router"}, "--role"),
        ({"kv_checksum": "maybe"}, "--kv-checksum"),
        ({"kv_load_failure_policy": "hope"}, "--kv-load-failure-policy"),
        ({"block_size": -1}, "--block-size"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"decode_capture_sizes": (1, 65)}, "--decode-capture-config"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "--max-num-batched-tokens"),
        ({"kv_lease_seconds": 0.0}, "--kv-lease-seconds"),
        ({"decode_retry_times": -1}, "--decode-retry-times"),
        ({"load_cache_timeout_ms": 99}, "--load-cache-timeout-ms"),
        ({"cache_store_chunk_bytes": 1 << 23}, "--cache-store-chunk-bytes"),
    ],
)
def test_configuration_when_a_value_is_out_of_range_then_the_flag_is_named(options, flag):
    with pytest.raises(BatonError) as refusal:
        config(**options).check()
    assert refusal.value.code is ErrorCode.INVALID_PARAMS
    assert refusal.value.message.startswith(flag)


def test_configuration_when_it_is_the_default_then_it_is_valid():
    config().check()


def test_lengths_when_prompts_are_computed_whole_then_a_step_must_hold_the_longest():
    settings = config(enable_chunked_prefill=False, max_num_batched_tokens=512)
    settings.check_lengths(512)
    with pytest.raises(BatonError, match="--max-num-batched-tokens 512"):
        settings.check_lengths(513)
    config(max_num_batched_tokens=512).check_lengths(10**6)


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "free", "expected"),
    [
        ({"num_kv_blocks": 7}, 0, 7),
        ({"kv_cache_memory_bytes": 100_000}, 0, 99),  # block 0 takes its share
        ({}, 10_000_000, 999),
        ({}, 10 * DEFAULT_BYTES * 3, DEFAULT_BYTES // PER_BLOCK - 1),
        ({}, 100_000, 64),  # a tenth would be too little for one request
    ],
)
def test_blocks_when_memory_is_given_or_free_then_they_fill_it(options, free, expected):
    blocks = kv_blocks(config(**options), bytes_per_block=PER_BLOCK, max_model_len=1024, free_bytes=free)
    assert blocks == expected


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"kv_cache_memory_bytes": 64_999}, "--kv-cache-memory-bytes"), ({}, "--max-model-len")],
)
def test_blocks_when_one_request_would_not_fit_then_the_flag_is_named(options, flag):
    with pytest.raises(BatonError) as refusal:
        kv_blocks(config(**options), bytes_per_block=PER_BLOCK, max_model_len=1024, free_bytes=70_000)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS
    assert flag in refusal.value.message


MEMORY = DeviceMemory(total=100 << 30, free=80 << 30, held=16 << 30, step_peak=2 << 30)


def test_device_blocks_when_the_device_is_the_engines_own_then_they_fill_its_share():
    blocks = device_kv_blocks(
        config(gpu_memory_utilization=0.5),
        MEMORY,
        bytes_per_block=1 << 20,
        max_model_len=1024,
        graphs=64,
        spare_blocks=7,
    )
    assert (blocks + 1 + 7) << 20 == (50 << 30) - (16 << 30) - (2 << 30) - 64 * GRAPH_BYTES


def test_device_blocks_when_others_use_the_device_then_they_fill_what_is_free():
    blocks = device_kv_blocks(config(gpu_memory_utilization=1.0), MEMORY, bytes_per_block=1 << 20, max_model_len=1024)
    assert (blocks + 1) << 20 == (80 << 30) - (2 << 30) - DEVICE_MARGIN_BYTES


@pytest.mark.parametrize(
    ("options", "memory", "named"),
    [
        ({"gpu_memory_utilization": 0.17}, MEMORY, "--gpu-memory-utilization"),
        ({}, DeviceMemory(100 << 30, 2 << 30, 16 << 30, 2 << 30), "lower their --gpu-memory-utilization"),
    ],
)
def test_device_blocks_when_one_request_would_not_fit_then_the_remedy_is_named(options, memory, named):
    with pytest.raises(BatonError) as refusal:
        device_kv_blocks(config(**options), memory, bytes_per_block=1 << 20, max_model_len=1024)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS
    assert named in refusal.value.message
    assert "--max-model-len" in refusal.value.message


def test_device_blocks_when_their_number_is_given_then_it_is_taken():
    assert device_kv_blocks(config(num_kv_blocks=9), MEMORY, bytes_per_block=1, max_model_len=1024) == 9


def test_free_memory_when_the_host_is_asked_then_it_is_plausible(tmp_path):
    assert free_memory_bytes() > 1 << 20
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:       5 kB\n")
    assert free_memory_bytes(tmp_path / "meminfo") == 5120


# -- limits -----------------------------------------------------------------------------------------------------


def test_limits_when_they_come_from_the_configuration_then_times_are_in_seconds():
    facts = {"max_model_len": 100, "vocab_size": 10, "eos_token_ids": frozenset({1})}
    limits = Limits.of(config(allow_local_prefill=False, prefill_max_wait_timeout_ms=1500), **facts)
    assert limits.queue_limit_s == 1.5
    assert limits.reserve_timeout_s == 0.1
    assert limits.allow_local_prefill  # computing prompts is what a prefill server is for
    assert not Limits.of(config(role="decode", allow_local_prefill=False), **facts).allow_local_prefill
    assert limits.model_name == "tiny"


@pytest.mark.parametrize("module", ["engine.client", "engine.messages", "engine.config"])
def test_import_when_a_front_loads_its_side_then_torch_stays_out(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_process_when_it_is_started_by_hand_then_it_explains_itself():
    done = subprocess.run(
        [sys.executable, "-m", "engine.process"], input=b"", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert b"--inbox" in done.stderr


def test_process_when_its_front_is_gone_then_it_ends(tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    done = subprocess.run(
        [
            sys.executable, "-m", "engine.process",
            "--inbox", f"ipc://{folder}/in", "--outbox", f"ipc://{folder}/out", "--front-pid", "1",
        ],
        input=config().to_json(), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert not folder.exists()
