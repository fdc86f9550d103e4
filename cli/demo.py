"""`make demo`: a disaggregated cluster answers one question, and shows where the time of the answer went.

Starts a router, one prefill server and one decode server as separate processes on free ports, asks over the OpenAI
API, prints the streamed answer with the request's stage timeline, stops everything and exits 0. Any other outcome
exits 1 with the cause.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import httpx

from cli.client import ApiError, StreamedAnswer, get_json, stream_chat
from cli.launch import Launcher, LaunchError, LaunchStopped
from cli.model_prepare import ModelPrepareError, prepare_model
from cli.up import StopSignals

QUESTION = "What is the capital of France?"
READY_TIMEOUT_S = 60.0

# What a reader wants to know first; the keys are those of the answer's timeline.
HIGHLIGHTS = (
    ("queue", "prefill.queue", "waiting for its turn on the prefill server"),
    ("prefill", "prefill.compute", "computing the prompt there"),
    ("reserve", "decode.allocate", "getting KV blocks on the decode server, meanwhile"),
    ("transfer", "decode.load", "KV from the one to the other, most of it behind the prefill"),
    ("first decode token", "router.first_decode_token", "from the prefill server's token to the decode server's first"),
)


def wait_ready(base_url: str, stop: threading.Event) -> None:
    """Waits until the router has a pair. Raises LaunchError with the router's reasons, LaunchStopped on `stop`."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    reasons: Any = "no answer"
    while time.monotonic() < deadline:
        response = httpx.get(base_url + "/ready", timeout=5.0)
        if response.status_code == 200:
            return
        reasons = response.json().get("reasons")
        if stop.wait(0.05):
            raise LaunchStopped("router")
    raise LaunchError(f"the router did not become ready: {reasons}")


def show(answer: StreamedAnswer, first_token_s: float, total_s: float) -> None:
    timeline: dict[str, float] = answer.baton.get("timeline", {})
    usage, baton = answer.usage, answer.baton
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    rows = (
        ("finish reason", answer.finish_reason),
        ("path", f"{baton.get('path')}, attempts {baton.get('attempts')}"),
        ("tokens", f"{usage.get('prompt_tokens')} prompt, {usage.get('completion_tokens')} new"),
        ("cached tokens", cached),
        ("prefill CUDA graph", baton.get("prefill_cuda_graph_status")),
        ("client saw", f"first token after {first_token_s * 1e3:.0f} ms, the end after {total_s * 1e3:.0f} ms"),
    )
    print("\n")
    for label, value in rows:
        print(f"  {label:<20}{value}")
    print("\nstage timeline")
    for label, key, meaning in HIGHLIGHTS:
        if key in timeline:
            print(f"  {label:<20}{timeline[key] * 1e3:9.2f} ms   {meaning}")
    print("\nall stages, in ms")
    for role in dict.fromkeys(key.partition(".")[0] for key in timeline):
        stages = [f"{key.partition('.')[2]} {s * 1e3:.2f}" for key, s in timeline.items() if key.startswith(role + ".")]
        print(f"  {role:<9}{', '.join(stages)}")


def ask(base_url: str, stop: threading.Event) -> StreamedAnswer:
    """Streams one answer to the terminal. Raises ApiError, LaunchStopped on `stop`."""
    model = get_json(base_url, "/v1/models")["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
    }
    print(f"\n{model} is asked over the OpenAI API: {QUESTION}\n")
    answer = StreamedAnswer()
    start = time.monotonic()
    first_token_s = 0.0
    for text in stream_chat(base_url, body, answer):
        if stop.is_set():
            raise LaunchStopped("answer")
        first_token_s = first_token_s or time.monotonic() - start
        print(text, end="", flush=True)
    show(answer, first_token_s, time.monotonic() - start)
    return answer


def problem(answer: StreamedAnswer, statuses: list[int]) -> str:
    """What is not as it should be; empty when all is."""
    if "Paris" not in answer.text:
        return "the answer does not name Paris"
    if answer.baton.get("path") != "pd":
        return f"the request took the path {answer.baton.get('path')!r}, not 'pd'"
    missing = [key for _, key, _ in HIGHLIGHTS if key not in answer.baton.get("timeline", {})]
    if missing:
        return f"the answer's timeline lacks {', '.join(missing)}"
    if any(statuses):
        return f"exit statuses {statuses}"
    return ""


def main(argv: list[str] | None = None) -> int:
    del argv
    signals = StopSignals()
    try:
        model = prepare_model(None, None, progress=True)
        signals.install()
        launcher = Launcher(model=str(model), port=0, grpc_port=0)
        print("starting a prefill server, a decode server and a router")
        launcher.start(signals.stop)
        try:
            base_url = f"http://{launcher.router.ready['http']}"
            wait_ready(base_url, signals.stop)
            answer = ask(base_url, signals.stop)
        finally:
            print("\nstopping")
            statuses = launcher.stop(hurry=signals.hurry)
    except KeyboardInterrupt:  # while the model is prepared
        return 130
    except LaunchStopped:
        return 128 + signals.number
    except (LaunchError, ModelPrepareError, ApiError, httpx.HTTPError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    found = problem(answer, statuses)
    if found:
        print(f"demo failed: {found}", file=sys.stderr)
        return 1
    print("everything stopped cleanly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
