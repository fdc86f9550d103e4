"""Tiers below the pool of a real engine with a tiny model: what a later engine finds, and what configurations are
refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.loader.checkpoint import SINGLE_FILE
from kernels.cpu import library
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.real_engine import RealEngine, run_until
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

BLOCK = 8
PROMPT = [(5 * i * i + 3 * i) % (VOCAB_SIZE - 2) + 2 for i in range(10 * BLOCK + 3)]


def tiered(path: Path, model: str | Path = "llama", **options: object) -> RealEngine:
    settings = {"kv_disk_path": str(path), "kv_disk_bytes": 1 << 24, "kv_tier_min_tokens": BLOCK, **options}
    return RealEngine("decode", model, kv_tier_timeout_ms=20_000, **settings)


def answer(engine: RealEngine, key: str, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were cached."""
    engine.add(key, prompt, max_tokens=6, ignore_eos=True, **options)
    run_until([engine], lambda: engine.ended(key))
    return engine.tokens(key), engine.cached_tokens(key)


def test_engine_when_an_earlier_one_left_blocks_on_disk_then_computes_the_rest_alone(tmp_path: Path) -> None:
    with RealEngine("decode") as plain:
        expected, _ = answer(plain, "plain")
    with tiered(tmp_path, kv_host_bytes=1 << 22) as first:
        assert answer(first, "computed") == (expected, 0)
    with tiered(tmp_path) as second:
        assert answer(second, "loaded") == (expected, 10 * BLOCK)
        assert answer(second, "other", PROMPT[:20], salt="tenant")[1] == 0
        assert second.core.tiers is not None
        assert second.core.tiers.stats()["disk"].blocks >= 10
        second.core.tiers.close()


def test_engine_when_blocks_have_another_form_then_does_not_find_them(tmp_path: Path) -> None:
    with tiered(tmp_path) as first:
        expected, _ = answer(first, "computed")
    with tiered(tmp_path, block_size=16) as second:
        assert answer(second, "again") == (expected, 0)


def test_engine_when_one_weight_is_another_then_does_not_find_what_the_other_model_computed(
    tmp_path: Path,
) -> None:
    model, blocks = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model")), tmp_path / "blocks"
    with tiered(blocks, model=model) as first:
        answer(first, "computed")
    weights = load_file(model / SINGLE_FILE)
    weights["model.embed_tokens.weight"][PROMPT[0], 11] += 0.5
    save_file(weights, model / SINGLE_FILE)
    with RealEngine("decode", model=model) as plain:
        expected, _ = answer(plain, "plain")
    with tiered(blocks, model=model) as second:
        assert answer(second, "again") == (expected, 0)


def test_engine_when_other_kernels_computed_then_does_not_find_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs may differ in the last bits, and so may what a greedy answer picks."""
    with tiered(tmp_path) as first:
        expected, _ = answer(first, "computed")
    with monkeypatch.context() as patch:
        patch.setattr(library, "name", lambda: "of another processor")
        with tiered(tmp_path) as second:
            assert answer(second, "again") == (expected, 0)
    with tiered(tmp_path) as third:
        assert answer(third, "found") == (expected, 10 * BLOCK)


def test_engine_when_its_directory_is_in_use_then_does_not_start(tmp_path: Path) -> None:
    with tiered(tmp_path), pytest.raises(BatonError, match=r"--kv-disk-path .* another server uses it"):
        tiered(tmp_path)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_disk_path": "/x", "kv_disk_bytes": 1 << 20, "enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"kv_tier": "mooncake://a:1", "allow_local_prefill": False}, "--allow-local-prefill"),
        ({"kv_disk_path": "/x"}, "--kv-disk-bytes"),
        ({"kv_tier_timeout_ms": 0}, "--kv-tier-timeout-ms"),
        ({"kv_tier_min_tokens": 0}, "--kv-tier-min-tokens"),
    ],
)
def test_configuration_when_tiers_do_not_fit_it_then_is_refused_and_names_the_flag(
    options: dict[str, object], flag: str
) -> None:
    with pytest.raises(BatonError, match=flag) as refused:
        EngineConfig(role="decode", model="m", **options).check()  # type: ignore[arg-type]
    assert refused.value.code is ErrorCode.INVALID_PARAMS


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_host_bytes": 1000}, "--kv-host-bytes"),
        ({"kv_host_bytes": 1 << 60}, "--kv-host-bytes .* free memory"),
        ({"kv_disk_bytes": 1000, "kv_disk_path": "unused"}, "--kv-disk-bytes"),
        ({"kv_tier": "redis://127.0.0.1:1"}, "--kv-tier"),
        ({"kv_tier": "mooncake://nowhere"}, "--kv-tier"),
    ],
)
def test_engine_when_a_tier_cannot_be_opened_then_does_not_start(
    tmp_path: Path, options: dict[str, object], flag: str
) -> None:
    if "kv_disk_path" in options:
        options = {**options, "kv_disk_path": str(tmp_path)}
    with pytest.raises(BatonError, match=flag) as refused:
        RealEngine("decode", **options)
    assert refused.value.code is ErrorCode.INVALID_PARAMS
