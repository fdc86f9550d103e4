from __future__ import annotations

import random

import pytest

from router.budget import Backoff
from router.policies import ALIASES, POLICIES, Tuning, make_policy
from router.settings import RouterSettings, split_address
from rpc.settings import SettingsError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


def parse(folder: str, *argv: str, **environ: str) -> RouterSettings:
    return RouterSettings.parse(["--model", folder, *argv], environ)


def test_parse_when_only_the_model_is_given_then_defaults_are_the_documented_ones(folder):
    settings = parse(folder)
    assert (settings.port, settings.grpc_port) == (8000, 8001)
    assert settings.backoff == Backoff(0.05, 5.0, 2.0, 0.1)
    assert (settings.retry_max_retries, settings.retry_budget_ratio, settings.migration_limit) == (5, 0.1, 3)
    breaker = settings.breaker
    assert (breaker.failure_threshold, breaker.success_threshold, breaker.open_s, breaker.window_s) == (5, 2, 30, 60)
    health = (
        settings.health_check_interval_secs,
        settings.health_check_timeout_secs,
        settings.health_failure_threshold,
        settings.health_success_threshold,
    )
    assert health == (5, 2, 3, 2)
    assert settings.request_timeout_secs == 600
    assert (settings.policy, settings.prefill_policy, settings.decode_policy) == ("round_robin", None, None)
    assert settings.tuning == Tuning(0.3, 64, 1.5)


@pytest.mark.parametrize("name", [*POLICIES, *ALIASES])
def test_parse_when_a_policy_is_named_then_it_is_one_that_can_be_made(folder, name):
    settings = parse(folder, "--policy", name, "--decode-policy", "random", "--cache-threshold", "0.5")
    assert (settings.policy, settings.decode_policy) == (name, "random")
    policy = make_policy(settings.policy, random.Random(1), settings.tuning)
    assert policy.name == ALIASES.get(name, name)
    assert settings.tuning.cache_threshold == 0.5


def test_parse_when_servers_are_repeated_or_listed_then_all_are_there_once(folder):
    settings = parse(folder, "--prefill", "a:1", "--prefill", "b:2,a:1", "--decode", "[::1]:3")
    assert settings.prefill == ["a:1", "b:2"]
    assert settings.decode == ["[::1]:3"]


def test_parse_when_the_environment_has_a_value_then_the_command_line_wins(folder):
    assert parse(folder, BATON_MIGRATION_LIMIT="7").migration_limit == 7
    assert parse(folder, "--migration-limit", "2", BATON_MIGRATION_LIMIT="7").migration_limit == 2


def test_parse_when_a_key_is_set_then_it_is_not_shown(folder):
    settings = parse(folder, "--api-key", "hush")
    assert settings.api_key == "hush"
    assert "hush" not in str(settings.public_dict())


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--prefill", "nowhere"], ["--prefill", "nowhere"]),
        (["--decode", "http://h:1"], ["--decode", "http://h:1"]),
        (["--prefill", "h:1", "--decode", "h:1"], ["--prefill", "--decode", "h:1"]),
        (["--policy", "best"], ["--policy", "best"]),
        (["--cache-threshold", "1.1"], ["--cache-threshold", "1.1"]),
        (["--balance-abs-threshold", "-1"], ["--balance-abs-threshold", "-1"]),
        (["--balance-rel-threshold", "0.9"], ["--balance-rel-threshold", "0.9"]),
        (["--prefix-index-entries", "0"], ["--prefix-index-entries", "0"]),
        (["--retry-jitter-factor", "2"], ["--retry-jitter-factor", "2"]),
        (["--queue-timeout-secs", "0"], ["--queue-timeout-secs", "0"]),
        (["--port", "65536"], ["--port", "65536"]),
        (["--max-payload-size", "1"], ["--max-payload-size", "1"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_parse_when_a_value_is_wrong_then_the_message_names_flag_and_value(folder, argv, named):
    with pytest.raises(SettingsError) as caught:
        parse(folder, *argv)
    for word in named:
        assert word in str(caught.value)


def test_parse_when_the_folder_has_no_tokenizer_then_it_says_what_would_help(tmp_path):
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        parse(str(tmp_path))


def test_help_when_asked_then_every_flag_has_its_variable_and_default(folder):
    text = RouterSettings.help_text("router")
    for flag in ("--retry-max-retries", "--cb-timeout-duration-secs", "--disagg-min-prompt-tokens", "--prefill"):
        assert flag in text
    assert "BATON_RETRY_MAX_RETRIES, default: 5" in text


@pytest.mark.parametrize(
    ("address", "parts"), [("h:1", ("h", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:80", ("[::1]", 80))]
)
def test_split_address_when_it_is_one_then_both_parts_are_there(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["h", "h:0", "h:65536", "a b:1", "h\x00:1", "höst:1", "http://h:1", "::1:80"])
def test_split_address_when_it_is_none_then_it_is_refused(address):
    with pytest.raises(ValueError, match="must"):
        split_address(address)
