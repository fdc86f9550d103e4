"""Versions: of Baton itself, and of the contract between its servers."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import tomllib
from pathlib import Path

PROTOCOL_VERSION = 4
"""Version of the wire contract between router, prefill and decode servers; a pair must share it."""


@functools.cache
def version() -> str:
    """Baton's version: the installed package's, else that of the checkout it runs from."""
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        with (Path(__file__).resolve().parents[1] / "pyproject.toml").open("rb") as file:
            return str(tomllib.load(file)["project"]["version"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return "unknown"


def revision() -> str:
    """The source revision that the image was built from (`BATON_REVISION`), or nothing."""
    return os.environ.get("BATON_REVISION", "")
