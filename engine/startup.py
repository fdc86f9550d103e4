"""From a configuration to a rank that can compute: model, KV pool, graphs, cache-store agent.

With several ranks all of them go through the same moves in the same order, and wait for each other where the next move
has operations that all of them take part in.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from cache_store.agent import CacheStoreAgent
from cache_store.tiers.store import TierStore
from engine import transfer
from engine.config import EngineConfig
from engine.core import EngineCore, Runner, Wakeup
from engine.device import device_title
from engine.grammar.compiling import CACHE_BYTES, GrammarWorkers
from engine.kv_cache.cache import KvCache
from engine.loader.errors import ModelLoadError
from engine.memory import device_kv_blocks, free_memory_bytes, kv_blocks
from engine.messages import CapturedGraphs, EngineReady, RankFacts
from engine.parallel.communicator import Communicator, single
from engine.runner.decode_status import capture_sizes
from engine.runner.model_runner import ModelRunner
from engine.runner.prefill_graph.startup import PrefillGraphStart, gate_facts
from engine.tiers import open_tiers
from rpc.errors import BatonError, ErrorCode
from rpc.faults import fault

if TYPE_CHECKING:
    from engine.parallel.agents import RankAgents
    from engine.parallel.hub import Hub
    from engine.parallel.tiers import RankTiers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank that can compute. Its agent has been started."""

    config: EngineConfig  # with the block size that was chosen
    runner: ModelRunner
    kv: KvCache
    num_blocks: int
    prefill_graphs: PrefillGraphStart
    captured: list[CapturedGraphs]
    agent: CacheStoreAgent
    tiers: TierStore | None
    address: str
    began: float


def load_model(config: EngineConfig, communicator: Communicator) -> ModelRunner:
    """Reads this rank's share of the weights, without waiting for other ranks. Raises INVALID_PARAMS."""
    fault("engine.load", rank=config.rank)
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        return ModelRunner(
            Path(config.model),
            config.dtype,
            config.block_size,
            config.max_model_len or None,
            config.load_format,
            config.attention_backend,
            config.device,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            communicator,
        )
    except ModelLoadError as error:
        raise BatonError(ErrorCode.INVALID_PARAMS, f"--model {config.model}: {error}") from error


def finish_rank(
    config: EngineConfig, runner: ModelRunner, engine_id: str, wake: Callable[[], None], began: float
) -> LoadedRank:
    """Makes the KV pool, captures graphs and starts the agent. Every rank of an engine does this at the same time.

    Raises BatonError that names the flag to change.
    """
    model = runner.config
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
            free_bytes=free_memory_bytes() // config.tensor_parallel_size,  # the ranks share it
        )
    num_blocks = runner.agreed_blocks(num_blocks)
    shared = transfer.shared_layers(config, runner.device.type)
    try:
        runner.init_kv(1 + num_blocks + spare, shared.zeros if shared is not None else None)  # block 0, graph scratch
    except (RuntimeError, OSError) as error:  # RuntimeError: torch's way to say that the allocation failed
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
    identity = transfer.agent_identity(
        engine_id, runner.model_fingerprint, runner.groups, config.rank, config.tensor_parallel_size
    )
    pool = transfer.kv_pool(identity.groups, runner.kv_layers, runner.device.type, shared)
    # Before anybody is told an address: what cannot be opened is a reason not to start.
    tiers = open_tiers(config, identity, pool, kv, runner.numerics, wake)
    agent = CacheStoreAgent(identity, pool, transfer.agent_settings(config), wake=wake)
    port = config.cache_store_port + config.rank if config.cache_store_port else 0
    address = agent.start(config.host, port)
    captured += prefill_graphs.captured
    return LoadedRank(config, runner, kv, num_blocks, prefill_graphs, captured, agent, tiers, address, began)


def start_core(
    config: EngineConfig, wakeup: Wakeup, hub: Hub | None = None, meeting: str = ""
) -> tuple[EngineCore, EngineReady]:
    """Loads the model, makes the KV pool and starts the cache-store agent: an engine of one rank, or rank 0 of several.

    hub: to the other ranks, which have been started; meeting: the file in which they find each other, see
    `communicator.connect`. Raises BatonError that names the flag to change, and RankLost.
    """
    began = time.monotonic()
    engine_id = secrets.token_hex(16)
    communicator = single()
    if hub is not None:
        from engine.parallel.leader import connect_ranks

        communicator = connect_ranks(config, hub, meeting, engine_id)
    runner = load_model(config, communicator)
    grammars: GrammarWorkers | None = None
    if config.grammars:
        from rpc.grammar_compiler import GrammarCompiler

        compiler = GrammarCompiler.load(
            Path(config.model),
            vocab_size=runner.config.vocab_size,
            stop_token_ids=sorted(runner.config.eos_token_ids),
            cache_bytes=CACHE_BYTES,
        )
        grammars = GrammarWorkers(compiler, wakeup.wake)
    if hub is not None:
        from engine.parallel.leader import LOADED, start_deadline
        from engine.parallel.messages import LoadedWeights

        weights = LoadedWeights(runner.model_fingerprint, runner.model.weights_files)
        hub.meet(LOADED, start_deadline(config), weights)
    rank = finish_rank(config, runner, engine_id, wakeup.wake, began)
    core = make_core(rank, grammars, hub)
    ready = engine_ready(rank, engine_id, core, hub)
    communicator.begin_serving()
    return core, ready


def make_core(rank: LoadedRank, grammars: GrammarWorkers | None, hub: Hub | None) -> EngineCore:
    """The core over a rank; over all of them with a hub."""
    runner: Runner = rank.runner
    agent: CacheStoreAgent | RankAgents = rank.agent
    tiers: TierStore | RankTiers | None = rank.tiers
    if hub is not None:
        from engine.parallel.agents import RankAgents
        from engine.parallel.leader import LeadingRunner

        runner, agent = LeadingRunner(rank.runner, hub), RankAgents(rank.agent, hub)
        if rank.tiers is not None:
            from engine.parallel.tiers import RankTiers

            tag = rank.kv.groups[0].tag
            hub.watch_given(rank.kv.record_given(tag), rank.kv.versions(tag))
            tiers = RankTiers(rank.tiers, rank.kv.versions(tag), hub)
    model = rank.runner.config
    return EngineCore(
        rank.config,
        runner,
        agent,
        num_blocks=rank.num_blocks,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        kv=rank.kv,
        embedding_size=rank.runner.embedding_size,
        grammars=grammars,
        hub=hub,
        tiers=tiers,
    )


def engine_ready(rank: LoadedRank, engine_id: str, core: EngineCore, hub: Hub | None) -> EngineReady:
    """What the engine says about itself, once every rank can compute."""
    config, runner = rank.config, rank.runner
    model = runner.config
    load_seconds = time.monotonic() - rank.began
    own = (os.getpid(), rank.address, load_seconds, runner.read_bytes, rank.captured, device_title(runner.device))
    facts = [RankFacts(0, *own)]
    if hub is not None:
        facts += hub.ready(config.start_deadline_ns / 1e9)
    return EngineReady(
        engine_id=engine_id,
        rank=config.rank,
        model_fingerprint=runner.model_fingerprint,
        dtype=runner.dtype_name,
        kv_cache_dtype=runner.groups[0].dtype,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        groups=runner.groups,
        num_blocks=rank.num_blocks,
        cache_store_address=rank.address,
        transports=list(rank.agent.transports),
        attention_backend=runner.attention_backend,
        prefill_cuda_graph_init=rank.prefill_graphs.status.value,
        torch_version=str(torch.__version__),
        load_seconds=max(fact.load_seconds for fact in facts),
        captured=rank.captured,
        embedding_size=runner.embedding_size,
        grammars=core.scheduler.grammars is not None,
        ranks=facts,
        stats=core.stats(),
    )
