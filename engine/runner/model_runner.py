"""One rank's model, its KV pool, and the step that runs a batch through them.

With several ranks, rank 0 executes a step and the others follow it: all run the same forward, each over its own part,
and the sums and gathers in it bind them together. Which ones there are depends on the batch alone, never on what a rank
finds in its numbers. Rank 0 samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.backend import BatchLimits
from engine.attention.selection import select_backend
from engine.device import resolve_device
from engine.grammar.filling import MaskFilling
from engine.layers.maker import HostMaker, LayerMaker
from engine.layers.override import Override, override_of
from engine.loader.fingerprint import model_fingerprint
from engine.memory import DeviceMemory
from engine.messages import CapturedGraphs, KvGroupInfo, PromptLogprob, SamplingParams
from engine.models.config import load_config, resolve_dtype
from engine.models.families import load_model
from engine.models.step import ForwardStep, LastTokens
from engine.numerics import numerics_of
from engine.parallel.communicator import Communicator, single
from engine.parallel.shards import shard_of
from engine.runner.batch import BatchRow, PrefillReplay, RowResult, StepBatch, StepResult
from engine.runner.decode_status import DecodeGraphStatus
from engine.runner.graph_session import CaptureSession
from engine.runner.inputs import StepInputs, asks_for_lasts, build_inputs, check_batch
from engine.runner.position_ids import position_ids_of
from engine.runner.prefill_graph.decision import Decision
from engine.sampling import SamplingRow, prompt_logprobs, sample
from kernels.cpu import library
from kernels.cpu.memory import huge_zeros
from rpc.errors import BatonError, ErrorCode
from rpc.graph_status import PrefillGraphStatus

if TYPE_CHECKING:
    from engine.graph_settings import PrefillGraphSettings
    from engine.kv_cache.cache import KvCache
    from engine.runner.capture import Recorder
    from engine.runner.device_steps import DeviceSteps
    from engine.runner.prefill_graph.runner import PrefillGraphRunner
    from engine.runner.prefill_graph.scratch import ScratchBlocks

FULL_GROUP = "full"  # tag of the one cache group of today's models
_FEWEST_OTHERS = 32  # tokens besides the last ones from which the last layer leaves them out
_PROMPT_LOGPROB_ROWS = 64  # logits made at a time for prompt log-probabilities, to bound their memory
# Stands in the rows of a rank that follows, where rank 0 has what it samples by
_ELSEWHERE = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, (), (), ())


class ModelRunner:
    """Loads a model folder and runs steps. Not thread-safe; one per engine process.

    Raises ModelLoadError (a ValueError) from the constructor when the folder cannot be served.
    """

    def __init__(
        self,
        model_folder: Path,
        dtype: str,
        block_size: int,
        max_model_len: int | None = None,
        load_format: str = "auto",
        attention_backend: str = "auto",
        device: str = "cpu",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        communicator: Communicator | None = None,
    ) -> None:
        """dtype: auto, float32, bfloat16. block_size: tokens; 0: 64 on CUDA, 16 on the CPU. load_format: auto,
        safetensors, dummy. device: auto, cpu, cuda. max_num_seqs, max_num_batched_tokens: rows and tokens of the
        largest step, for which a device's buffers are made. communicator: to the other ranks of the model, which are
        made with the same arguments; it is its maker's to close.
        """
        folder = Path(model_folder)
        self.communicator = communicator = communicator or single()
        self.device = resolve_device(device)
        self._free_at_start = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        library.set_threads(torch.get_num_threads())
        self.config = load_config(folder, max_model_len)
        self.dtype_name = resolve_dtype(dtype, self.config)
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.block_size = block_size = block_size or (64 if self.device.type == "cuda" else 16)
        self.shard = shard_of(self.config, communicator.rank, communicator.size)
        own = self.shard.local(self.config)  # with the heads of this rank
        max_blocks = -(-self.config.max_model_len // block_size)
        self.limits = BatchLimits(max_num_seqs, max_num_batched_tokens, max_blocks)
        self.backend = select_backend(
            attention_backend, own, block_size, self.dtype, device=self.device, limits=self.limits
        )
        with torch.inference_mode():
            self.model = load_model(folder, self.config, self.dtype, load_format, self._maker(), communicator)
        # Rank 0 finds it for all; the others are told
        self.model_fingerprint = (
            model_fingerprint(self.config, self.model.weights_digest) if communicator.rank == 0 else ""
        )
        self.groups = [
            KvGroupInfo(
                tag=FULL_GROUP,
                num_layers=self.config.num_layers,
                num_kv_heads=own.num_kv_heads,
                head_dim=own.head_dim,
                block_size=block_size,
                dtype=self.dtype_name,
                total_kv_heads=self.config.num_kv_heads,
            )
        ]
        self.kv_layers: dict[str, list[torch.Tensor]] = {FULL_GROUP: []}
        self._bound: list[Any] = []  # the backend's handles of kv_layers
        self.num_blocks = 0
        self.device_steps: DeviceSteps | None = None  # runs the steps where the backend reads its rows on the device
        self._masks = MaskFilling()  # of grammars; on a device, the sampler makes them
        self.session = CaptureSession()
        self.prefill_init = Decision(PrefillGraphStatus.NOT_REQUESTED)  # about every prompt while there are no graphs
        self.decode_init = DecodeGraphStatus.NOT_REQUESTED  # of every decode step without device_steps

    def _maker(self) -> LayerMaker:
        """Fused layers for a device; on the CPU too, in Triton's interpreter, with a backend that has no other way."""
        if not self.backend.capabilities.device_rows:
            return HostMaker(self.dtype)
        from engine.layers.device import DeviceMaker

        return DeviceMaker(self.dtype, self.device)

    @property
    def attention_backend(self) -> str:
        """Name of the backend in use."""
        return self.backend.name

    @property
    def numerics(self) -> str:
        """See `numerics_of`."""
        return numerics_of(self.device, self.backend.name)

    @property
    def embedding_size(self) -> int:
        """Numbers of a row that may stand in place of a token's embedding; 0: the model takes none."""
        return self.config.hidden_size if self.model.takes_embeddings else 0

    @property
    def read_bytes(self) -> int:
        """Of the checkpoint's tensors, by this rank; 0 for random weights."""
        return self.model.read_bytes

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block over all layers of all groups, on this rank."""
        elements = sum(g.num_layers * 2 * g.num_kv_heads * g.block_size * g.head_dim for g in self.groups)
        return elements * self.dtype.itemsize

    def init_kv(
        self,
        num_blocks: int,
        host_memory: Callable[[str, Sequence[int], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        """Allocate the pool, zeroed: per layer [num_blocks, 2, num_kv_heads, block_size, head_dim].

        host_memory: gives the next layer of a group on the CPU, zeroed and contiguous, by tag, shape and dtype; without
        it the memory is this process's own.

        Every rank has as many blocks, and in each this rank's heads of the same tokens (`agreed_blocks`). Block 0 is
        reserved: padding may point to it, a request never does.
        """
        if num_blocks < 2:
            raise ValueError(f"a KV pool needs at least 2 blocks, one of them reserved; got {num_blocks}")
        group = self.groups[0]
        shape = (num_blocks, 2, group.num_kv_heads, group.block_size, group.head_dim)

        def layer() -> torch.Tensor:
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=self.dtype, device=self.device)
            return host_memory(group.tag, shape, self.dtype) if host_memory else huge_zeros(shape, self.dtype)

        self.kv_layers[FULL_GROUP] = [layer() for _ in range(group.num_layers)]
        self._bound = [self.backend.bind(pool) for pool in self.kv_layers[FULL_GROUP]]
        self.num_blocks = num_blocks
        if self.backend.capabilities.device_rows:
            self.device_steps = self._make_device_steps()

    def agreed_blocks(self, num_blocks: int) -> int:
        """What every rank has room for, when this one has room for `num_blocks`. Called by all of them."""
        return self.communicator.all_min(num_blocks)

    @torch.inference_mode()
    def measure_device(self) -> DeviceMemory:
        """What the KV pool has to leave: runs the largest step once, with a pool that is dropped again."""
        cuda = torch.cuda
        self.init_kv(2)
        assert self.device_steps is not None
        cuda.synchronize(self.device)
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(self.device)
        before = cuda.memory_allocated(self.device)
        self.device_steps.run_largest()
        cuda.synchronize(self.device)
        peak = cuda.max_memory_allocated(self.device) - before
        cuda.empty_cache()
        free, total = cuda.mem_get_info(self.device)
        self.kv_layers[FULL_GROUP], self._bound, self.device_steps, self.num_blocks = [], [], None, 0
        return DeviceMemory(total, free, max(0, self._free_at_start - free), peak)

    @torch.inference_mode()
    def capture_decode_graphs(self, sizes: Sequence[int], debug_folder: Path | None = None) -> CapturedGraphs | None:
        """Decode steps of up to so many rows run as graphs from now on. None: they stay eager, and the log says why.

        Raises GRAPH_CAPTURE_DIRTY for a failure after the first capture began.
        """
        if self.device_steps is None:
            self.decode_init = DecodeGraphStatus.UNSUPPORTED_BACKEND
            return None
        return self.device_steps.capture_decode_graphs(sizes, self.session, debug_folder)

    def _make_device_steps(self) -> DeviceSteps:
        from engine.runner.device_steps import DeviceSteps

        return DeviceSteps(
            self.model,
            self.backend,
            self._bound,
            self.limits,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            vocab_size=self.config.vocab_size,
            device=self.device,
            group_tags=tuple(group.tag for group in self.groups),
            communicator=self.communicator,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles what steps on a device need, before the first request does."""
        if self.device_steps is not None:
            self.wipe(FULL_GROUP, self.device_steps.warm_up())
            self.communicator.wait_device()

    def set_prefill_status(self, init: Decision) -> None:
        """What is told about every prompt while there are no prefill graphs."""
        self.prefill_init = init
        if self.device_steps is not None:
            self.device_steps.prefill_init = init

    @torch.inference_mode()
    def capture_prefill_graphs(
        self,
        kv: KvCache,
        buckets: Sequence[int],
        settings: PrefillGraphSettings,
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
        recorder: Recorder | None = None,
        debug_folder: Path | None = None,
    ) -> tuple[PrefillGraphRunner | None, str]:
        """Captures the buckets and uses them from the next step on. None, and why, when that failed before a capture
        began. Raises GRAPH_CAPTURE_DIRTY when it failed later. debug_folder: where each graph is written."""
        from engine.runner.prefill_graph.runner import create_for_prefill

        steps = self.device_steps
        if steps is None:
            return None, "the attention backend does not read its rows on the device"

        def make(scratch: ScratchBlocks) -> PrefillGraphRunner:
            return steps.make_prefill_graphs(
                scratch,
                self.groups,
                self.wipe,
                buckets,
                settings,
                progress=progress,
                recorder=recorder,
                debug_folder=debug_folder,
            )

        graphs, problem = create_for_prefill(make, kv, buckets[-1], self.session)
        steps.prefill_graphs = graphs
        return graphs, problem

    def release(self) -> None:
        """Lets go of the captured graphs and their scratch blocks, before the model. A second call does nothing."""
        if self.device_steps is not None:
            self.device_steps.release()

    @torch.inference_mode()
    def execute(self, batch: StepBatch, on_layer: Callable[[str, int], None] | None = None) -> StepResult:
        """Compute the batch's tokens, write their KV and sample where asked.

        on_layer(group tag, layer) is called as soon as that layer's KV of all rows is in the pool; on a device, as soon
        as its writing has been enqueued on the current stream.
        A row whose numbers are not finite has a `failure` in its result; the others are not concerned. Raises
        ValueError for a batch that points outside its blocks; the pool is then untouched.

        With several ranks, rank 0 executes, and every other one follows the same batch. `check` has to come before the
        others are told of the step, and what `failed_blocks` says of the results has to be wiped on them; whatever this
        raises leaves the ranks out of step, and CollectiveFailed says that another one is gone.
        """
        begin = time.perf_counter()
        self.session.require_clean()
        if self.device_steps is not None:
            return self._execute_on_device(self.device_steps, batch, on_layer, begin)
        inputs = build_inputs(batch, self.device, self.config.rope.axes)
        filling = self._masks.begin(batch.rows)
        try:
            lasts = self._lasts(batch, inputs)
            hidden = self.forward(batch, inputs, on_layer, lasts)
            logits = None
            if inputs.sampled_rows:
                logits = self.model.logits(_sampled(hidden, inputs, lasts))
        finally:
            if filling is not None:
                filling.result()
        forwarded = time.perf_counter()
        results = [RowResult() for _ in batch.rows]
        if logits is not None:
            wanted = [row.sampling for row in batch.rows if row.sampling is not None]
            tokens = sample(logits, wanted)
            for index, token in zip(inputs.sampled_rows, tokens, strict=True):
                results[index].token_id = token.token_id
                results[index].failure = token.failure
                results[index].logprob = token.logprob
                results[index].top_logprobs = token.top_logprobs
        self._check_chunks(batch, inputs, hidden, lasts, results)
        self._wipe_failed(batch, results)
        self._add_prompt_logprobs(batch, inputs.first_token, hidden, results)
        return StepResult(
            results,
            forwarded - begin,
            time.perf_counter() - forwarded,
            prefill_status=self.prefill_init.status,
            prefill_detail=self.prefill_init.detail,
            decode_status=self.decode_init.value,
        )

    def check(self, batch: StepBatch) -> None:
        """Raises ValueError for a batch that `execute` would refuse."""
        position_ids_of(batch.rows, self.config.rope.axes)
        if self.device_steps is None:
            check_batch(batch, self.block_size, self.num_blocks)
        else:
            self.device_steps.inputs.check(batch)

    @torch.inference_mode()
    def follow(self, batch: StepBatch, on_layer: Callable[[str, int], None] | None = None) -> None:
        """This rank's part of a step that rank 0 executes; every rank but the first. Nothing is sampled here.

        batch: as rank 0 has it, but for `sampling`, which nobody reads here. on_layer: see `execute`. Returns when the
        step is done. Raises CollectiveFailed when another rank is gone.
        """
        self.session.require_clean()
        for row in batch.rows:
            row.sampling = _ELSEWHERE if row.sample else None
        if self.device_steps is not None:
            hidden, first_token = self.device_steps.follow(batch, self._layer_hook(on_layer))
        else:
            inputs = build_inputs(batch, self.device, self.config.rope.axes)
            lasts = self._lasts(batch, inputs)
            hidden, first_token = self.forward(batch, inputs, on_layer, lasts), inputs.first_token
            if inputs.sampled_rows:
                self.model.logits(_sampled(hidden, inputs, lasts))
        for row, first in zip(batch.rows, first_token, strict=True):
            if row.prompt_logprobs_from >= 0:
                assert hidden is not None  # a decode graph takes no such rows
                for _ in self._prompt_logits(row, hidden[first : first + len(row.token_ids)]):
                    pass  # rank 0 has them
        self.communicator.wait_device()

    @staticmethod
    def _layer_hook(on_layer: Callable[[str, int], None] | None) -> Callable[[int], None] | None:
        return None if on_layer is None else lambda layer: on_layer(FULL_GROUP, layer)

    def _execute_on_device(
        self, steps: DeviceSteps, batch: StepBatch, on_layer: Callable[[str, int], None] | None, begin: float
    ) -> StepResult:
        launched = steps.launch(batch, self._layer_hook(on_layer))
        if self.communicator.size > 1:
            self.communicator.wait_device()
        results = steps.finish(batch, launched)
        forwarded = time.perf_counter()
        self._wipe_failed(batch, results)
        if any(row.prompt_logprobs_from >= 0 for row in batch.rows):
            hidden = launched.hidden()
            assert hidden is not None  # a decode graph takes no such rows
            self._add_prompt_logprobs(batch, launched.first_token, hidden, results)
        prefill, replayed = launched.prefill, launched.replayed
        return StepResult(
            results,
            forwarded - begin,
            time.perf_counter() - forwarded,
            prefill_status=prefill.status,
            prefill_detail=prefill.detail,
            replay=None if replayed is None else PrefillReplay(prefill.bucket, replayed.hidden.shape[0]),
            decode_status=launched.decision.status.value,
            decode_graph_rows=launched.decision.size,
        )

    def _wipe_failed(self, batch: StepBatch, results: Sequence[RowResult]) -> None:
        for group, blocks in self.failed_blocks(batch, results):
            self.wipe(group, blocks)

    def failed_blocks(self, batch: StepBatch, results: Sequence[RowResult]) -> list[tuple[str, list[int]]]:
        """What failed rows wrote, which may hold NaN: group tags and blocks. `execute` has wiped them on its rank."""
        size = self.block_size
        return [
            (FULL_GROUP, row.block_table[row.start // size : -(-(row.start + len(row.token_ids)) // size)])
            for row, result in zip(batch.rows, results, strict=True)
            if result.failure is not None
        ]

    def _add_prompt_logprobs(
        self, batch: StepBatch, first_token: Sequence[int], hidden: torch.Tensor, results: Sequence[RowResult]
    ) -> None:
        """hidden: [tokens, hidden] of the batch."""
        for row, result, first in zip(batch.rows, results, first_token, strict=True):
            if row.prompt_logprobs_from < 0:
                continue
            own = hidden[first : first + len(row.token_ids)]
            if result.failure is None:
                result.prompt_logprobs = self._prompt_logprobs(row, own)
            elif self.communicator.size > 1:
                for _ in self._prompt_logits(row, own):
                    pass  # the other ranks do not know of the failure, and take part

    def forward(
        self,
        batch: StepBatch,
        inputs: StepInputs,
        on_layer: Callable[[str, int], None] | None = None,
        lasts: LastTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of the batch, before the final norm; with `lasts` theirs, [rows, hidden].
        KV is written on the way."""
        check_batch(batch, self.block_size, self.num_blocks)
        cos, sin = self.model.rotary.angles(inputs.positions)
        step = ForwardStep(
            backend=self.backend,
            plan=self.backend.plan(inputs.rows),
            pools=self._bound,
            cos=cos,
            sin=sin,
            slots=None,
            on_layer=self._layer_hook(on_layer),
            lasts=lasts,
            override=self._override(batch, inputs) if any(row.embeddings for row in batch.rows) else None,
        )
        return self.model.forward(inputs.token_ids, step).hidden()

    def _lasts(self, batch: StepBatch, inputs: StepInputs) -> LastTokens | None:
        if not asks_for_lasts(batch, _FEWEST_OTHERS):
            return None
        return LastTokens(torch.tensor(inputs.rows.lengths).cumsum(0) - 1, self.backend.plan_lasts(inputs.rows))

    def _override(self, batch: StepBatch, inputs: StepInputs) -> Override | None:
        placed = [(first, row.embeddings) for first, row in zip(inputs.first_token, batch.rows, strict=True)]
        return override_of(placed, len(inputs.token_ids), self.config.hidden_size, self.device)

    @staticmethod
    def _check_chunks(
        batch: StepBatch,
        inputs: StepInputs,
        hidden: torch.Tensor,
        lasts: LastTokens | None,
        results: Sequence[RowResult],
    ) -> None:
        """Fails the rows without logits whose last hidden state is not finite.

        Every token of a chunk reaches its last one through attention, so KV that is not finite shows there, before
        its blocks enter the prefix cache. hidden: [tokens, hidden], or [rows, hidden] with `lasts`.
        """
        chunks = [i for i, row in enumerate(batch.rows) if not row.sample]
        if not chunks:
            return
        if lasts is None:
            hidden = hidden[[inputs.first_token[i] + len(batch.rows[i].token_ids) - 1 for i in chunks]]
        else:
            hidden = hidden[chunks]
        finite = torch.isfinite(hidden).all(dim=-1).tolist()
        for i, usable in zip(chunks, finite, strict=True):
            if not usable:
                results[i].failure = BatonError(
                    ErrorCode.EXECUTION_EXCEPTION,
                    "the model's hidden states are not finite; send the request again",
                    metadata={"cause": "hidden_states_not_finite"},
                )

    @torch.inference_mode()
    def wipe(self, group: str, blocks: Sequence[int]) -> None:
        """Zeroes blocks that may hold NaN. Attention masks the free slots of a block by their scores, and NaN is
        stronger than any mask: left there, it would reach the next request that gets the block."""
        if blocks:
            places = torch.tensor(list(blocks), device=self.device)
            for pool in self.kv_layers[group]:
                pool.index_fill_(0, places, 0)

    def _prompt_logprobs(self, row: BatchRow, hidden: torch.Tensor) -> list[PromptLogprob]:
        """Log-probabilities of the prompt tokens after this row's. hidden: [tokens of the row, hidden]."""
        found: list[PromptLogprob] = []
        for begin, logits in self._prompt_logits(row, hidden):
            next_ids = list(row.prompt_next_ids[begin : begin + len(logits)])
            found += prompt_logprobs(logits, next_ids, row.start + 1 + begin, row.num_prompt_logprobs)
        return found

    def _prompt_logits(self, row: BatchRow, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of the row's tokens whose next one's log-probability is wanted, some at a time: index of the first,
        float32 [some, vocab]. How many times depends on the row alone. hidden: [tokens of the row, hidden]."""
        last = min(len(row.prompt_next_ids), len(row.token_ids))
        for begin in range(max(0, row.prompt_logprobs_from - (row.start + 1)), last, _PROMPT_LOGPROB_ROWS):
            logits = self.model.logits(hidden[begin : min(begin + _PROMPT_LOGPROB_ROWS, last)])
            if self.communicator.size > 1:
                self.communicator.wait_device()
            yield begin, logits


def _sampled(hidden: torch.Tensor, inputs: StepInputs, lasts: LastTokens | None) -> torch.Tensor:
    """[sampled rows, hidden] out of [tokens, hidden], or out of the [rows, hidden] of `lasts`."""
    if lasts is not None:
        return hidden if len(inputs.sampled_rows) == len(hidden) else hidden[inputs.sampled_rows]
    return hidden if inputs.sampled_tokens is None else hidden.index_select(0, inputs.sampled_tokens)
