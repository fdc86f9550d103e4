"""What a figure was measured on and when: it says nothing without."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpc.version import revision, version


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def source_revision() -> str:
    """The commit that is measured, where there is one to be found."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return revision() or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown revision"


def circumstances() -> dict[str, Any]:
    """Date, revision and machine; to be read before a measurement, for the load average."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": version(),
        "revision": source_revision(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 1),
    }


def sentence(found: dict[str, Any]) -> str:
    """`circumstances` for people."""
    return (
        f"{found['date']}, Baton {found['version']} ({found['revision']}). {found['cpu']}, {found['cores']} cores, "
        f"load average before {found['load_average_before']}."
    )


def save(path: Path | None, found: dict[str, Any], figures: dict[str, Any]) -> None:
    """Every single figure with its circumstances, as JSON; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"circumstances": found, **figures}, indent=1) + "\n")
