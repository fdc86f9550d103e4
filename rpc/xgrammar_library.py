"""The one way to the library behind structured output, `xgrammar`, which is optional and has a native part.

Importing this module does nothing else. `xgrammar` imports torch: only engines and the router's helper processes load
it, never a router or a front.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

PACKAGE = "xgrammar"
NATIVE_LIBRARY = "libxgrammar_bindings.so"
# What a package that is missing, damaged or built for another machine raises. Anything else is a mistake in code.
_UNAVAILABLE = (ImportError, OSError, RuntimeError)


class XgrammarUnavailable(Exception):
    """The library cannot be used; the message says why."""


def xgrammar_installed() -> bool:
    """Whether there is such a package; nothing is imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def preload_shared_library(path: Path) -> None:
    """Loads a shared library for the whole process, so that what needs its symbols finds them. Raises OSError.

    The loader reads `LD_LIBRARY_PATH` at the start of a process only, so changing it would help nothing but children.
    """
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def load_xgrammar() -> Any:
    """The module. The first call decides, for good: later ones answer the same.

    Raises XgrammarUnavailable. A programming error inside the package propagates as it is.
    """
    found = _outcome()
    if isinstance(found, str):
        raise XgrammarUnavailable(found)
    return found


@functools.cache
def _outcome() -> Any:
    """The module, or why there is none."""
    try:
        return importlib.import_module(PACKAGE)
    except _UNAVAILABLE as error:
        problem = f"{type(error).__name__}: {error}"
    library = _native_library()
    if library is None:
        return problem
    try:
        preload_shared_library(library)
    except OSError as error:
        _log.debug("%s cannot be preloaded: %s", library, error)
        return problem
    try:
        return importlib.import_module(PACKAGE)
    except _UNAVAILABLE as error:
        return f"{type(error).__name__}: {error}"


def _native_library() -> Path | None:
    """The native library in the package's folder; None when there is no package or no such file."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / NATIVE_LIBRARY
        if path.is_file():
            return path
    return None
