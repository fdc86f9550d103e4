"""`baton chaos`: a cluster of this machine under continuous random faults, checked request by request."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.chaos.faults import Kind
from bench.chaos.tiny_model import MAX_POSITIONS, make_tiny_model
from cache_store.transports import NIXL, TRANSPORTS
from rpc import faults

if TYPE_CHECKING:
    from bench.chaos.campaign import Plan

TINY = "tiny"
EMBEDDED = "embedded"
ANSWER_ROOM = 64  # tokens of the context that prompts leave for the answer
LONGEST_PROMPT = 400


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton chaos", description=__doc__, epilog="Defaults stand in brackets.")
    p.add_argument(
        "--model",
        default=TINY,
        help="tiny: a small random model, made for the run; embedded: SmolLM2-135M-Instruct; or a model folder (tiny)",
    )
    p.add_argument("--prefill-servers", type=int, default=2, metavar="N", help="(%(default)s)")
    p.add_argument("--decode-servers", type=int, default=2, metavar="M", help="(%(default)s)")
    p.add_argument("--requests", type=int, default=2000, metavar="N", help="to send under faults (%(default)s)")
    p.add_argument("--seconds", type=float, default=math.inf, help="send no more after this time (no limit)")
    p.add_argument("--concurrency", type=int, default=8, metavar="N", help="open requests (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of questions, clients and faults (%(default)s)")
    p.add_argument("--blow-seconds", type=float, default=5.0, metavar="S",
                   help="between kills, pauses and restarts, on average (%(default)s)")  # fmt: skip
    p.add_argument(
        "--faults",
        default="all",
        metavar="KINDS",
        help=f"all, none, or some of {','.join(Kind)} (%(default)s)",
    )
    p.add_argument("--points", default="", metavar="FAULTS",
                   help="armed in every process beside those of --faults, as in BATON_FAULTS")  # fmt: skip
    p.add_argument(
        "--transport",
        choices=("mixed", "auto", *TRANSPORTS),
        default="mixed",
        help="how KV blocks travel; mixed: another way at each start of a decode server (%(default)s)",
    )
    p.add_argument(
        "--tiers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="host memory and a directory below the KV pool of every server (on)",
    )
    p.add_argument(
        "--intensity", type=float, default=1.0, metavar="F", help="factor of the chances of fault points (%(default)s)"
    )
    p.add_argument("--settle-seconds", type=float, default=60.0, metavar="S",
                   help="in which every ledger must be clean after the last fault (%(default)s)")  # fmt: skip
    p.add_argument("--request-timeout", type=float, default=30.0, metavar="SECONDS", help="of the router (%(default)s)")
    p.add_argument(
        "--server-flags", default="", metavar="FLAGS", help="for every server: --server-flags='--block-size 32'"
    )
    p.add_argument("--prefill-flags", default="", metavar="FLAGS", help="for the prefill servers")
    p.add_argument("--decode-flags", default="", metavar="FLAGS", help="for the decode servers")
    p.add_argument("--router-flags", default="", metavar="FLAGS", help="for the router")
    p.add_argument("--json", default="", metavar="FILE", help="write the report there")
    p.add_argument(
        "--keep", default="", metavar="DIR", help="keep logs there; else they are kept after a violation only"
    )
    p.add_argument("--quiet", action="store_true", help="print the report alone")
    return p


def _kinds(text: str) -> frozenset[Kind]:
    if text == "all":
        return frozenset(Kind)
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in set(Kind)]
    if unknown:
        raise ValueError(f"--faults {text}: {unknown[0]!r} is none of {', '.join(Kind)}")
    return frozenset(Kind(name) for name in names)


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError naming the flag that is wrong."""
    for name in ("prefill_servers", "decode_servers", "requests", "concurrency"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 1 or more")
    for name in ("seconds", "blow_seconds", "settle_seconds", "request_timeout", "intensity"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name):g} must be above 0")
    for name in ("server_flags", "prefill_flags", "decode_flags", "router_flags"):
        try:
            shlex.split(getattr(arguments, name))
        except ValueError as error:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)!r}: {error}") from None
    if arguments.model not in (TINY, EMBEDDED) and not Path(arguments.model).exists():
        raise ValueError(f"--model {arguments.model}: there is no such folder")
    # Both are found out before minutes of work, not after them.
    if arguments.json and not (Path(arguments.json).parent.is_dir() and not Path(arguments.json).is_dir()):
        raise ValueError(f"--json {arguments.json}: name a file in a folder that exists")
    if arguments.keep and not (Path(arguments.keep).is_dir() and os.access(arguments.keep, os.W_OK)):
        raise ValueError(f"--keep {arguments.keep}: name a folder that exists and can be written to")
    faults.parse(arguments.points)


def _transports(name: str) -> tuple[str, ...]:
    from cache_store.nixl.agent import installed

    if name != "mixed":
        return (name,)
    return tuple(each for each in TRANSPORTS if each != NIXL or installed())


def _model(name: str, folder: Path) -> Path:
    if name == TINY:
        return make_tiny_model(folder / "model")
    from cli.model_prepare import prepare_model

    return prepare_model(None if name == EMBEDDED else name, None, progress=sys.stderr.isatty())


def _sizes(model: Path) -> tuple[int, int]:
    """Vocabulary of plain tokens and the longest prompt that leaves room for an answer."""
    config = json.loads((model / "config.json").read_text())
    longest = min(LONGEST_PROMPT, int(config.get("max_position_embeddings", MAX_POSITIONS)) - ANSWER_ROOM)
    return int(config["vocab_size"]), longest


def _plan(arguments: argparse.Namespace, folder: Path, temporary: Path) -> Plan:
    from bench.chaos.campaign import Plan
    from bench.chaos.cluster import Layout

    model = _model(arguments.model, temporary)
    vocabulary, longest = _sizes(model)
    layout = Layout(
        model=str(model),
        folder=folder,
        temporary=temporary,
        run_id=secrets.token_hex(8),
        seed=arguments.seed,
        kinds=_kinds(arguments.faults),
        prefill_servers=arguments.prefill_servers,
        decode_servers=arguments.decode_servers,
        request_timeout_s=arguments.request_timeout,
        server_flags=shlex.split(arguments.server_flags),
        transports=_transports(arguments.transport),
        tiers=arguments.tiers,
        intensity=arguments.intensity,
        prefill_flags=shlex.split(arguments.prefill_flags),
        decode_flags=shlex.split(arguments.decode_flags),
        router_flags=shlex.split(arguments.router_flags),
        extra_faults=arguments.points,
    )
    return Plan(
        layout=layout,
        requests=arguments.requests,
        seconds=arguments.seconds,
        concurrency=arguments.concurrency,
        gap_s=arguments.blow_seconds,
        vocabulary=vocabulary,
        longest_prompt=longest,
        settle_s=arguments.settle_seconds,
    )


def main(argv: list[str] | None = None) -> int:
    # The C part of gRPC, which reads this when it is imported, would speak of forks at every start of a process.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from bench.chaos.campaign import Campaign, CampaignFailed
    from cli.model_prepare import ModelPrepareError

    arguments = parser().parse_args(argv)
    try:
        _check(arguments)
        _kinds(arguments.faults)
    except ValueError as error:
        print(f"baton chaos: {error}", file=sys.stderr)
        return 2
    temporary = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    folder = Path(tempfile.mkdtemp(prefix="baton-chaos-logs-", dir=arguments.keep or None))
    keep = bool(arguments.keep)
    say = (lambda line: None) if arguments.quiet else (lambda line: print(line, flush=True))
    # As with Ctrl-C: what runs is ended in order; also in the background of a script, whose shell has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        campaign = Campaign(_plan(arguments, folder, temporary), say)
        try:
            report = asyncio.run(campaign.run())
        finally:
            if campaign.state:
                keep = True
                (folder / "state.txt").write_text(campaign.state)
        print(report.text(), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report.as_json(), indent=2) + "\n")
        keep = keep or not report.passed
        return 0 if report.passed else 1
    except (CampaignFailed, ModelPrepareError, OSError) as error:
        keep = True
        print(f"baton chaos: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if keep:
            print(f"logs and state: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
