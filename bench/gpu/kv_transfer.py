"""Prefill and decode engine on one GPU, or on one each: what the transfer of a long prompt costs, what of it is hidden.

    python -m bench.gpu.kv_transfer --shape llama-3.1-8b --tokens 8192 --save kv_transfer.json

Processes hold an engine each: one computes prompts, the others load them, each by its transport. Weights are random,
the same in all. Per round and transport, on the clock of the decode engine:

  alone      a load that begins when the prompt is computed: from its call to verified complete
  exposed    a load under way while the prompt is computed: from P's "computed" to verified complete
  hidden     1 - exposed / alone

Beside it: the time to the first token with and without a load, the time to the second token, both against one engine
that does everything, and whether the tokens are the same. `copies` is the copy engine by itself: GB/s between device
and pinned memory with neighbouring and with scattered blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import select
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu.shapes import SHAPES, write_folder

BLOCK = 64
NEW_TOKENS = 16
WAIT_S = 120.0
ROUNDS = 4
TRANSPORTS = ("ipc", "tcp", "grpc")


# -- one engine in a process of its own ------------------------------------------------------------------------


class Engine:
    """An EngineCore, driven over a pipe: `add` starts a request, `result` is sent when it has ended."""

    def __init__(self, pipe: Connection, role: str, folder: str, options: dict[str, Any]) -> None:
        import torch

        from engine.config import EngineConfig
        from engine.core import Wakeup
        from engine.process import SWITCH_INTERVAL_S
        from engine.startup import start_core

        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._pipe = pipe
        self._wakeup = Wakeup()
        config = EngineConfig(role=role, model=folder, load_format="dummy", **options)
        self.core, ready = start_core(config, self._wakeup)
        self._device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self._open: dict[str, dict[str, Any]] = {}
        gc.collect()
        gc.freeze()
        pipe.send(
            {
                "engine_id": ready.engine_id,
                "address": ready.cache_store_address,
                "transports": ready.transports,
                "backend": ready.attention_backend,
                "load_seconds": ready.load_seconds,
                "device": self._device,
            }
        )

    def run(self) -> None:
        while True:
            while self._pipe.poll(0):
                command = self._pipe.recv()
                if command is None:
                    self.core.agent.close(5.0)
                    return
                self._add(*command)
            computed = self.core.step()
            self._collect()
            self.core.transfer.hand_over()
            if not computed:
                wait_s = max(0.0, min(0.05, self.core.wait_s()))
                select.select([self._pipe.fileno(), self._wakeup.fileno()], [], [], wait_s)
                self._wakeup.clear()

    def _add(self, key: str, mode: str, prompt: list[int], count: int, source: tuple[str, str] | None) -> None:
        from engine.messages import AddRequest, FrontMessage, KvSource, RunMode, SamplingParams

        self._open[key] = {"began": time.monotonic(), "tokens": [], "times": [], "observed": {}}
        request = AddRequest(
            key,
            RunMode(mode),
            prompt,
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
            arrival_ns=time.monotonic_ns(),
            kv_source=None if source is None else KvSource(source[0], (source[1],), 1),
        )
        self.core.handle(FrontMessage(adds=[request]))

    def _collect(self) -> None:
        message = self.core.take_message()
        if message is None:
            return
        now = time.monotonic()
        for item in message.observations:  # one request is open at a time, or they are added up
            for found in self._open.values():
                if item.name.startswith("baton_kv_transfer_"):
                    name = item.name.removeprefix("baton_kv_transfer_")
                    found["observed"][name] = found["observed"].get(name, 0.0) + item.value
                    found["transport"] = item.labels.get("transport", "")
        for end in message.staged_ends:
            self._pipe.send((f"staged {end.request_key}", {"events": {e.name: e.at_ns for e in end.events}}))
        for output in message.outputs:
            found = self._open[output.request_key]
            for token in output.tokens:
                found["tokens"].append(token.token_id)
                found["times"].append(now - found["began"])
            if output.error is not None:
                found["error"] = f"{output.error.code} {output.error.message} {dict(output.error.metadata)}"
            if output.last:
                found["events"] = {event.name: event.at_ns for event in output.events}
                self._pipe.send((output.request_key, self._open.pop(output.request_key)))


def engine_process(pipe: Connection, role: str, folder: str, options: dict[str, Any]) -> None:
    try:
        Engine(pipe, role, folder, options).run()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


@contextlib.contextmanager
def visible(devices: str | None) -> Iterator[None]:
    """Processes started meanwhile see these devices alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class Remote:
    """The bench's end of an engine process."""

    def __init__(self, role: str, folder: Path, devices: str | None, **options: Any) -> None:
        """devices: CUDA_VISIBLE_DEVICES of the process; None: that of this one."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = context.Process(target=engine_process, args=(theirs, role, str(folder), options), daemon=True)
        with visible(devices):
            self._process.start()
        theirs.close()
        self._results: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}

    def ready(self) -> None:
        self.facts = self._receive()

    @property
    def source(self) -> tuple[str, str]:
        return self.facts["engine_id"], self.facts["address"]

    def add(
        self, key: str, mode: str, prompt: Sequence[int], count: int, source: tuple[str, str] | None = None
    ) -> None:
        self._pipe.send((key, mode, list(prompt), count, source))

    def result(self, key: str) -> dict[str, Any]:
        while key not in self._results:
            name, found = self._receive()
            self._results[name] = found
        found = self._results.pop(key)
        if "error" in found:
            raise SystemExit(f"{key}: {found['error']}")
        return found

    def _receive(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise SystemExit("an engine said nothing in time")
        message = self._pipe.recv()
        if isinstance(message, tuple) and message[0] == "failed":
            raise SystemExit(message[1])
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended already
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


# -- prefill and decode ----------------------------------------------------------------------------------------


def one_round(p: Remote, d: Remote, prompts: Callable[[], list[int]], number: str) -> dict[str, Any]:
    """All figures of one round, seconds."""
    # The prompt alone: nobody loads it.
    prompt = prompts()
    key = f"solo{number}#0.00000001"
    p.add(key, "local", prompt, 1)
    solo = p.result(key)
    # One engine does everything.
    key = f"local{number}#0.00000001"
    prompt = prompts()
    d.add(key, "local", prompt, NEW_TOKENS)
    local = d.result(key)
    # A load under way while the same prompt is computed.
    key = f"pd{number}#0.00000001"
    d.add(key, "decode", prompt, NEW_TOKENS, p.source)
    p.add(key, "prefill", prompt, NEW_TOKENS)
    prefill, pd = p.result(key), d.result(key)
    staged = p.result(f"staged {key}")["events"]
    # A load that begins afterwards.
    key = f"late{number}#0.00000001"
    prompt = prompts()
    p.add(key, "prefill", prompt, NEW_TOKENS)
    p.result(key)
    d.add(key, "decode", prompt, NEW_TOKENS, p.source)
    late = d.result(key)
    p.result(f"staged {key}")
    alone, exposed = late["observed"]["seconds"], pd["observed"]["exposed_seconds"]
    return {
        "transport": pd["transport"],
        "bytes": pd["observed"]["size_bytes"],
        "alone_s": alone,
        "exposed_s": exposed,
        "hidden": 1 - exposed / alone,
        "first_token_solo_s": solo["times"][0],
        "first_token_pd_s": prefill["times"][0],
        "first_token_local_s": local["times"][0],
        "second_token_after_first_local_s": local["times"][1] - local["times"][0],
        "load_to_second_token_s": pd["times"][1] - pd["times"][0],
        "decode_complete_pd_s": pd["times"][0],
        "same_tokens": prefill["tokens"][:1] + pd["tokens"][1:] == local["tokens"] and pd["tokens"] == local["tokens"],
        "timeline_ms": timeline(staged, pd["events"]),
        "timeline_late_ms": timeline({}, late["events"]),
    }


def timeline(staged: dict[str, int], load: dict[str, int]) -> dict[str, float]:
    """Milliseconds from the begin of the load, on the clock that all processes of the machine share."""
    begin = load["load_started"]
    events = {f"P {name}": at for name, at in staged.items()} | {f"D {name}": at for name, at in load.items()}
    return {name: round((at - begin) / 1e6, 3) for name, at in sorted(events.items(), key=lambda item: item[1])}


def engines(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as parent:
        folder = arguments.model or write_folder(arguments.shape, Path(parent))
        options = {
            "device": arguments.device,
            "dtype": arguments.dtype,
            "block_size": BLOCK,
            "num_kv_blocks": 8 * -(-(arguments.tokens + NEW_TOKENS) // BLOCK),
            "max_model_len": arguments.tokens + 4 * NEW_TOKENS,
            "max_num_batched_tokens": arguments.chunk or arguments.tokens,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "enable_cuda_graph": False,
            "kv_checksum": arguments.checksum,
            "attention_backend": arguments.attention_backend,
        }
        alone = arguments.transports if len(arguments.transports) == 1 else ["auto"]  # auto leaves nixl out on a device
        remotes = [Remote("prefill", folder, arguments.prefill_device, kv_transport=alone[0], **options)]
        for transport in arguments.transports:
            remotes.append(Remote("decode", folder, arguments.decode_device, kv_transport=transport, **options))
        try:
            for remote in remotes:
                remote.ready()
                print({k: v for k, v in remote.facts.items() if k != "engine_id"}, flush=True)
            vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
            decodes = dict(zip(arguments.transports, remotes[1:], strict=True))
            return measure(arguments, remotes[0], decodes, vocabulary)
        finally:
            for remote in remotes:
                remote.close()


def measure(arguments: argparse.Namespace, p: Remote, decodes: dict[str, Remote], vocabulary: int) -> dict[str, Any]:
    generator = random.Random(17)

    def prompts() -> list[int]:
        return [generator.randrange(3, vocabulary) for _ in range(arguments.tokens)]

    report: dict[str, Any] = {"p_transports": p.facts["transports"], "rows": {}}
    for transport, d in decodes.items():
        found = report["rows"][transport] = []
        if transport not in p.facts["transports"]:
            print(f"{transport}: the prefill engine does not offer it", flush=True)
            continue
        # The first round makes connections, opens memory and compiles kernels.
        for number in range(arguments.rounds + 1):
            found.append(one_round(p, d, prompts, f"{transport}{number}"))
        del found[0]
        middle = {
            name: statistics.median(row[name] for row in found)
            for name in found[0]
            if name.endswith("_s") or name == "hidden"
        }
        size = found[0]["bytes"]
        same = all(row["same_tokens"] for row in found)
        last = {
            name: at for name, at in found[-1]["timeline_ms"].items() if name[2:].startswith(("layer", "comp", "load"))
        }
        print(f"{transport}: the end of a round, ms: {dict(list(last.items())[-10:])}", flush=True)
        report[transport] = {**middle, "same_tokens": same, "gb_per_s_alone": size / middle["alone_s"] / 1e9}
        print(
            f"{transport}: {size / 1e9:.2f} GB alone {1e3 * middle['alone_s']:.1f} ms "
            f"({size / middle['alone_s'] / 1e9:.1f} GB/s), exposed {1e3 * middle['exposed_s']:.2f} ms, "
            f"hidden {100 * middle['hidden']:.1f} % (worst {100 * min(row['hidden'] for row in found):.1f}), "
            f"tokens {'equal' if same else 'DIFFER'}\n"
            f"    first token: alone {1e3 * middle['first_token_solo_s']:.1f}, with the load "
            f"{1e3 * middle['first_token_pd_s']:.1f}, one engine {1e3 * middle['first_token_local_s']:.1f} ms; "
            f"first token on D {1e3 * middle['decode_complete_pd_s']:.1f} ms, then to the second "
            f"{1e3 * middle['load_to_second_token_s']:.1f} ms "
            f"(one engine {1e3 * middle['second_token_after_first_local_s']:.1f})",
            flush=True,
        )
    return report


# -- the copy engine by itself ---------------------------------------------------------------------------------


def copies(shape: str, tokens: int) -> list[dict[str, Any]]:
    import torch

    from cache_store.geometry.layout import GroupLayout
    from cache_store.geometry.rows import block_rows
    from cache_store.memory.cuda_pool import CudaKvPool
    from cache_store.settings import AgentSettings
    from kernels import block_copy

    facts = SHAPES[shape]
    layout = GroupLayout.of(
        "full",
        num_layers=facts["num_hidden_layers"],
        num_kv_heads=facts["num_key_value_heads"],
        head_dim=facts["head_dim"],
        block_size=BLOCK,
        dtype="bfloat16",
    )
    blocks = layout.num_blocks(tokens)
    shape_of = (2 * blocks, 2, layout.num_kv_heads, BLOCK, layout.head_dim)
    layers = [torch.randn(shape_of, device="cuda", dtype=torch.bfloat16) for _ in range(layout.num_layers)]
    engine = CudaKvPool([layout], {"full": layers}, block_copy).copies
    largest = max(map(AgentSettings().chunk_bytes_of, TRANSPORTS))  # as agents have them
    per_slot = max(1, largest // layout.block_bytes)
    slots = engine.allocate(AgentSettings.staging_slots, per_slot * layout.block_bytes)
    scattered = random.Random(3).sample(range(2 * blocks), blocks)
    rows = []
    for name, ids in (("neighbours", list(range(blocks))), ("scattered", scattered)):
        for direction in ("device to host", "host to device"):
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                tickets = []
                for layer in range(layout.num_layers):
                    for at in range(0, blocks, per_slot):
                        slot = slots[len(tickets) % len(slots)]
                        if len(tickets) >= len(slots):
                            tickets[len(tickets) - len(slots)].wait()
                        part = block_rows("full", layer, ids[at : at + per_slot], layout.block_bytes)
                        tickets.append(
                            engine.read(part, slot) if direction == "device to host" else engine.write(slot, part)
                        )
                tickets[-1].wait()
                times.append(time.perf_counter() - began)
            size = blocks * layout.block_bytes * layout.num_layers
            rate = size / min(times[1:]) / 1e9
            rows.append({"blocks": name, "direction": direction, "gb_per_s": rate, "bytes": size})
            print(f"copies of {per_slot} blocks, {name:10} {direction}: {rate:.1f} GB/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prefill step; 0: the whole prompt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=[*TRANSPORTS, "nixl"])
    parser.add_argument("--checksum", default="all", choices=["off", "sample", "all"], help="of tcp and grpc")
    # Not auto: three processes would compile FlashInfer's kernels at the same time, for nothing that is measured here.
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--model", type=Path, help="a model folder in place of a shape")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--prefill-device", help="CUDA_VISIBLE_DEVICES of the prefill engine")
    parser.add_argument("--decode-device", help="and of the decode engines")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", nargs="+", default=["engines", "copies"], choices=["engines", "copies"])
    parser.add_argument("--save", type=Path, help="JSON file of all figures")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"shape": arguments.shape, "tokens": arguments.tokens}
    if "copies" in arguments.parts:
        report["copies"] = copies(arguments.shape, arguments.tokens)
        import torch

        gc.collect()
        torch.cuda.empty_cache()
    if "engines" in arguments.parts:
        report["engines"] = engines(arguments)
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
