"""`make demo`: a disaggregated cluster answers one question, and shows where the time of the answer went.

Starts a router, one prefill server and one decode server as separate processes on free ports, asks over the OpenAI
API, prints the streamed answer with the request's stage timeline, stops everything and exits 0. Any other outcome
exits 1 with the cause.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import httpx

from cli.client import ApiError, StreamedAnswer, get_json, stream_chat
from cli.launch import Launcher, LaunchError
from cli.model_prepare import ModelPrepareError, prepare_model

QUESTION = "What is the capital of France?"
READY_TIMEOUT_S = 60.0

# What a reader wants to know first; the names are those of the stage clocks.
HIGHLIGHTS = (
    ("queue (prefill server)", "prefill.queue"),
    ("prefill", "prefill.compute"),
    ("reserve (decode server)", "decode.allocate"),
    ("transfer", "decode.load"),
    ("first decode token", "decode.first_decode_token"),
)


def wait_ready(base_url: str) -> None:
    """Waits until the router has a pair. Raises LaunchError with the router's reasons."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    reasons: Any = "no answer"
    while time.monotonic() < deadline:
        response = httpx.get(base_url + "/ready", timeout=5.0)
        if response.status_code == 200:
            return
        reasons = response.json().get("reasons")
        time.sleep(0.05)
    raise LaunchError(f"the router did not become ready: {reasons}")


def show(answer: StreamedAnswer, first_token_s: float, total_s: float) -> None:
    timeline: dict[str, float] = answer.baton.get("timeline", {})
    print(f"\n\nfinish reason   {answer.finish_reason}")
    print(f"path            {answer.baton.get('path')}, attempts {answer.baton.get('attempts')}")
    usage = answer.usage
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    print(
        f"tokens          {usage.get('prompt_tokens')} prompt ({cached} cached), {usage.get('completion_tokens')} new"
    )
    print(f"prefill graph   {answer.baton.get('prefill_cuda_graph_status')}")
    print(f"client saw      first token after {first_token_s * 1e3:.0f} ms, the end after {total_s * 1e3:.0f} ms")
    print("\nstage timeline")
    for label, key in HIGHLIGHTS:
        if key in timeline:
            print(f"  {label:<28}{timeline[key] * 1e3:9.2f} ms")
    print("\nall stages")
    for key, seconds in timeline.items():
        print(f"  {key:<28}{seconds * 1e3:9.2f} ms")


def ask(base_url: str) -> StreamedAnswer:
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
        first_token_s = first_token_s or time.monotonic() - start
        print(text, end="", flush=True)
    show(answer, first_token_s, time.monotonic() - start)
    return answer


def main(argv: list[str] | None = None) -> int:
    del argv
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        model = prepare_model(None, None, progress=True)
        launcher = Launcher(model=str(model), port=0, grpc_port=0)
        print("starting a prefill server, a decode server and a router")
        launcher.start()
        try:
            base_url = f"http://{launcher.router.ready['http']}"
            wait_ready(base_url)
            answer = ask(base_url)
        finally:
            print("\nstopping")
            statuses = launcher.stop()
    except (LaunchError, ModelPrepareError, ApiError, httpx.HTTPError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    if "Paris" not in answer.text:
        print("demo failed: the answer does not name Paris", file=sys.stderr)
        return 1
    if answer.baton.get("path") != "pd":
        print(f"demo failed: the request took the path {answer.baton.get('path')!r}, not 'pd'", file=sys.stderr)
        return 1
    if any(statuses):
        print(f"demo failed: exit statuses {statuses}", file=sys.stderr)
        return 1
    print("everything stopped cleanly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
