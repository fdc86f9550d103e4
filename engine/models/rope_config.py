"""Rotary position embedding parameters of a Hugging Face configuration, in both spellings of its history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.loader.errors import ModelLoadError

KINDS = ("default", "linear", "llama3", "yarn", "mrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of one rotary embedding; `kind` decides which are used (engine/layers/rotary.py)."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0  # positions the model was trained with, before scaling (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor and the mscale pair
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ramp's ends outwards
    sections: tuple[int, ...] = ()  # pairs of dimensions that each axis of position ids turns; empty: one axis, all

    @property
    def axes(self) -> int:
        """Position ids that a token may bring; 0: it has none but its place."""
        return len(self.sections)


def _number(source: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = source.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"config.json: RoPE parameter {key!r} must be a number, not {value!r}")
    return float(value)


def _positive(source: Mapping[str, Any], key: str, default: float | None) -> float:
    value = _number(source, key, default)
    if value is None:
        raise ModelLoadError(f"config.json: RoPE parameter {key!r} is missing")
    if value <= 0:
        raise ModelLoadError(f"config.json: RoPE parameter {key!r} must be positive, not {value}")
    return value


def _sections(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or any(type(item) is not int or item < 1 for item in value):
        raise ModelLoadError(f"config.json: RoPE parameter 'mrope_section' must be positive integers, not {value!r}")
    return tuple(value)


def parse_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters` (new spelling) or `rope_theta` with `rope_scaling` (old spelling).

    `max_positions` is the configuration's `max_position_embeddings`; it stands in for a missing
    `original_max_position_embeddings`, as it does in transformers.

    Raises ModelLoadError for a scaling kind that is not implemented or a parameter out of range.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters / rope_scaling must be an object, not {scaling!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelLoadError("config.json: RoPE parameters that differ per layer type are not supported")
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in KINDS:
        raise ModelLoadError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    for holder in (scaling, config):
        if _number(holder, "partial_rotary_factor", 1.0) != 1.0:
            raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported")
    theta = _positive(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    if kind in ("default", "mrope"):
        return RopeConfig(theta=theta, sections=_sections(scaling.get("mrope_section")))
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=_positive(scaling, "factor", None))
    # A value beside rope_parameters has priority (some folders keep it there)
    original = int(
        _positive(
            scaling if config.get("original_max_position_embeddings") is None else config,
            "original_max_position_embeddings",
            float(max_positions),
        )
    )
    if kind == "llama3":
        low = _positive(scaling, "low_freq_factor", None)
        high = _positive(scaling, "high_freq_factor", None)
        if high <= low:
            raise ModelLoadError(f"config.json: RoPE high_freq_factor ({high}) must exceed low_freq_factor ({low})")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=_positive(scaling, "factor", None),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=_positive(scaling, "factor", max_positions / original),
        original_max_positions=original,
        beta_fast=_number(scaling, "beta_fast", None) or 32.0,
        beta_slow=_number(scaling, "beta_slow", None) or 1.0,
        attention_factor=_number(scaling, "attention_factor", None),
        mscale=_number(scaling, "mscale", None),
        mscale_all_dim=_number(scaling, "mscale_all_dim", None),
        truncate=bool(scaling.get("truncate", True)),
    )
