"""Settings of the servers: defaults, mistakes that name their flag, and the engine's configuration made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_server.settings import DecodeSettings
from engine.config import EngineConfig
from front.settings import check_advertised, engine_config
from prefill_server.settings import PrefillSettings
from rpc.settings import SettingsError


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = tmp_path / "some-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return str(model)


def test_parse_when_only_the_model_is_given_then_ports_and_name_have_their_defaults(folder: str) -> None:
    prefill = PrefillSettings.parse(["--model", folder], {})
    decode = DecodeSettings.parse(["--model", folder], {})
    assert (prefill.port, prefill.cache_store_port, prefill.metrics_port) == (50051, 50061, 9101)
    assert (decode.port, decode.cache_store_port, decode.metrics_port) == (50052, 50071, 9102)
    assert decode.allow_local_prefill
    assert prefill.served_names == ("some-model",)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (0, "", 0, "")),
        (["--kv-tier", "host:4GiB"], (4 << 30, "", 0, "")),
        (["--kv-host-bytes", "4GiB"], (4 << 30, "", 0, "")),
        (["--kv-tier", "disk:/kv/a,b:c:50GiB"], (0, "/kv/a,b:c", 50 << 30, "")),
        (["--kv-disk-path", "/kv"], (0, "/kv", 10 << 30, "")),
        (["--kv-disk-path", "/kv", "--kv-tier", "host:1MiB"], (1 << 20, "/kv", 10 << 30, "")),
        (
            ["--kv-tier", "mooncake://h:1?segment_bytes=1", "--kv-tier", "disk:/kv:1GiB", "--kv-tier", "host:1GiB"],
            (1 << 30, "/kv", 1 << 30, "mooncake://h:1?segment_bytes=1"),
        ),
    ],
)
def test_engine_config_when_tiers_are_named_in_either_way_then_has_each(
    folder: str, flags: list[str], expected: tuple[int, str, int, str]
) -> None:
    settings = DecodeSettings.parse(["--model", folder, *flags], {})
    config = engine_config(settings, "decode", allow_local_prefill=True)
    assert (config.kv_host_bytes, config.kv_disk_path, config.kv_disk_bytes, config.kv_tier) == expected


def test_parse_when_names_are_given_then_the_first_is_the_label(folder: str) -> None:
    settings = DecodeSettings.parse(["--model", folder, "--served-model-name", "a,b"], {})
    assert settings.served_names == ("a", "b")
    assert engine_config(settings, "decode", allow_local_prefill=True).served_model_name == "a"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "/nowhere/at/all"], "--model"),
        (["--tensor-parallel-size", "17"], "--tensor-parallel-size"),
        (["--tp-broadcast-timeout-seconds", "0.5"], "--tp-broadcast-timeout-seconds"),
        (["--block-size", "0"], "--block-size"),
        (["--num-kv-blocks", "8", "--kv-cache-memory-bytes", "1MiB"], "--num-kv-blocks"),
        (["--kv-tier", "tape:1GiB"], "--kv-tier 'tape:1GiB'"),
        (["--kv-tier", "host:much"], "--kv-tier 'host:much'"),
        (["--kv-tier", "disk:/kv"], "--kv-tier 'disk:/kv'"),
        (["--kv-tier", "host:1GiB", "--kv-tier", "host:2GiB"], "--kv-tier 'host:2GiB': .* already"),
        (["--kv-tier", "host:1GiB", "--kv-host-bytes", "2GiB"], "--kv-host-bytes"),
        (["--kv-tier", "disk:/kv:1GiB", "--kv-disk-path", "/kv"], "--kv-disk-path"),
    ],
)
def test_parse_when_a_value_cannot_be_used_then_the_message_names_the_flag(
    folder: str, flags: list[str], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        PrefillSettings.parse(["--model", folder, *flags], {})


@pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize(
    "flags",
    [
        ["--host", "0.0.0.0"],
        ["--host", "::"],
        ["--host", "0.0.0.0", "--advertise-host", "127.0.0.1"],
        ["--host", "0.0.0.0", "--advertise-host", "0.0.0.0"],
        ["--host", "10.0.0.7", "--advertise-host", "localhost"],
        ["--host", "10.0.0.7", "--advertise-host", "::"],
    ],
    ids=" ".join,
)
def test_h2_parse_when_others_would_be_told_an_address_that_leads_to_themselves_then_the_flag_is_named(
    folder: str, flags: list[str], role: type[PrefillSettings | DecodeSettings]
) -> None:
    with pytest.raises(SettingsError, match="--advertise-host"):
        role.parse(["--model", folder, *flags], {})


def test_parse_when_the_folder_has_no_config_then_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.json"):
        PrefillSettings.parse(["--model", str(tmp_path)], {})


@pytest.mark.parametrize(
    ("host", "advertise"),
    [
        ("127.0.0.1", None), ("localhost", None), ("10.0.0.7", None), ("0.0.0.0", "prefill-1"),
        ("0.0.0.0", "10.0.0.7"), ("127.0.0.1", "127.0.0.1"), ("::", "fd00::1"),
    ],
)  # fmt: skip
def test_check_advertised_when_others_can_reach_the_address_then_it_passes(host: str, advertise: str | None) -> None:
    check_advertised(host, advertise)


def test_engine_config_when_flags_are_set_then_each_reaches_the_engine(folder: str) -> None:
    flags = {
        "dtype": "float32", "block_size": 32, "num_kv_blocks": 100, "max_model_len": 512, "max_num_seqs": 7,
        "max_num_batched_tokens": 256, "kv_lease_seconds": 1.5, "kv_checksum": "sample", "threads": 1,
        "kv_load_failure_policy": "fail", "kv_bulk_channels": 2, "kv_data_port": 7001, "load_cache_timeout_ms": 900,
        "prefill_max_wait_timeout_ms": 1000, "decode_retry_times": 3, "decode_retry_timeout_ms": 20,
        "decode_retry_interval_ms": 2, "cache_store_queue_size": 10, "cache_store_connect_timeout_ms": 50,
        "cache_store_connect_retry_times": 4, "cache_store_publish_timeout_ms": 200, "cache_store_port": 0,
        "log_level": "debug", "attention_backend": "torch", "load_format": "dummy",
    }  # fmt: skip
    argv = ["--model", folder, "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    for name, value in flags.items():
        argv += ["--" + name.replace("_", "-"), str(value)]
    config = engine_config(DecodeSettings.parse(argv, {}), "decode", allow_local_prefill=False)
    assert {name: getattr(config, name) for name in flags} == flags
    assert (config.role, config.model, config.allow_local_prefill) == ("decode", folder, False)
    assert not config.enable_prefix_caching
    assert not config.enable_chunked_prefill
    assert EngineConfig.from_json(config.to_json()) == config


def test_engine_config_when_a_size_is_left_out_then_the_engine_chooses(folder: str) -> None:
    config = engine_config(PrefillSettings.parse(["--model", folder], {}), "prefill", allow_local_prefill=True)
    assert (config.num_kv_blocks, config.kv_cache_memory_bytes, config.max_model_len, config.threads) == (0,) * 4
