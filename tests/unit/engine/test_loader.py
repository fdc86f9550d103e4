"""Checkpoints: shards, dtypes, random weights, and the errors of broken folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loader.checkpoint import INDEX_FILE, SINGLE_FILE
from engine.loader.errors import ModelLoadError
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.inputs import build_inputs
from engine.runner.model_runner import ModelRunner
from tests.unit.engine.tiny_models import tiny_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def shard(folder: Path) -> list[Path]:
    """Spread the single file over three, with an index."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names = sorted(tensors)
    files = [folder / f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    weight_map = {}
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::3]}, file)
        weight_map |= dict.fromkeys(names[i::3], file.name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return files


def some_logits(folder: Path, dtype: str = "float32", load_format: str = "auto") -> torch.Tensor:
    runner = ModelRunner(folder, dtype, 16, load_format=load_format)
    runner.init_kv(4)
    batch = StepBatch([BatchRow("r", [3, 1, 4, 1, 5], 0, [1], sample=False)])
    with torch.inference_mode():
        return runner.model.logits(runner.forward(batch, build_inputs(batch, runner.device)))


def test_checkpoint_when_sharded_then_logits_equal_those_of_the_single_file(folder: Path) -> None:
    single = some_logits(folder)
    shard(folder)
    assert torch.equal(some_logits(folder), single)


def test_checkpoint_when_stored_in_half_precision_then_is_converted(folder: Path) -> None:
    expected = some_logits(folder)
    rewrite(folder, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    torch.testing.assert_close(some_logits(folder), expected, rtol=0, atol=2e-2)
    assert not torch.equal(some_logits(folder), expected)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), ["layers.1.self_attn.k_proj.weight", "32"]),
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight", "[64]"]),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight", "[384, 64]"]),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(95, 64)}),
            ["up_proj.weight", "[95, 64]", "[96, 64]", SINGLE_FILE],
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(384, 64, dtype=torch.int32)}),
            ["embed_tokens.weight", "int32"],
        ),
    ],
    ids=["no projection", "no norm", "no head", "wrong shape", "integers"],
)
def test_checkpoint_when_a_tensor_is_wrong_then_error_names_it(
    folder: Path, change: Callable[[Tensors], None], parts: list[str]
) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelLoadError) as caught:
        some_logits(folder)
    for part in parts:
        assert part in str(caught.value)


def test_checkpoint_when_a_shard_is_missing_then_error_names_it(folder: Path) -> None:
    files = shard(folder)
    files[1].unlink()
    with pytest.raises(ModelLoadError, match=files[1].name):
        some_logits(folder)


def test_checkpoint_when_there_are_no_weights_then_error_names_what_is_needed(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(ModelLoadError, match=SINGLE_FILE):
        some_logits(folder)


@pytest.mark.parametrize("size", [0, 5, 100, 5000])
def test_checkpoint_when_a_file_is_cut_off_then_error_names_it(folder: Path, size: int) -> None:
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=SINGLE_FILE):
        some_logits(folder)


@pytest.mark.parametrize("text", ["{", '{"weight_map": {}}', '{"metadata": 1}'])
def test_checkpoint_when_the_index_is_broken_then_error_names_it(folder: Path, text: str) -> None:
    (folder / INDEX_FILE).write_text(text)
    with pytest.raises(ModelLoadError, match="index"):
        some_logits(folder)


def test_dummy_weights_when_made_twice_then_are_the_same_and_need_no_files(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    first = some_logits(folder, load_format="dummy")
    assert torch.equal(some_logits(folder, load_format="dummy"), first)
    assert torch.isfinite(first).all()
    assert first.std() > 0.1


def test_load_format_when_unknown_then_error_names_flag_and_value(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="--load-format 'gguf2'"):
        some_logits(folder, load_format="gguf2")


def test_attention_backend_when_unknown_then_error_names_flag_and_choices(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--attention-backend 'flash9'.*torch"):
        ModelRunner(folder, "float32", 16, attention_backend="flash9")
