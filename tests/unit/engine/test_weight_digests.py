"""Digests of whole weights and the fingerprint made of them: what changes them and what does not, what is kept on disk,
and what happens when files are damaged or change meanwhile."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.layers.embedding import HostEmbedding
from engine.layers.maker import HostMaker
from engine.loader import digests
from engine.loader.checkpoint import INDEX_FILE, SINGLE_FILE, checkpoint_files
from engine.loader.digest_cache import CACHE_DIR, MOST_FILES, SETTLED_NS, SWITCH, DigestCache
from engine.loader.digests import WeightDigests
from engine.loader.errors import ModelLoadError
from engine.loader.weights_file import FileState, WeightsFile
from engine.messages import RunMode
from engine.models.config import load_config
from engine.models.families import load_model
from engine.runner.model_runner import ModelRunner
from tests.unit.engine.real_engine import pair, run_until
from tests.unit.engine.tiny_models import tiny_model

PIECE = 1000  # of a tensor, so that tiny ones have several


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DigestCache:
    """One that takes files of any size and age."""
    monkeypatch.setattr(digests, "LEAST_CACHED_BYTES", 0)
    monkeypatch.setattr("engine.loader.digest_cache.SETTLED_NS", 0)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "kept"))
    made = DigestCache.of_user()
    assert made is not None and made.folder == tmp_path / "kept"
    return made


def fingerprint(folder: Path, load_format: str = "auto") -> str:
    return ModelRunner(folder, "float32", 16, load_format=load_format).model_fingerprint


def weights_files(folder: Path) -> list[WeightsFile]:
    return [WeightsFile(path) for path in checkpoint_files(folder)]


def digest(folder: Path, cache: DigestCache | None = None, threads: int = 2) -> tuple[str, int]:
    """Of all tensors; and how many bytes of them were read for that."""
    files = weights_files(folder)
    with WeightDigests(files, cache, threads) as found:
        names = [name for file in files for name in load_file(file.path)]
        return found.combined(names), found.read_bytes


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def overwrite(path: Path, content: bytes) -> None:
    """Not within the tick of the file system's clock in which it was written before, so that its times tell."""
    before = path.stat().st_ctime_ns
    path.write_bytes(content)
    while path.stat().st_ctime_ns == before:
        os.utime(path)


def flip_a_bit(folder: Path, tensor: str = "model.layers.1.mlp.down_proj.weight") -> None:
    """In the last bits of a number in the middle of the tensor, where nothing but its value changes."""
    path = folder / SINGLE_FILE
    content = bytearray(path.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    first, last = json.loads(content[8 : 8 + length])[tensor]["data_offsets"]
    content[8 + length + (first + last) // 8 * 4] ^= 1  # little-endian float32
    overwrite(path, content)


def spread(folder: Path, count: int = 3) -> None:
    """The single file's tensors over several, with an index."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        own = sorted(tensors)[i::count]
        save_file({each: tensors[each] for each in own}, folder / name)
        weight_map |= dict.fromkeys(own, name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


# -- what it depends on -----------------------------------------------------------------------------------------------


def test_fingerprint_when_weights_or_configuration_change_then_changes(folder: Path) -> None:
    first = fingerprint(folder)
    assert len(first) == 32 and int(first, 16) >= 0
    assert fingerprint(tiny_model("llama")) == first
    flip_a_bit(folder)
    second = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    third = fingerprint(folder)
    rope = config["rope_parameters"] | {"rope_theta": 20000.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert len({first, second, third, fingerprint(folder)}) == 4


def test_fingerprint_when_the_same_model_is_saved_in_another_way_then_stays(folder: Path) -> None:
    first = fingerprint(folder)
    tensors = load_file(folder / SINGLE_FILE)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # of which the model has no use
    save_file(tensors | more, folder / SINGLE_FILE, metadata={"format": "pt", "note": "another header"})
    assert fingerprint(folder) == first
    spread(folder)
    assert fingerprint(folder) == first
    config = json.loads((folder / "config.json").read_text())
    config |= {"transformers_version": "9", "use_cache": False, "dtype": "bfloat16"}
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]  # the older spelling
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert fingerprint(folder) == first


def test_fingerprint_when_weights_are_random_then_does_not_need_files_and_is_another_one(folder: Path) -> None:
    stored = fingerprint(folder)
    (folder / SINGLE_FILE).unlink()
    assert fingerprint(folder, "dummy") == fingerprint(tiny_model("llama"), "dummy") != stored


def test_digest_when_tensors_have_many_pieces_then_does_not_depend_on_threads_and_sees_each_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(digests, "_READ_BYTES", 300)
    first, read = digest(folder, threads=1)
    assert digest(folder, threads=7)[0] == first
    tensors = load_file(folder / SINGLE_FILE)
    assert read == sum(tensor.nbytes for tensor in tensors.values())
    seen = {first}
    for name in sorted(tensors)[::5]:
        flip_a_bit(folder, name)
        seen.add(digest(folder)[0])
    assert len(seen) == 1 + len(sorted(tensors)[::5])
    rewrite(folder, lambda each: each.update({"model.norm.weight": each["model.norm.weight"].reshape(8, 8)}))
    assert digest(folder)[0] not in seen  # the same bytes of another shape


def test_engines_when_one_bit_of_their_weights_differs_then_refuse_each_other_by_the_fingerprint(folder: Path) -> None:
    flip_a_bit(folder)
    with pair(decode={"model": folder, "allow_local_prefill": False}) as (p, d):
        d.add("k", range(2, 30), RunMode.DECODE, source=p.source)
        p.add("k", range(2, 30), RunMode.PREFILL)
        run_until([d, p], lambda: d.ended("k"))
        error = d.last("k").error
        assert error is not None
        assert error.metadata["cause"] == "INCOMPATIBLE_PEER"
        assert "differ in model_fingerprint" in error.metadata["cause_message"]
        assert error.metadata["model_fingerprint"] == f"{d.ready.model_fingerprint} / {p.ready.model_fingerprint}"
        assert d.tokens("k") == []
        p.abort("k")
        run_until([d, p], lambda: p.clean() and d.clean())


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_cache_when_a_file_is_as_it_was_then_it_is_not_read_again(folder: Path, cache: DigestCache) -> None:
    spread(folder)
    first, read = digest(folder, cache)
    assert read > 0
    assert digest(folder, cache) == (first, 0)
    assert digest(folder, None) == (first, read)
    [one, *_] = checkpoint_files(folder)
    content = one.read_bytes()
    overwrite(one, content[:-1] + bytes([content[-1] ^ 1]))
    second, again = digest(folder, cache)
    assert second != first
    assert 0 < again < read  # that file alone


def test_cache_when_only_the_times_of_a_file_change_then_it_is_read_again(folder: Path, cache: DigestCache) -> None:
    first, read = digest(folder, cache)
    path = folder / SINGLE_FILE
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert digest(folder, cache) == (first, read)
    flip_a_bit(folder)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))  # as if it had never been written to
    second, again = digest(folder, cache)
    assert (second != first, again) == (True, read)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.normal.eight")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut off", "changed", "a folder"],
)
def test_cache_when_what_it_holds_is_damaged_then_the_weights_are_read_as_if_it_were_not_there(
    folder: Path, cache: DigestCache, damage: Callable[[Path], object]
) -> None:
    first = digest(folder, cache)
    [kept] = cache.folder.iterdir()
    damage(kept)
    assert digest(folder, cache) == first
    if not kept.is_dir():
        assert digest(folder, cache) == (first[0], 0)  # it has been replaced


def test_cache_when_an_entry_is_of_another_file_then_it_is_ignored(folder: Path, cache: DigestCache) -> None:
    digest(folder, cache)
    [kept] = cache.folder.iterdir()
    flip_a_bit(folder)
    second = digest(folder, cache)
    [other] = set(cache.folder.iterdir()) - {kept}
    shutil.copy(kept, other)
    assert digest(folder, cache) == second


def test_cache_when_a_file_was_written_a_moment_ago_then_keeps_nothing_of_it(
    folder: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written to again within the same tick of its file system's clock."""
    monkeypatch.setattr("engine.loader.digest_cache.SETTLED_NS", 10**6 * SETTLED_NS)
    digest(folder, cache)
    assert list(cache.folder.iterdir()) == []


def test_cache_when_it_is_full_then_lets_go_of_what_was_used_longest_ago(cache: DigestCache) -> None:
    states = [FileState(1, number, 1, 1, 1) for number in range(5)]
    for state in states:
        cache.put(state, "", {"a": b"1"})
    for at, path in enumerate(sorted(cache.folder.iterdir())):
        os.utime(path, (at, at))
    assert cache.get(states[0], "") == {"a": b"1"}  # which is a use
    for number in range(MOST_FILES):
        (cache.folder / f"{number}.digests").write_bytes(b"")
    cache.put(FileState(2, 1, 1, 1, 1), "", {"a": b"2"})
    assert len(list(cache.folder.iterdir())) == MOST_FILES
    assert [cache.get(state, "") for state in states[1:]] == [None] * 4


def test_cache_when_it_is_switched_off_then_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "kept"))
    monkeypatch.setenv(SWITCH, "off")
    assert DigestCache.of_user() is None
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("obstacle", ["a file", "others write there", "no folder above"])
def test_cache_when_its_folder_cannot_be_used_then_the_log_says_so_once_and_the_model_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    monkeypatch.setattr(digests, "LEAST_CACHED_BYTES", 0)
    kept = tmp_path / "kept"
    if obstacle == "others write there":
        kept.mkdir()
        kept.chmod(0o777)
    else:
        kept.write_bytes(b"")
    monkeypatch.setenv(CACHE_DIR, str(kept / "below" if obstacle == "no folder above" else kept))
    assert fingerprint(folder) == fingerprint(tiny_model("llama"))
    lines = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(lines) == 2  # one for each of the two
    assert all(str(kept) in line and CACHE_DIR in line for line in lines)
    assert not kept.is_dir() or list(kept.iterdir()) == []


def test_cache_when_the_disk_is_full_then_the_log_says_so_and_nothing_is_left(
    folder: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        first, read = digest(folder, cache)
    [line] = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert "No space left on device" in line and str(cache.folder) in line
    assert list(cache.folder.iterdir()) == []
    assert digest(folder, cache) == (first, read)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_digest_when_a_file_is_cut_off_meanwhile_then_the_error_names_it(folder: Path) -> None:
    files = weights_files(folder)
    names = list(load_file(files[0].path))
    held = WeightDigests(files, threads=1)
    held._turn.acquire()  # its thread does not get to its first piece
    with held:
        os.truncate(files[0].path, files[0].state.size // 2)
        held._turn.release()
        with pytest.raises(ModelLoadError, match=rf"{SINGLE_FILE}: cut off at byte .*start again"):
            held.combined(names)


def test_digest_when_a_file_cannot_be_read_then_the_error_names_file_and_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, buffers: object, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelLoadError, match=rf"{SINGLE_FILE}: cannot be read at byte \d+: Input/output error"):
        fingerprint(folder)


@pytest.mark.parametrize("how", ["written to", "replaced", "gone"])
def test_load_when_a_file_changes_meanwhile_then_the_error_names_it(folder: Path, how: str) -> None:
    path = folder / SINGLE_FILE

    class Meddler(HostMaker):
        def embedding(self, table: torch.Tensor) -> HostEmbedding:  # the first layer, so all files are open
            if how == "written to":
                found = path.stat()
                with path.open("r+b") as stream:
                    stream.seek(-4, os.SEEK_END)
                    stream.write(b"abcd")
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
            elif how == "replaced":
                shutil.copy(path, folder / "new")
                (folder / "new").replace(path)
            else:
                path.unlink()
            return super().embedding(table)

    causes = "changed while the model was loaded; start again"
    if how == "gone":  # which its times tell too, unless their clock has not moved
        causes += "|No such file"
    with pytest.raises(ModelLoadError, match=f"{SINGLE_FILE}: .*({causes})"):
        load_model(folder, load_config(folder), torch.float32, "auto", Meddler(torch.float32))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4000]}},
        {"a": 1},
        [],
    ],
    ids=["no place", "half a place", "backwards", "beyond the end", "no tensor", "a list"],
)
def test_digest_when_a_header_is_wrong_then_the_error_names_the_file(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / SINGLE_FILE
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"abcd")
    with pytest.raises(ModelLoadError, match=SINGLE_FILE), WeightDigests([WeightsFile(path)]):
        pass
