"""`baton bench serve`: a load generator with a closed loop, Poisson arrivals, or those of a trace.

Without --request-rate every request is sent as soon as --max-concurrency allows (closed loop). With it, arrival times
are drawn from a gamma process of that rate (--burstiness 1 is Poisson) before the run starts, and requests are sent at
those times whatever the server does (open loop), except that --max-concurrency still caps them. With --self-timed the
times are those of the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.backends import BACKENDS, Backend, Target
from bench.datasets import (
    DATASETS,
    RECORDED,
    DatasetError,
    DatasetOptions,
    Prompt,
    load_tokenizer,
    make_prompts,
)
from bench.recorded import fitting
from bench.results import LATENCIES, RequestResult, Slos, render, summarize
from bench.router_facts import (
    NotReady,
    counters,
    first_model,
    grown,
    grpc_model_length,
    model_length,
    topology,
    wait_grpc_ready,
)
from rpc.version import version

LATENESS_LIMIT_MS = 50.0  # send lateness p99 above which an open-loop run says nothing about the server
ERRORS_SHOWN = 20


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton bench serve", description=__doc__, epilog="Defaults stand in brackets.")
    p.add_argument(
        "--backend", choices=sorted(BACKENDS), default="openai", help="how to ask; openai: completions (%(default)s)"
    )
    p.add_argument("--base-url", default="", help="overrides --host and --port")
    p.add_argument("--host", default="127.0.0.1", help="of the router (%(default)s)")
    p.add_argument("--port", type=int, default=None, help="of the router (8000, for baton-grpc 8001)")
    p.add_argument("--endpoint", default="", help="path, when it is not that of the back end")
    p.add_argument("--model", default="", help="served model name (the first one)")
    p.add_argument("--tokenizer", default="", help="model folder (the embedded model)")
    p.add_argument("--dataset-name", choices=DATASETS, default="random", help="where prompts come from (%(default)s)")
    p.add_argument(
        "--dataset-path",
        default="",
        help="of custom: JSON lines with prompt and, if wanted, output_tokens; of sonnet, sharegpt, burstgpt and "
        "timed_trace: the file as it is passed on",
    )
    for name, short, default, what in (
        ("random-input-len", "input-len", 256, "tokens of a prompt, a shared prefix not counted"),
        ("random-output-len", "output-len", 64, "tokens of an answer at the most, and exactly with --ignore-eos"),
    ):
        p.add_argument(f"--{name}", f"--{short}", type=int, default=default, metavar="N", help=f"{what} (%(default)s)")
    p.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="of random: lengths are drawn from 1 - R to 1 + R times the given ones (%(default)s)",
    )
    p.add_argument(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens with which prompts begin alike: all of random (%(default)s), those of one prefix of "
        "prefix_repetition (as many as --random-input-len)",
    )
    p.add_argument(
        "--prefix-repetition-num-prefixes", type=int, default=8, metavar="N", help="different beginnings (%(default)s)"
    )
    p.add_argument(
        "--self-timed", action="store_true", help="of timed_trace: send each request at its time, in place of a rate"
    )
    p.add_argument(
        "--timed-trace-chunk-hash-size",
        type=int,
        default=512,
        metavar="N",
        help="of timed_trace: tokens for which one hash id stands (%(default)s)",
    )
    p.add_argument(
        "--timed-trace-sec-multiplier",
        type=float,
        default=0.001,
        metavar="S",
        help="of timed_trace: seconds in a unit of its time stamps (%(default)s)",
    )
    p.add_argument(
        "--trace-length-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="of timed_trace: factor of all lengths, to fit a small model (%(default)s)",
    )
    p.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests to send (%(default)s)")
    p.add_argument("--request-rate", type=float, default=math.inf, help="requests per second; inf is a closed loop")
    p.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson, below 1 more bursty (%(default)s)")
    p.add_argument("--max-concurrency", type=int, default=None, metavar="N", help="open requests (no limit)")
    p.add_argument("--ignore-eos", action="store_true", help="generate on past the end of sequence")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of prompts, arrivals and sampling (%(default)s)")
    p.add_argument(
        "--num-warmups",
        type=int,
        default=1,
        metavar="N",
        help="requests before the run, with prompts of their own (%(default)s)",
    )
    p.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="what to show (%(default)s)")
    p.add_argument("--metric-percentiles", default="50,90,99", help="which percentiles of them (%(default)s)")
    p.add_argument(
        "--goodput",
        nargs="*",
        default=[],
        metavar="NAME:MS",
        help="count the requests within these limits: ttft:500 tpot:50 e2el:5000",
    )
    p.add_argument(
        "--itl-mode",
        choices=("token", "chunk"),
        default="token",
        help="inter-token latency of every token, or of every chunk whatever it holds (%(default)s)",
    )
    p.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    p.add_argument("--save-detailed", action="store_true", help="write those of each request too")
    p.add_argument("--result-dir", default="results", help="folder for that (%(default)s)")
    p.add_argument("--result-filename", default="", help="file in it (back end and time)")
    p.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="goes into the file as it is")
    p.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="header of each request")
    p.add_argument("--extra-body", default="{}", help="JSON object merged into each request")
    p.add_argument("--api-key", default=os.environ.get("BATON_API_KEY", ""), help="of the router (BATON_API_KEY)")
    p.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest wait until the router is ready (%(default)s)",
    )
    return p


@dataclass(frozen=True)
class Plan:
    """The flags after checking: what is measured and how it is shown."""

    backend: str
    base_url: str
    metrics: list[str]
    percentiles: list[float]
    slos: Slos
    headers: dict[str, str]
    metadata: dict[str, str]
    extra_body: dict[str, Any]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        """Raises ValueError naming the flag that is wrong."""
        metrics = [m for m in arguments.percentile_metrics.split(",") if m]
        for metric in metrics:
            if metric not in LATENCIES:
                raise ValueError(f"--percentile-metrics {metric}: known are {', '.join(LATENCIES)}")
        if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
            raise ValueError(f"--max-concurrency {arguments.max_concurrency} must be at least 1")
        if arguments.num_warmups < 0:
            raise ValueError(f"--num-warmups {arguments.num_warmups} must be 0 or more")
        if arguments.self_timed and arguments.dataset_name != "timed_trace":
            raise ValueError(f"--self-timed: --dataset-name {arguments.dataset_name} has no times; timed_trace does")
        if arguments.self_timed and math.isfinite(arguments.request_rate):
            raise ValueError(f"--request-rate {arguments.request_rate:g} must be absent with --self-timed")
        try:
            extra_body = json.loads(arguments.extra_body)
        except ValueError:
            extra_body = None
        if not isinstance(extra_body, dict):
            raise ValueError(f"--extra-body {arguments.extra_body}: must be a JSON object")
        if arguments.backend == "baton-grpc":
            for flag, given in (("--extra-body", extra_body), ("--endpoint", arguments.endpoint)):
                if given:
                    raise ValueError(f"{flag} {given}: only HTTP has it, not --backend baton-grpc")
        port = BACKENDS[arguments.backend][2] if arguments.port is None else arguments.port
        return cls(
            backend=arguments.backend,
            base_url=(arguments.base_url or f"http://{arguments.host}:{port}").rstrip("/").removesuffix("/v1"),
            metrics=metrics,
            percentiles=_percentiles(arguments.metric_percentiles),
            slos=Slos.parse(arguments.goodput),
            headers=_pairs(arguments.header, "--header"),
            metadata=_pairs(arguments.metadata, "--metadata"),
            extra_body=extra_body,
        )


def _percentiles(text: str) -> list[float]:
    found = []
    for word in filter(None, text.split(",")):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise ValueError(f"--metric-percentiles {word}: must be a number from 0 to 100")
        found.append(value)
    return found


def _pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ValueError(f"{flag} {word}: write KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Planned send times in seconds from the start, the first at 0; all 0 for an infinite rate.

    Gaps are gamma distributed with mean 1/rate and a coefficient of variation of burstiness^-0.5. Raises ValueError
    naming the flag.
    """
    if math.isinf(rate) and rate > 0:
        return [0.0] * count
    if not rate > 0:
        raise ValueError(f"--request-rate {rate:g} must be above 0")
    if not (burstiness > 0 and math.isfinite(burstiness)):
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
    """Sends all prompts; returns the results in prompt order and the duration in seconds.

    A result's lateness is the load generator's own; time spent waiting for --max-concurrency is not in it.
    """
    gate: contextlib.AbstractAsyncContextManager[Any]
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    start = backend.now()

    async def one(prompt: Prompt, planned: float) -> RequestResult:
        late_s = 0.0
        if planned > 0:
            await asyncio.sleep(start + planned - backend.now())
            late_s = max(0.0, backend.now() - start - planned)
        async with gate:
            return await backend.send(prompt, late_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(p, at)) for p, at in zip(prompts, arrivals, strict=True)]
    return [task.result() for task in tasks], backend.now() - start


async def _run(
    arguments: argparse.Namespace, plan: Plan, target: Target, warmups: list[Prompt], prompts: list[Prompt]
) -> tuple[dict[str, Any], list[RequestResult]]:
    backend = BACKENDS[plan.backend][0](target)
    if arguments.self_timed:
        arrivals = [prompt.at_s for prompt in prompts]
    else:
        arrivals = arrival_times(len(prompts), arguments.request_rate, arguments.burstiness, arguments.seed)
    pages = plan.backend != "baton-grpc"
    try:
        for prompt in warmups:
            warm = await backend.send(prompt)
            if warm.error:
                raise ValueError(f"the warm-up request failed: {warm.error}")
        before = await counters(plan.base_url, arguments.api_key) if pages else {}
        backend.restart_clock()
        results, duration = await run_load(backend, prompts, arrivals, arguments.max_concurrency)
        after = await counters(plan.base_url, arguments.api_key) if pages else {}
        servers = await topology(plan.base_url, arguments.api_key) if pages else {}
    finally:
        await backend.close()
    figures = summarize(
        results,
        duration,
        request_rate=arguments.request_rate,
        max_concurrency=arguments.max_concurrency,
        slos=plan.slos,
        percentiles=plan.percentiles,
    )
    good = [r for r in results if not r.error]
    paths: dict[str, int] = {}
    for result in good:
        paths[result.path or "unknown"] = paths.get(result.path or "unknown", 0) + 1
    figures["baton"] = {
        "version": version(),
        **servers,
        "cached_share": sum(r.cached_tokens for r in good) / max(1, sum(r.prompt_tokens for r in good)),
        "paths": paths,
        "metric_deltas": grown(before, after),
    }
    return figures, results


def _detailed(results: Sequence[RequestResult]) -> dict[str, Any]:
    """Per request, in the order of the prompts; times in seconds."""
    return {
        "input_lens": [r.prompt_tokens for r in results],
        "output_lens": [r.output_tokens for r in results],
        "start_times": [r.sent_at for r in results],
        "ttfts": [r.ttft_s for r in results],
        "itls": [r.itls_s for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error for r in results],
    }


def _save(arguments: argparse.Namespace, plan: Plan, figures: dict[str, Any]) -> Path:
    now = datetime.now(UTC)
    folder = Path(arguments.result_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "backend": arguments.backend,
        "model_id": arguments.model,
        "tokenizer_id": arguments.tokenizer,
        "dataset_name": arguments.dataset_name,
        "num_prompts": arguments.num_prompts,
        "burstiness": arguments.burstiness,
        **plan.metadata,
        **figures,
    }
    path = folder / (arguments.result_filename or f"{arguments.backend}-{now:%Y%m%d-%H%M%S}.json")
    path.write_text(json.dumps(_without_nan(record), indent=1, allow_nan=False), encoding="utf-8")
    return path


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; a figure of nothing is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value


def run(argv: list[str]) -> dict[str, Any]:
    """Runs the benchmark that the flags describe, prints the block and returns the figures.

    Raises ValueError or DatasetError naming the flag that is wrong, NotReady when nothing serves there.
    """
    arguments = parser().parse_args(argv)
    plan = Plan.of(arguments)
    arrival_times(0, arguments.request_rate, arguments.burstiness, arguments.seed)  # a wrong rate is found out here
    if not arguments.tokenizer:
        from cli.model_prepare import prepare_model

        arguments.tokenizer = str(prepare_model(None, None, progress=False))
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
        chunk_tokens=arguments.timed_trace_chunk_hash_size,
        seconds_per_unit=arguments.timed_trace_sec_multiplier,
        length_scale=arguments.trace_length_scale,
    )
    tokenizer = load_tokenizer(arguments.tokenizer)
    prompts = made = make_prompts(options, tokenizer)
    if plan.backend == "baton-grpc":
        wait_grpc_ready(plan.base_url, arguments.ready_check_timeout_sec)
    else:
        served = first_model(plan.base_url, arguments.api_key, arguments.ready_check_timeout_sec)
        arguments.model = arguments.model or served
    if arguments.dataset_name == "timed_trace":
        read_length = grpc_model_length if plan.backend == "baton-grpc" else model_length
        longest = read_length(plan.base_url, arguments.api_key, arguments.model)
        prompts = fitting(made, longest)
        if not prompts:
            raise ValueError(f"--trace-length-scale {arguments.trace_length_scale:g}: none fits into {longest} tokens")
    warmups: list[Prompt] = []
    if arguments.num_warmups:
        # Prompts of their own, so that the run finds nothing of them in a prefix cache.
        own = dataclasses.replace(options, num_prompts=arguments.num_warmups, seed=arguments.seed + 1_000_003)
        if arguments.dataset_name in RECORDED:
            length, output = len(prompts[0].token_ids), prompts[0].output_tokens
            own = DatasetOptions("random", own.num_prompts, own.seed, input_len=length, output_len=output)
        warmups = make_prompts(own, tokenizer)
    target = Target(
        base_url=plan.base_url,
        endpoint=arguments.endpoint or BACKENDS[plan.backend][1],
        model=arguments.model,
        ignore_eos=arguments.ignore_eos,
        api_key=arguments.api_key,
        temperature=arguments.temperature,
        seed=arguments.seed,
        headers=plan.headers,
        extra_body=plan.extra_body,
        itl_per_token=arguments.itl_mode == "token",
    )
    figures, results = asyncio.run(_run(arguments, plan, target, warmups, prompts))
    if arguments.dataset_name == "timed_trace":
        dropped = len(made) - len(prompts)
        figures["baton"]["trace"] = {"dropped": dropped, "length_scale": arguments.trace_length_scale}
        if dropped:
            print(f"left out: {dropped} requests of the trace are longer than the model's context", file=sys.stderr)
    print(render(figures, plan.metrics, plan.percentiles))
    for error in sorted({r.error for r in results if r.error})[:ERRORS_SHOWN]:
        print(f"failed: {error}", file=sys.stderr)
    open_loop = math.isfinite(arguments.request_rate) or arguments.self_timed
    if open_loop and figures["send_lateness_p99_ms"] > LATENESS_LIMIT_MS:
        print(
            f"invalid: requests were sent {figures['send_lateness_p99_ms']:.0f} ms late (p99); the load generator "
            "could not keep the rate",
            file=sys.stderr,
        )
        figures["invalid"] = "send lateness"
    if arguments.save_detailed:
        figures |= _detailed(results)
    if arguments.save_result or arguments.save_detailed:
        print(f"saved {_save(arguments, plan, figures)}")
    return figures


def main(argv: list[str] | None = None) -> int:
    try:
        figures = run(sys.argv[1:] if argv is None else argv)
    except (ValueError, DatasetError, NotReady) as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 2
    return 1 if figures["failed"] or figures.get("invalid") else 0


if __name__ == "__main__":
    sys.exit(main())
