"""What the tensors of weights files digested to, kept for the next start of any server on this machine.

A folder with one small file for each weights file, named and found by the state of that file: device, inode, size,
times of its last change. Nothing here is needed: what cannot be read, or is wrong, is as good as absent.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

import xxhash

from engine.loader.weights_file import FileState

SWITCH = "BATON_DIGEST_CACHE"  # "off": weights are digested at every start
CACHE_DIR = "BATON_DIGEST_DIR"  # where digests are kept; default ~/.cache/baton/digests
FORMAT = 1
MOST_FILES = 1024  # weights files whose digests are kept, those used last
SETTLED_NS = 2_000_000_000  # a file may change once more within one tick of its clock, of up to 2 s, without a trace
_SUFFIX = ".digests"
_SUM_DIGITS = 32
_MOST_BYTES = 64 << 20  # of one file of this folder

_log = logging.getLogger(__name__)


class DigestCache:
    """Digests by the state of the file that they belong to."""

    def __init__(self, folder: Path) -> None:
        """folder: this user's alone."""
        self.folder = folder

    @classmethod
    def of_user(cls) -> DigestCache | None:
        """In this user's folder; None where it is switched off, or the folder cannot be had (the log says why)."""
        if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
            return None
        folder = Path(os.environ.get(CACHE_DIR) or "~/.cache/baton/digests")
        try:
            folder = folder.expanduser()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = folder.stat()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            _no_cache(folder, str(error))
            return None
        if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
            _no_cache(folder, "others can write there")
            return None
        return cls(folder)

    def get(self, state: FileState, content: str) -> dict[str, bytes] | None:
        """By name of the tensor; None when they are not there. content: what else the digests depend on."""
        key = _key(state, content)
        path = self._path(key)
        try:
            with path.open("rb") as stream:
                said = stream.read(_MOST_BYTES)
            body = said[_SUM_DIGITS:]
            if said[:_SUM_DIGITS] != xxhash.xxh3_128_hexdigest(body).encode():
                raise ValueError("damaged")
            kept = json.loads(body)
            if kept["key"] != key:
                raise ValueError("of another file")
            digests = {str(name): bytes.fromhex(digest) for name, digest in kept["tensors"].items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.info("the digests in %s are ignored: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used
        return digests

    def put(self, state: FileState, content: str, digests: Mapping[str, bytes]) -> None:
        """Keeps the digests of a file that is as `state` says; not those of one that has just been written."""
        if time.time_ns() - max(state.mtime_ns, state.ctime_ns) < SETTLED_NS:
            return
        key = _key(state, content)
        tensors = {name: digest.hex() for name, digest in digests.items()}
        body = json.dumps({"key": key, "tensors": tensors}).encode()
        writing = ""
        try:
            descriptor, writing = tempfile.mkstemp(prefix="new-", dir=self.folder)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(xxhash.xxh3_128_hexdigest(body).encode() + body)
            os.replace(writing, self._path(key))
            self._prune()
        except OSError as error:
            if writing:
                with suppress(OSError):
                    os.unlink(writing)
            _no_cache(self.folder, str(error))

    def _prune(self) -> None:
        """Also takes away what a process left that ended while it wrote."""
        used: list[tuple[float, Path]] = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                at = path.stat().st_mtime
                if path.suffix == _SUFFIX:
                    used.append((at, path))
                elif path.name.startswith("new-") and time.time() - at > 3600:
                    path.unlink()
        for _, path in sorted(used)[:-MOST_FILES]:
            with suppress(OSError):
                path.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{xxhash.xxh3_128_hexdigest(key.encode())}{_SUFFIX}"


def _key(state: FileState, content: str) -> str:
    return json.dumps([FORMAT, *astuple(state), content])


def _no_cache(folder: Path, why: str) -> None:
    _log.warning(
        "digests of weights are not kept for the next start: %s: %s (%s, %s=off)", folder, why, CACHE_DIR, SWITCH
    )
