"""`baton bench serve`: a load generator with a closed loop or Poisson arrivals.

Without --request-rate every request is sent as soon as --max-concurrency allows (closed loop). With it, arrival times
are drawn from a gamma process of that rate (--burstiness 1 is Poisson) before the run starts, and requests are sent at
those times whatever the server does (open loop), except that --max-concurrency still caps them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from bench.backends import BACKENDS, Backend, Target
from bench.datasets import DATASETS, DatasetError, DatasetOptions, Prompt, load_tokenizer, make_prompts
from bench.results import LATENCIES, RequestResult, Slos, render, summarize
from rpc.version import version

LATENESS_LIMIT_MS = 50.0  # send lateness p99 above which an open-loop run says nothing about the server


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton bench serve", description=__doc__)
    p.add_argument("--backend", choices=sorted(BACKENDS), default="openai")
    p.add_argument("--base-url", default="", help="overrides --host and --port")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="default 8000 (baton-grpc: give 8001)")
    p.add_argument("--endpoint", default="", help="default: that of the back end")
    p.add_argument("--model", default="", help="served model name (default: the first one)")
    p.add_argument("--tokenizer", default="", help="model folder (default: the embedded model)")
    p.add_argument("--dataset-name", choices=DATASETS, default="random")
    p.add_argument("--dataset-path", default="")
    p.add_argument("--random-input-len", "--input-len", type=int, default=256)
    p.add_argument("--random-output-len", "--output-len", type=int, default=64)
    p.add_argument("--random-range-ratio", type=float, default=0.0)
    p.add_argument("--random-prefix-len", type=int, default=0)
    p.add_argument("--prefix-repetition-num-prefixes", type=int, default=8)
    p.add_argument("--num-prompts", type=int, default=100)
    p.add_argument("--request-rate", type=float, default=math.inf, help="requests per second; inf is a closed loop")
    p.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson, below 1 more bursty")
    p.add_argument("--max-concurrency", type=int, default=None)
    p.add_argument("--ignore-eos", action="store_true")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--num-warmups", type=int, default=1)
    p.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el")
    p.add_argument("--metric-percentiles", default="50,90,99")
    p.add_argument("--goodput", nargs="*", default=[], metavar="NAME:MS")
    p.add_argument("--itl-mode", choices=("token", "chunk"), default="token")
    p.add_argument("--save-result", action="store_true")
    p.add_argument("--save-detailed", action="store_true")
    p.add_argument("--result-dir", default="results")
    p.add_argument("--result-filename", default="")
    p.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    p.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE")
    p.add_argument("--extra-body", default="{}", help="JSON object merged into each request")
    p.add_argument("--api-key", default="")
    p.add_argument("--ready-check-timeout-sec", type=float, default=60.0)
    return p


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Planned send times in seconds from the start; all 0 for an infinite rate. Raises ValueError naming the flag."""
    if math.isinf(rate):
        return [0.0] * count
    if not rate > 0:
        raise ValueError(f"--request-rate {rate:g} must be above 0")
    if not burstiness > 0:
        raise ValueError(f"--burstiness {burstiness:g} must be above 0")
    rng = random.Random(seed)
    times, at = [], 0.0
    for _ in range(count):
        times.append(at)
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


async def run_load(
    backend: Backend, prompts: Sequence[Prompt], arrivals: Sequence[float], max_concurrency: int | None
) -> tuple[list[RequestResult], float]:
    """Sends all prompts; returns the results in prompt order and the duration in seconds."""
    gate: contextlib.AbstractAsyncContextManager[Any]
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    open_loop = any(arrivals)
    start = backend.now()

    async def one(prompt: Prompt, planned: float) -> RequestResult:
        await asyncio.sleep(max(0.0, start + planned - backend.now()))
        async with gate:
            return await backend.send(prompt, backend.now() - start - planned if open_loop else 0.0)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(p, at)) for p, at in zip(prompts, arrivals, strict=True)]
    return [task.result() for task in tasks], backend.now() - start


def _pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ValueError(f"{flag} {word}: write KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


def _first_model(base_url: str, api_key: str, timeout_s: float) -> str:
    """Waits for a router that is ready; returns the first served model name."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            response = httpx.get(base_url + "/v1/models", headers=headers, timeout=5.0)
            ready = httpx.get(base_url + "/health", headers=headers, timeout=5.0)
            if response.status_code == 200 and ready.status_code == 200:
                return str(response.json()["data"][0]["id"])
            reason = f"HTTP {response.status_code}/{ready.status_code}"
        except (httpx.HTTPError, LookupError) as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise ValueError(f"{base_url} was not ready within {timeout_s:g} s: {reason}")
        time.sleep(0.2)


async def _run(arguments: argparse.Namespace, target: Target, prompts: list[Prompt]) -> dict[str, Any]:
    kind, _ = BACKENDS[arguments.backend]
    backend = kind(target, time.monotonic())
    slos = Slos.parse(arguments.goodput)
    percentiles = [float(p) for p in arguments.metric_percentiles.split(",")]
    arrivals = arrival_times(len(prompts), arguments.request_rate, arguments.burstiness, arguments.seed)
    try:
        for prompt in prompts[: arguments.num_warmups]:
            warm = await backend.send(prompt)
            if warm.error:
                raise ValueError(f"the warm-up request failed: {warm.error}")
        backend.epoch = time.monotonic()
        results, duration = await run_load(backend, prompts, arrivals, arguments.max_concurrency)
    finally:
        await backend.close()
    figures = summarize(
        results,
        duration,
        request_rate=arguments.request_rate,
        max_concurrency=arguments.max_concurrency,
        slos=slos,
        percentiles=percentiles,
    )
    paths: dict[str, int] = {}
    for result in results:
        paths[result.path or "unknown"] = paths.get(result.path or "unknown", 0) + 1
    figures["baton"] = {"version": version(), "paths": paths}
    if arguments.save_detailed:
        figures["ttfts"] = [r.ttft_s for r in results]
        figures["itls"] = [r.itls_s for r in results]
        figures["output_lens"] = [r.output_tokens for r in results]
        figures["generated_texts"] = [r.text for r in results]
        figures["request_errors"] = [r.error for r in results]
    return figures


def _save(arguments: argparse.Namespace, figures: dict[str, Any]) -> Path:
    now = datetime.now(UTC)
    name = arguments.result_filename or f"{arguments.backend}-{now:%Y%m%d-%H%M%S}.json"
    folder = Path(arguments.result_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "backend": arguments.backend,
        "model_id": arguments.model,
        "num_prompts": arguments.num_prompts,
        **_pairs(arguments.metadata, "--metadata"),
        **figures,
    }
    path = folder / name
    path.write_text(json.dumps(record, indent=1))
    return path


def run(argv: list[str]) -> dict[str, Any]:
    """Runs the benchmark that the flags describe, prints the block and returns the figures.

    Raises ValueError or DatasetError naming the flag that is wrong.
    """
    arguments = parser().parse_args(argv)
    metrics = [m for m in arguments.percentile_metrics.split(",") if m]
    for metric in metrics:
        if metric not in LATENCIES:
            raise ValueError(f"--percentile-metrics {metric}: known are {', '.join(LATENCIES)}")
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ValueError("--max-concurrency must be at least 1")
    base_url = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/").removesuffix("/v1")
    if arguments.backend != "baton-grpc":
        served = _first_model(base_url, arguments.api_key, arguments.ready_check_timeout_sec)
        arguments.model = arguments.model or served
    tokenizer_folder = arguments.tokenizer
    if not tokenizer_folder:
        from cli.model_prepare import prepare_model

        tokenizer_folder = str(prepare_model(None, None, progress=False))
    options = DatasetOptions(
        name=arguments.dataset_name,
        num_prompts=arguments.num_prompts,
        seed=arguments.seed,
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        range_ratio=arguments.random_range_ratio,
        prefix_len=arguments.random_prefix_len,
        num_prefixes=arguments.prefix_repetition_num_prefixes,
        path=arguments.dataset_path,
    )
    prompts = make_prompts(options, load_tokenizer(tokenizer_folder))
    target = Target(
        base_url=base_url,
        endpoint=arguments.endpoint or BACKENDS[arguments.backend][1],
        model=arguments.model,
        ignore_eos=arguments.ignore_eos,
        api_key=arguments.api_key,
        temperature=arguments.temperature,
        seed=arguments.seed,
        headers=_pairs(arguments.header, "--header"),
        extra_body=json.loads(arguments.extra_body),
        itl_per_token=arguments.itl_mode == "token",
    )
    figures = asyncio.run(_run(arguments, target, prompts))
    print(render(figures, metrics, [float(p) for p in arguments.metric_percentiles.split(",")]))
    for error in figures["errors"]:
        print(f"failed: {error}", file=sys.stderr)
    if math.isfinite(arguments.request_rate) and figures["send_lateness_p99_ms"] > LATENESS_LIMIT_MS:
        print(
            f"invalid: requests were sent up to {figures['send_lateness_p99_ms']:.0f} ms late (p99), the load generator "
            "could not keep the rate",
            file=sys.stderr,
        )
        figures["invalid"] = "send lateness"
    if arguments.save_result or arguments.save_detailed:
        print(f"saved {_save(arguments, figures)}")
    return figures


def main(argv: list[str] | None = None) -> int:
    try:
        figures = run(sys.argv[1:] if argv is None else argv)
    except (ValueError, DatasetError) as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 2
    return 1 if figures["failed"] or figures.get("invalid") else 0


if __name__ == "__main__":
    sys.exit(main())
