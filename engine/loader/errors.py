"""What goes wrong while a model folder is read."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """The model folder cannot be served. The message names file, key or tensor, and what was expected."""
