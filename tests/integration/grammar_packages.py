"""Packages in the place of the library that structured output needs."""

from __future__ import annotations

import os
from pathlib import Path

DAMAGED = 'raise ImportError("libxgrammar_bindings.so: wrong ELF class")\n'


def in_front(folder: Path) -> str:
    """PYTHONPATH with the folder before what is there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def package(folder: Path, source: str) -> Path:
    (folder / "xgrammar").mkdir()
    (folder / "xgrammar" / "__init__.py").write_text(source)
    return folder
