"""A process's memory in huge pages, with the kernel's own count of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from rpc.huge_pages import gather_memory

# 60 MB of small objects, what gathering made of them, and whether they are still what they were.
PROGRAM = """
import json
from pathlib import Path
from rpc.huge_pages import gather_memory
items = [str(number) * 3 for number in range(600_000)]
before = hash(tuple(items))
gathered = gather_memory()
lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
print(json.dumps([gathered, int(lines["AnonHugePages"].split()[0]) * 1024, before == hash(tuple(items))]))
"""


def test_memory_when_gathered_then_the_kernel_has_it_in_huge_pages_and_nothing_is_lost() -> None:
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if sys.platform != "linux" or release < (6, 1) or not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this kernel does not gather pages on demand")
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    gathered, in_huge_pages, unchanged = json.loads(answer.stdout)
    assert unchanged
    assert gathered > 30 << 20
    assert in_huge_pages >= gathered


def test_memory_when_the_system_has_no_such_pages_then_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    assert gather_memory() == 0
