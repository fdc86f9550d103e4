"""The engine process: `python -m engine.process`, started by a front through `engine.client`.

Its configuration comes on stdin. It says hello when both sockets work, loads the model, says that it is ready, and
runs steps until the front tells it to stop. Its life is the front's: signals for termination are ignored here,
because the front gets them too and ends its engine in order, and the kernel kills it when the front dies.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.config import EngineConfig
from engine.messages import EngineEnvelope, EngineFailed, EngineHello, EngineReady
from engine.scheduler.news import engine_error
from rpc.errors import BatonError, ErrorCode
from rpc.huge_pages import gather_memory
from rpc.logs import close_logging, setup_logging
from rpc.time_slice import DEFAULT_S, set_time_slice

if TYPE_CHECKING:
    from engine.core import EngineCore, Wakeup

FIRST_MESSAGE_S = 60.0
LAST_MESSAGE_MS = 1000
AGENT_CLOSE_S = 2.0
# How long a thread may keep the interpreter while another one waits for it. The step loop takes it back after every
# operator; at the default of 5 ms a busy cache-store thread would hold up the answer of the step by that much.
SWITCH_INTERVAL_S = 0.0002
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after the front's shutdown message, 1 after a failure that it was told of, 2 without a front."""
    # SIGHUP asks for log files to be opened anew; this process has none, and writes where its front's stderr goes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="Engine of a Baton server. Started by its front, not by hand.")
    parser.add_argument("--inbox", required=True, help="socket of the front's messages")
    parser.add_argument("--outbox", required=True, help="socket of the engine's messages")
    parser.add_argument("--front-pid", type=int, required=True, help="process whose death ends this one")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configuration = sys.stdin.buffer.read()
    context = zmq.Context(io_threads=1)
    # The first socket starts the thread that moves messages. It keeps the short time slices of the front, whose child
    # this process is; what computes does not interrupt others.
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    set_time_slice(DEFAULT_S)
    for socket in (inbox, outbox):
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, LAST_MESSAGE_MS)
    inbox.connect(options.inbox)
    outbox.connect(options.outbox)
    try:
        if not _meet_front(inbox, outbox, options.front_pid):
            shutil.rmtree(Path(options.inbox.removeprefix("ipc://")).parent, ignore_errors=True)
            return 2
        return _serve(configuration, inbox, outbox)
    finally:
        inbox.close(0)
        outbox.close()
        context.term()
        close_logging()


def _meet_front(inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], front_pid: int) -> bool:
    """Ties this process to the front's life and says hello. False: the front is gone."""
    deadline = time.monotonic() + FIRST_MESSAGE_S
    while not inbox.poll(100):
        if os.getppid() != front_pid or time.monotonic() > deadline:
            return False
    inbox.recv()
    outbox.send(msgspec.msgpack.encode(EngineEnvelope(hello=EngineHello(os.getpid()))))
    # From now on the front has removed the sockets' folder, so a sudden death leaves nothing behind.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == front_pid


def _serve(configuration: bytes, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> int:
    """Runs the engine; whatever ends it is told to the front."""
    try:
        config = EngineConfig.from_json(configuration)
        config.check()
    except BatonError as error:
        return _report(error, outbox)
    from engine.core import EngineLoop, EngineUnusable, Wakeup

    wakeup = Wakeup()
    core: EngineCore | None = None
    try:
        setup_logging(
            config.role,
            config.log_level,  # type: ignore[arg-type]  # checked by the front's settings
            config.log_format,  # type: ignore[arg-type]
            rank=config.rank,
            process=f"engine:{os.getpid()}",
        )
        core, ready = start_core(config, wakeup)
        from engine.device import resolve_device

        # What is alive now stays alive. Left to the collector, torch's objects cost a step 0.1 s now and then.
        gc.collect()
        gc.freeze()
        if resolve_device(config.device).type == "cpu":
            gather_memory()  # else a step that has read all weights finds nothing of what it needs next
        outbox.send(msgspec.msgpack.encode(EngineEnvelope(ready=ready)))
        _log.info("engine ready", extra={"blocks": ready.num_blocks, "load_seconds": round(ready.load_seconds, 3)})
        EngineLoop(core, inbox, outbox, wakeup).run()
        return 0
    except EngineUnusable as error:
        failure = error.error
    except BatonError as error:
        failure = error
    except Exception as error:
        _log.exception("the engine failed")
        failure = BatonError(
            ErrorCode.ENGINE_DEAD, "the engine failed; see its log", metadata={"cause": type(error).__name__}
        )
    finally:
        if core is not None:
            core.agent.close(AGENT_CLOSE_S)
        wakeup.close()
    return _report(failure, outbox)


def _report(failure: BatonError, outbox: zmq.Socket[bytes]) -> int:
    _log.error("engine ends: %s", failure, extra={"code": failure.code.name})
    outbox.send(msgspec.msgpack.encode(EngineEnvelope(failed=EngineFailed(engine_error(failure)))))
    return 1


def start_core(config: EngineConfig, wakeup: Wakeup) -> tuple[EngineCore, EngineReady]:
    """Loads the model, makes the KV pool and starts the cache-store agent.

    Raises BatonError that names the flag to change.
    """
    import torch

    from cache_store.agent import CacheStoreAgent
    from engine.core import EngineCore
    from engine.grammar.compiling import CACHE_BYTES, GrammarWorkers
    from engine.kv_cache.cache import KvCache
    from engine.loader.errors import ModelLoadError
    from engine.memory import device_kv_blocks, free_memory_bytes, kv_blocks
    from engine.runner.decode_status import capture_sizes
    from engine.runner.model_runner import ModelRunner
    from engine.runner.prefill_graph.startup import PrefillGraphStart, gate_facts
    from engine.transfer import agent_identity, agent_settings, kv_pool
    from rpc.grammar_compiler import GrammarCompiler

    began = time.monotonic()
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        runner = ModelRunner(
            Path(config.model),
            config.dtype,
            config.block_size,
            config.max_model_len or None,
            config.load_format,
            config.attention_backend,
            config.device,
            config.max_num_seqs,
            config.max_num_batched_tokens,
        )
    except ModelLoadError as error:
        raise BatonError(ErrorCode.INVALID_PARAMS, f"--model {config.model}: {error}") from error
    model = runner.config
    grammars: GrammarWorkers | None = None
    if config.grammars:
        compiler = GrammarCompiler.load(
            Path(config.model),
            vocab_size=model.vocab_size,
            stop_token_ids=sorted(model.eos_token_ids),
            cache_bytes=CACHE_BYTES,
        )
        grammars = GrammarWorkers(compiler, wakeup.wake)
    config.check_lengths(model.max_model_len)
    config = msgspec.structs.replace(config, block_size=runner.block_size)
    on_cuda = runner.device.type == "cuda"
    cuda_graphs = on_cuda if config.enable_cuda_graph is None else config.enable_cuda_graph
    prefill_graphs = PrefillGraphStart(config, gate_facts(config, runner, cuda_graphs=cuda_graphs), runner)
    spare = max(prefill_graphs.spare.values(), default=0)
    sizes: tuple[int, ...] = ()
    if cuda_graphs and config.role == "decode":
        sizes = capture_sizes(config.decode_capture_sizes, config.max_num_seqs)
    if on_cuda:
        num_blocks = device_kv_blocks(
            config,
            runner.measure_device(),
            bytes_per_block=runner.kv_bytes_per_block(),
            max_model_len=model.max_model_len,
            spare_blocks=spare,
            graphs=len(sizes) * runner.backend.most_graph_plans + len(prefill_graphs.buckets),
        )
    else:
        num_blocks = kv_blocks(
            config,
            bytes_per_block=runner.kv_bytes_per_block(),
            max_model_len=model.max_model_len,
            free_bytes=free_memory_bytes(),
        )
    try:
        runner.init_kv(1 + num_blocks + spare)  # block 0, and graph scratch
    except RuntimeError as error:  # torch's way to say that the allocation failed
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"{num_blocks} KV blocks of {runner.kv_bytes_per_block()} bytes cannot be allocated; "
            "lower --num-kv-blocks or --kv-cache-memory-bytes",
        ) from error
    kv = KvCache(runner.groups, num_blocks, config.enable_prefix_caching, prefill_graphs.spare)
    captured = []
    debug_folder: Path | None = None
    on_device = runner.backend.capabilities.device_rows
    if config.cuda_graph_debug and on_device and (sizes or prefill_graphs.answer.open):
        debug_folder = Path(tempfile.mkdtemp(prefix="baton-cuda-graphs-"))
        _log.info("captured graphs are written to %s", debug_folder)
    if sizes:
        decode_graphs = runner.capture_decode_graphs(sizes, debug_folder)
        captured += [decode_graphs] if decode_graphs is not None else []
    prefill_graphs.finish(kv, debug_folder)
    if on_cuda:
        runner.warm_up()
    engine_id = secrets.token_hex(16)
    identity = agent_identity(engine_id, runner.model_fingerprint, runner.groups, config.rank)
    pool = kv_pool(identity.groups, runner.kv_layers, runner.device.type)
    agent = CacheStoreAgent(identity, pool, agent_settings(config), wake=wakeup.wake)
    address = agent.start(config.host, config.cache_store_port)
    core = EngineCore(
        config,
        runner,
        agent,
        num_blocks=num_blocks,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        kv=kv,
        embedding_size=runner.embedding_size,
        grammars=grammars,
    )
    ready = EngineReady(
        engine_id=engine_id,
        rank=config.rank,
        model_fingerprint=runner.model_fingerprint,
        dtype=runner.dtype_name,
        kv_cache_dtype=runner.groups[0].dtype,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        groups=runner.groups,
        num_blocks=num_blocks,
        cache_store_address=address,
        transports=list(agent.transports),
        attention_backend=runner.attention_backend,
        prefill_cuda_graph_init=prefill_graphs.status.value,
        torch_version=str(torch.__version__),
        load_seconds=time.monotonic() - began,
        captured=captured + prefill_graphs.captured,
        embedding_size=runner.embedding_size,
        grammars=grammars is not None,
        stats=core.stats(),
    )
    return core, ready


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # Everything is closed. Taking the interpreter, torch and gRPC apart would only delay the front, which waits.
    os._exit(exit_status)
