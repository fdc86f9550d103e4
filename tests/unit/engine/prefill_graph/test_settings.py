"""Invariants 3 to 7 of docs/cuda_graphs.md: the settings' table, the grammar of buckets, clipping, transport."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from engine.capture_config import CaptureConfigError, largest_padding_ratio, parse_sizes
from engine.config import EngineConfig
from engine.graph_settings import BUCKETS_FLAG, DEFAULT_BUCKETS, LARGEST_DEFAULT_BUCKET, PrefillGraphSettings
from front.settings import engine_config
from prefill_server.settings import PrefillSettings
from rpc.errors import BatonError, ErrorCode
from rpc.settings import SettingsError

FIELDS = (
    "enable_prefill_cuda_graph",
    "prefill_cuda_graph_max_requests",
    "prefill_cuda_graph_max_padding_ratio",
    "prefill_cuda_graph_capture_config",
)
CHOSEN = (True, 4, 0.4, [1, 64])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = tmp_path / "some-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return str(model)


def values(settings: PrefillSettings) -> tuple[object, ...]:
    return tuple(getattr(settings, field) for field in FIELDS)


# -- 3: table ---------------------------------------------------------------------------------------------------


def test_settings_when_nothing_is_given_then_the_feature_is_off_with_its_defaults(folder):
    settings = PrefillSettings.parse(["--model", folder], {})
    assert values(settings)[:3] == (False, 8, 0.25)
    assert len(settings.prefill_cuda_graph_capture_config) == 19
    assert not settings.prefill_cuda_graph_strict


def by_flag(folder, tmp_path):
    argv = ["--enable-prefill-cuda-graph", "--prefill-cuda-graph-max-requests", "4"]
    argv += ["--prefill-cuda-graph-max-padding-ratio", "0.4", "--prefill-cuda-graph-capture-config", "1,64"]
    return PrefillSettings.parse(["--model", folder, *argv], {})


def by_environment(folder, tmp_path):
    texts = ("true", "4", "0.4", "1,64")
    env = {f"BATON_{field.upper()}": text for field, text in zip(FIELDS, texts, strict=True)}
    return PrefillSettings.parse(["--model", folder], env)


def by_yaml(folder, tmp_path):
    texts = ("true", "4", "0.4", "1,64")
    lines = [f"{field.replace('_', '-')}: {text}" for field, text in zip(FIELDS, texts, strict=True)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    return PrefillSettings.parse(["--model", folder, "--config", str(tmp_path / "config.yaml")], {})


def by_yaml_list(folder, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "enable_prefill_cuda_graph: yes\nprefill_cuda_graph_max_requests: 4\n"
        "prefill_cuda_graph_max_padding_ratio: 0.4\nprefill_cuda_graph_capture_config: [64, 1]\n"
    )
    return PrefillSettings.parse(["--model", folder, "--config", str(tmp_path / "config.yaml")], {})


@pytest.mark.parametrize("bind", [by_flag, by_environment, by_yaml, by_yaml_list])
def test_settings_when_bound_in_any_way_then_they_have_their_types(bind, folder, tmp_path):
    settings = bind(folder, tmp_path)
    assert values(settings) == CHOSEN
    assert [type(value) for value in values(settings)] == [bool, int, float, list]
    assert {type(size) for size in settings.prefill_cuda_graph_capture_config} == {int}


INVALID = [
    *[("prefill_cuda_graph_max_requests", text) for text in ("0", "-1", "abc", "1025", "1.5", "")],
    *[("prefill_cuda_graph_max_padding_ratio", text) for text in ("1.1", "-0.1", "abc", "nan", "inf", "")],
    *[
        ("prefill_cuda_graph_capture_config", text)
        for text in ("0", "-1", "abc", "1,x", "", " ", "1,,2", "64:0", "0:4", "-8:4", "1.5", "1:2:3", "9" * 30)
    ],
    ("enable_prefill_cuda_graph", "maybe"),
]


@pytest.mark.parametrize(("field", "text"), INVALID)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_settings_when_a_value_cannot_be_then_the_setting_is_named(field, text, source, folder, tmp_path):
    argv, env = ["--model", folder], {}
    flag, variable = "--" + field.replace("_", "-"), f"BATON_{field.upper()}"
    if source == "flag":
        argv += [f"{flag}={text}"]
        named = flag
    elif source == "environment":
        env[variable] = text
        named = variable
    else:
        (tmp_path / "config.yaml").write_text(f"{field}: {text!r}\n")
        argv += ["--config", str(tmp_path / "config.yaml")]
        named = field
    with pytest.raises(SettingsError) as refusal:
        PrefillSettings.parse(argv, env)
    assert named in str(refusal.value)
    assert repr(text)[1:-1] in str(refusal.value)


def test_buckets_when_their_file_is_missing_then_the_message_has_the_path_and_the_cause(folder):
    argv = ["--model", folder, "--prefill-cuda-graph-capture-config", "/no/such/file"]
    with pytest.raises(SettingsError, match="--prefill-cuda-graph-capture-config file not found: /no/such/file") as e:
        PrefillSettings.parse(argv, {})
    assert isinstance(e.value.__cause__, CaptureConfigError)
    assert isinstance(e.value.__cause__.__cause__, FileNotFoundError)


@pytest.mark.parametrize("content", ["", "\n", "1\nx\n", "1\n0\n", "1\n-2\n", "1,2\n", "1.5\n"])
def test_buckets_when_a_line_of_their_file_is_wrong_then_the_flag_and_the_file_are_named(content, tmp_path, folder):
    file = tmp_path / "buckets.txt"
    file.write_text(content)
    with pytest.raises(SettingsError, match="--prefill-cuda-graph-capture-config") as refusal:
        PrefillSettings.parse(["--model", folder, "--prefill-cuda-graph-capture-config", str(file)], {})
    assert str(file) in str(refusal.value)


def test_buckets_when_the_file_is_a_folder_then_the_cause_is_chained(tmp_path):
    with pytest.raises(CaptureConfigError, match="cannot be read") as refusal:
        sizes(str(tmp_path))
    assert isinstance(refusal.value.__cause__, OSError)


def test_buckets_when_their_file_never_ends_then_it_is_refused_after_its_first_bytes():
    with pytest.raises(CaptureConfigError, match="larger than 65536 bytes: /dev/zero"):
        sizes("/dev/zero")


def test_buckets_when_a_line_is_long_then_the_message_is_not(tmp_path):
    file = tmp_path / "buckets"
    file.write_text("x" * 10_000)
    with pytest.raises(CaptureConfigError, match="is no integer") as refusal:
        sizes(str(file))
    assert len(str(refusal.value)) < 400 + len(str(file))


def test_range_when_a_yaml_file_has_it_without_quotes_then_it_is_no_number_in_base_60(folder, tmp_path):
    (tmp_path / "config.yaml").write_text("prefill-cuda-graph-capture-config: 64:8\n")
    settings = PrefillSettings.parse(["--model", folder, "--config", str(tmp_path / "config.yaml")], {})
    assert settings.prefill_cuda_graph_capture_config == list(range(8, 65, 8))


# -- 4: count ---------------------------------------------------------------------------------------------------


def sizes(value: object) -> list[int]:
    return parse_sizes(value, flag=BUCKETS_FLAG, most=64)


def as_list(count: int, tmp_path: Path) -> str:
    return ",".join(map(str, range(1, count + 1)))


def as_range(count: int, tmp_path: Path) -> str:
    return f"{count * 3}:3"


def as_file(count: int, tmp_path: Path) -> str:
    file = tmp_path / "buckets"
    file.write_text("".join(f"{n}\n" for n in range(count, 0, -1)))
    return str(file)


@pytest.mark.parametrize("form", [as_list, as_range, as_file])
def test_count_when_64_are_named_then_they_pass_and_65_fail_with_both_numbers(form, tmp_path):
    assert len(sizes(form(64, tmp_path))) == 64
    with pytest.raises(CaptureConfigError, match=r"65 .*64") as refusal:
        sizes(form(65, tmp_path))
    assert BUCKETS_FLAG in str(refusal.value)


@pytest.mark.parametrize(("text", "count"), [("6400:1", 6400), ("100000000:1", 100_000_000)])
def test_count_when_a_range_is_long_then_it_fails_at_once_and_is_never_built(text, count):
    tracemalloc.start()
    try:
        seconds = []
        for _ in range(3):  # the collector may come once
            began = time.thread_time()
            with pytest.raises(CaptureConfigError, match=str(count)):
                sizes(text)
            seconds.append(time.thread_time() - began)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert min(seconds) < 0.010, seconds
    assert peak < 64 << 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100:30", [30, 60, 90, 100]),
        ("64:64", [64]),
        ("10:30", [10]),
        ("4:1", [1, 2, 3, 4]),
        ("64,1,64, 2", [1, 2, 64]),
        (" 7 ", [7]),
        (64, [64]),
        ([64, "2", 1], [1, 2, 64]),
        (["8:4"], [4, 8]),
    ],
)
def test_sizes_when_they_are_named_then_they_are_sorted_and_each_is_there_once(text, expected):
    assert sizes(text) == expected


@pytest.mark.parametrize("value", [True, 1.5, None, [1, None], {"a": 1}])
def test_sizes_when_a_file_has_another_type_then_it_is_refused(value):
    with pytest.raises(CaptureConfigError, match=BUCKETS_FLAG):
        sizes(value)


# -- 5: clipping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_len", "batched"), [(64, 2048), (2048, 64)])
def test_buckets_when_the_default_ones_are_too_large_then_they_are_cut_to_the_limit(model_len, batched):
    buckets = PrefillGraphSettings(enabled=True).buckets_within(model_len, batched)
    assert buckets[-1] == 64
    assert list(buckets) == sorted(set(buckets))
    assert buckets[:-1] == tuple(size for size in DEFAULT_BUCKETS if size < 64)


def test_buckets_when_one_was_chosen_above_the_limit_then_the_start_fails_and_names_it():
    chosen = PrefillGraphSettings(enabled=True, buckets=(1, 65))
    assert chosen.buckets_within(65, 2048) == (1, 65)
    with pytest.raises(BatonError, match="--prefill-cuda-graph-capture-config") as refusal:
        chosen.buckets_within(64, 2048)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS
    assert "65" in refusal.value.message
    assert "64" in refusal.value.message


# -- 6: the default list ----------------------------------------------------------------------------------------


def test_default_buckets_when_neighbours_are_compared_then_padding_stays_within_a_quarter():
    assert len(DEFAULT_BUCKETS) == 19
    assert DEFAULT_BUCKETS[0] == 1
    assert DEFAULT_BUCKETS[-1] == LARGEST_DEFAULT_BUCKET
    assert largest_padding_ratio(DEFAULT_BUCKETS) <= PrefillGraphSettings().max_padding_ratio
    for tokens in range(1, LARGEST_DEFAULT_BUCKET + 1):
        bucket = next(size for size in DEFAULT_BUCKETS if size >= tokens)
        assert (bucket - tokens) / bucket <= 0.25
    assert largest_padding_ratio((1, 3, 9)) == pytest.approx(5 / 9)


# -- 7: transport -----------------------------------------------------------------------------------------------

DISTINCT = PrefillGraphSettings(enabled=True, max_requests=5, buckets=(3, 7, 11), max_padding_ratio=0.375, strict=True)


def test_transport_when_every_field_is_set_then_each_arrives_as_itself():
    config = EngineConfig(role="prefill", model="m", prefill_graph=DISTINCT)
    received = EngineConfig.from_json(config.to_json()).prefill_graph
    assert received == DISTINCT
    defaults = PrefillGraphSettings()
    for field in msgspec.structs.fields(PrefillGraphSettings):
        value = getattr(received, field.name)
        assert type(value) is type(getattr(DISTINCT, field.name))
        assert field.name == "version" or value != getattr(defaults, field.name)


def test_transport_when_flags_are_given_then_the_engine_gets_them_by_name(folder):
    argv = ["--enable-prefill-cuda-graph", "--prefill-cuda-graph-max-requests=5", "--prefill-cuda-graph-strict"]
    argv += ["--prefill-cuda-graph-capture-config=3,7,11", "--prefill-cuda-graph-max-padding-ratio=0.375"]
    settings = PrefillSettings.parse(["--model", folder, *argv], {})
    assert engine_config(settings, "prefill", allow_local_prefill=True).prefill_graph == DISTINCT


def decoded(text: str) -> PrefillGraphSettings:
    whole = '{"role": "prefill", "model": "m", "prefill_graph": ' + text + "}"
    return EngineConfig.from_json(whole.encode()).prefill_graph


def test_transport_when_a_field_is_missing_then_it_has_its_default():
    assert decoded('{"enabled": true}') == PrefillGraphSettings(enabled=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"surprise": 1}',
        '{"enabled": 1}',
        '{"max_requests": 0.375}',
        '{"max_padding_ratio": "0.375"}',
        '{"buckets": "1,2"}',
        '{"buckets": [1.5]}',
        "[1, true, 5, [1], 0.5, false]",
    ],
)
def test_transport_when_a_field_is_unknown_or_of_another_type_then_it_is_an_error(text):
    with pytest.raises(BatonError) as refusal:
        decoded(text)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS


@pytest.mark.parametrize(
    "settings",
    [
        PrefillGraphSettings(version=2),
        PrefillGraphSettings(max_requests=0),
        PrefillGraphSettings(max_requests=1025),
        PrefillGraphSettings(max_padding_ratio=1.1),
        PrefillGraphSettings(max_padding_ratio=float("nan")),
        PrefillGraphSettings(buckets=()),
        PrefillGraphSettings(buckets=(2, 1)),
        PrefillGraphSettings(buckets=(0,)),
        PrefillGraphSettings(buckets=tuple(range(1, 66))),
    ],
)
def test_transport_when_a_value_is_out_of_range_then_the_engine_refuses_it(settings):
    with pytest.raises(BatonError) as refusal:
        EngineConfig(role="prefill", model="m", prefill_graph=settings).check()
    assert refusal.value.code is ErrorCode.INVALID_PARAMS
