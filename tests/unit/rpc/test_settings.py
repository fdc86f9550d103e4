"""Settings: where they come from, who wins, and what a mistake says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import ByteSize, Field

from rpc.server_settings import ServerSettings
from rpc.settings import Flag, Settings, SettingsError


class Demo(Settings):
    """A field of every shape."""

    model: Annotated[str, Flag(("--model-path",))] = Field(min_length=1, description="folder")
    block_size: Annotated[int, Flag(("--page-size", "-bs"))] = Field(16, ge=1, le=1024, description="tokens a block")
    rate: float = 0.5
    verbose: bool = False
    caching: Annotated[bool, Flag(("--use-cache",))] = True
    prefill: list[str] = Field([])
    kv_tier: Annotated[list[str], Flag(split=False)] = Field([])
    limit: int | None = None
    size: ByteSize = ByteSize(1024)
    mode: Literal["a", "b"] = "a"
    api_key: Annotated[str | None, Flag(secret=True)] = None
    extra_config: dict[str, Any] = Field({})


def parse(*argv: str, env: dict[str, str] | None = None) -> Demo:
    return Demo.parse(["--model", "m", *argv], env or {})


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--block-size", "32"], "block_size", 32),
        (["--block-size=32"], "block_size", 32),
        (["--block_size", "32"], "block_size", 32),
        (["--page-size", "8"], "block_size", 8),
        (["-bs", "8"], "block_size", 8),
        (["--block-size", "8", "--page-size", "9"], "block_size", 9),
        (["--model-path", "other"], "model", "other"),
        (["--rate", "-1.5"], "rate", -1.5),
        (["--verbose"], "verbose", True),
        (["--no-verbose"], "verbose", False),
        (["--verbose=false"], "verbose", False),
        (["--no-caching"], "caching", False),
        (["--no-use-cache"], "caching", False),
        (["--prefill", "h:1", "--prefill", "h:2"], "prefill", ["h:1", "h:2"]),
        (["--prefill", "h:1,h:2"], "prefill", ["h:1", "h:2"]),
        (["--prefill", "h:1", "h:2", "--verbose"], "prefill", ["h:1", "h:2"]),
        (["--kv-tier", "disk:/a,b:1"], "kv_tier", ["disk:/a,b:1"]),
        (["--limit", "5"], "limit", 5),
        (["--limit", "none"], "limit", None),
        (["--size", "2MiB"], "size", 2 << 20),
        (["--mode", "b"], "mode", "b"),
        (["--extra-config", '{"k": 1}'], "extra_config", {"k": 1}),
        (["--extra-config.a-b", "4", "--extra-config.name", "ngram"], "extra_config", {"a_b": 4, "name": "ngram"}),
        (["--extra-config", '{"k": 1}', "--extra-config.l", "2"], "extra_config", {"k": 1, "l": 2}),
    ],
)  # fmt: skip
def test_flag_sets_its_field(argv: list[str], field: str, value: object) -> None:
    assert getattr(parse(*argv), field) == value


def test_command_line_wins_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("block-size: 1\nrate: 1.0\nlimit: 1\nmode: b\n")
    env = {"BATON_RATE": "2.0", "BATON_LIMIT": "2", "BATON_CONFIG": str(file)}
    settings = parse("--limit", "3", env=env)
    assert (settings.block_size, settings.rate, settings.limit, settings.mode) == (1, 2.0, 3, "b")


def test_file_takes_lists_objects_and_aliases(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("page_size: 4\nprefill: [h:1, h:2]\nkv_tier: a,b\nextra-config: {k: 1}\ncaching: no\n")
    settings = parse("--config", str(file), "--extra-config.l", "2")
    assert settings.block_size == 4
    assert settings.prefill == ["h:1", "h:2"]
    assert settings.kv_tier == ["a,b"]
    assert settings.extra_config == {"k": 1, "l": 2}
    assert settings.caching is False


@pytest.mark.parametrize(
    ("argv", "env", "parts"),
    [
        (["--block-size", "0"], {}, ["--block-size '0'", "greater than or equal to 1"]),
        (["--page-size", "x"], {}, ["--page-size 'x'", "integer"]),
        ([], {"BATON_BLOCK_SIZE": "x"}, ["BATON_BLOCK_SIZE 'x'", "integer"]),
        (["--mode", "c"], {}, ["--mode 'c'", "'a' or 'b'"]),
        (["--verbose=maybe"], {}, ["--verbose 'maybe'", "boolean"]),
        (["--size", "many"], {}, ["--size 'many'", "byte"]),
        (["--block-sise", "1"], {}, ["unknown flag --block-sise", "did you mean --block-size?"]),
        (["--qqqq"], {}, ["unknown flag --qqqq"]),
        (["--rate.x", "1"], {}, ["unknown flag --rate.x"]),
        (["--limit"], {}, ["--limit needs a value"]),
        (["--limit", "--verbose"], {}, ["--limit needs a value"]),
        (["--no-verbose=1"], {}, ["--no-verbose takes no value"]),
        (["stray"], {}, ["unexpected argument 'stray'"]),
        (["--extra-config", "{"], {}, ["--extra-config '{'", "not JSON"]),
        (["--extra-config", "[1]"], {}, ["--extra-config '[1]'", "JSON object"]),
        (["--config", "/no/such/file.yaml"], {}, ["--config '/no/such/file.yaml'", "No such file"]),
        ([], {"BATON_MODEL": ""}, []),
    ],
)
def test_mistake_names_where_it_stands_and_its_value(argv: list[str], env: dict[str, str], parts: list[str]) -> None:
    if not parts:
        assert parse(*argv, env=env).model == "m"
        return
    with pytest.raises(SettingsError) as caught:
        parse(*argv, env=env)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("block-size: 0\n", ["key block-size in", "config.yaml", "0", "greater than or equal"]),
        ("blok-size: 4\n", ["unknown key 'blok-size'", "config.yaml", "did you mean block-size?"]),
        ("- a\n", ["must be a mapping"]),
        ("a: [\n", ["not YAML"]),
        ("limit: {a: 1}\n", ["key limit in", "integer"]),
    ],
)
def test_mistake_in_the_file_names_key_and_file(tmp_path: Path, content: str, parts: list[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        parse("--config", str(file))
    for part in parts:
        assert part in str(caught.value)


def test_empty_file_is_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# nothing\n")
    assert parse("--config", str(file)) == parse()


def test_missing_required_flag_names_flag_and_variable() -> None:
    with pytest.raises(SettingsError, match=r"--model \(or BATON_MODEL\) is required"):
        Demo.parse([], {})


def test_load_when_wrong_prints_one_line_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Demo.load(["--block-size", "0"], environ={"BATON_MODEL": "m"}, prog="demo")
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("demo: error: --block-size '0'")


def test_help_shows_default_and_variable_of_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Demo.load(["--help"], environ={}, prog="demo")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in Demo.options():
        line = next(line for line in text.splitlines()[1:] if f"{option.flag} " in line or f"{option.flag}," in line)
        assert f"env {option.variable}" in line
        assert f"default: {option.default_text()}" in line
    assert "--page-size, -bs, --block-size SIZE  (env BATON_BLOCK_SIZE, default: 16)" in text
    assert "--caching, --no-caching  (env BATON_CACHING, default: on)" in text
    assert "{a,b}" in text
    assert text.startswith("usage: demo --model MODEL [")
    assert text.index("--model MODEL  (env") < text.index("--block-size SIZE  (env")


def test_json_round_trip_is_exact_and_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse("--size", "1GiB", "--prefill", "a,b", "--extra-config.k", "1")
    monkeypatch.setenv("BATON_BLOCK_SIZE", "99")
    monkeypatch.setenv("BLOCK_SIZE", "98")
    assert Demo.from_json(settings.to_json()) == settings
    assert Demo(model="m").block_size == 16


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"model": "m", "blocksize": 1}', "unknown key 'blocksize'"),
        ('{"model": "m", "block_size": 0}', "--block-size 0"),
    ],
)
def test_json_with_a_mistake_names_it(text: str, part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        Demo.from_json(text)


def test_secrets_are_masked_where_settings_are_shown() -> None:
    settings = parse("--api-key", "hush")
    assert settings.api_key == "hush"
    assert settings.public_dict()["api_key"] == "***"
    with pytest.raises(SettingsError) as caught:
        Demo.parse(["--model", "m", "--extra-config", "{"], {"BATON_API_KEY": "hush"})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--drain-grace-secs", "200"], "--drain-grace-secs 200 must not exceed --drain-timeout-secs 120"),
        (["--num-kv-blocks", "9", "--kv-cache-memory-bytes", "1GiB"], "give one of them"),
        (["--kv-lease-seconds", "0"], "--kv-lease-seconds '0'"),
        (["--cache-store-chunk-bytes", "4KiB"], "--cache-store-chunk-bytes '4KiB'"),
        (["--port", "70000"], "--port '70000'"),
    ],
)
def test_server_settings_check_their_ranges(argv: list[str], part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ServerSettings.parse(["--model", "m", *argv], {})
    assert part in str(caught.value)


def test_server_settings_take_the_spellings_of_other_systems() -> None:
    settings = ServerSettings.parse(
        ["--model-path", "m", "-tp", "2", "--page-size", "32", "--enforce-eager", "--max-rpc-timeout-ms", "-1"], {}
    )
    assert (settings.model, settings.tensor_parallel_size, settings.block_size) == ("m", 2, 32)
    assert settings.enforce_eager
    assert settings.max_rpc_timeout_s == 0
    assert ServerSettings.from_json(settings.to_json()) == settings


def test_server_settings_have_the_documented_defaults() -> None:
    settings = ServerSettings.parse(["--model", "m"], {})
    assert (settings.block_size, settings.kv_lease_seconds, settings.kv_checksum) == (None, 30, "all")
    assert (settings.drain_grace_secs, settings.drain_timeout_secs) == (5, 120)
    assert (settings.max_rpc_timeout_ms, settings.prefill_max_wait_timeout_ms) == (7_200_000, 600_000)
    assert (settings.load_cache_timeout_ms, settings.cache_store_connect_timeout_ms) == (5000, 1000)
    assert (settings.decode_retry_times, settings.decode_retry_timeout_ms, settings.decode_retry_interval_ms) == (
        100,
        100,
        1,
    )
    assert (settings.cache_store_queue_size, settings.cache_store_chunk_bytes) == (1000, None)
