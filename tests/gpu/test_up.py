"""`baton up` on GPUs: each server has GPUs of its own, or its part of the memory of one; answers are those of CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

for package in ("httpx", "jinja2", "starlette", "tokenizers", "transformers", "uvicorn"):
    pytest.importorskip(package, reason=f"servers need the package {package}")

from tests.integration.cluster import wait_for  # noqa: E402
from tests.integration.test_cli_up import SERVER_FLAGS, Up, chat, chat_model, descendants, status_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
FLAGS = "--dtype float32 --num-kv-blocks 64"
ON_GPU = f"{FLAGS} --device cuda --attention-backend triton --enforce-eager"


def ready(up: Up) -> str:
    base_url = up.base_url()
    wait_for(
        "both servers",
        lambda: sum(each["state"] == "ready" for each in status_of(base_url)["servers"]) == 2,
        60,
    )
    return base_url


def servers_of(up: Up) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of the process of each role."""
    found = {}
    for pid in descendants(up.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        role = next((role for role in ("prefill", "decode") if f"{role}_server" in command), None)
        if role is not None:
            lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found[role] = (command, dict(line.split("=", 1) for line in lines if "=" in line))
    return found


def test_up_when_there_are_gpus_then_its_servers_share_them_and_answer_as_on_cpus(tmp_path: Path) -> None:
    model = chat_model(tmp_path)
    answers = []
    for server_flags in (SERVER_FLAGS + " --device cpu", ON_GPU):
        up = Up(model, server_flags=server_flags)
        try:
            answer = chat(ready(up))
            assert (answer.finish_reason, answer.baton["path"]) == ("length", "pd"), up.text
            answers.append(answer.text)
            servers = servers_of(up)
            assert servers.keys() == {"prefill", "decode"}
            if server_flags is not ON_GPU:
                continue
            if torch.cuda.device_count() == 1:
                for command, _ in servers.values():
                    assert command[command.index("--gpu-memory-utilization") + 1] == "0.45"
            else:
                seen = {environ["CUDA_VISIBLE_DEVICES"] for _, environ in servers.values()}
                assert len(seen) == 2, "each has a GPU of its own"
        finally:
            up.close()
    assert answers[0] == answers[1]
