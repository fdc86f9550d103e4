"""What the package costs a process that imports all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROBE = """
import json, pkgutil, sys, time
began = time.process_time()
import rpc
for module in pkgutil.iter_modules(rpc.__path__):
    __import__("rpc." + module.name)
seconds = time.process_time() - began
with open("/proc/self/status") as status:
    rss_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy", "pandas", "yaml"})
print(json.dumps({"seconds": seconds, "rss_mb": rss_kib / 1024, "heavy": heavy}))
"""


def probe() -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.invariant("RPC-23")
def test_importing_everything_is_light() -> None:
    runs = [probe() for _ in range(3)]
    best = min(float(str(run["seconds"])) for run in runs)
    assert runs[0]["heavy"] == []
    assert float(str(runs[0]["rss_mb"])) < 100
    assert best < 0.9, "seconds of a processor; half of it on an idle machine"
