"""Attention of the FlashInfer library, where it is installed: decode rows on tensor cores, prompts by its FA3 or FA2.

The library plans on the host how a step's rows are spread over the device. It is given what it needs there as host
arrays, so that it copies nothing back; the page lists are made on the device from the block tables. A captured graph
runs by a plan too, which therefore is made anew before each replay (`refresh`), into the graph's fixed buffers. There
the library's `fast_decode_plan` takes the place of the wrapper's `plan`: it copies no lists, since the graph begins by
making them (`begin`), and looks at no row in Python. What is left takes the host 35 us, whatever the rows, beside what
the library's C++ takes; the wrapper's takes 150 us for 64 rows and 570 us for 256.
The library's kernels are compiled at their first use, which takes minutes once per machine: at start-up, not in a step.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.backend import AttentionRows, BatchLimits, Capabilities, DeviceRows, GraphSelectionMode
from engine.attention.device_backend import DeviceBackend, StepPlan, device_rows
from kernels.attention_metadata import PagePlan, page_plan

_log = logging.getLogger(__name__)
_HEAD_DIMS = (64, 128, 256)
_LAYOUT = "HND"  # heads before tokens within a page, keys before values within a block
_QUERY_TILES = (16, 64, 128)  # query rows, of all heads of a key head, in a program that attends decode rows
_LEAST_WORKSPACE = 128 << 20
_PLAN_BYTES = 2 << 20  # of a wrapper's own integer workspace, for up to some ten thousand programs


def page_lists(kv_lens: np.ndarray, page: int, indptr: np.ndarray, last_page_len: np.ndarray) -> int:
    """Fills indptr [rows + 1] and last_page_len [rows] of rows with that many tokens; rows beyond kv_lens have none.

    Returns the number of pages.
    """
    count = len(kv_lens)
    pages = -(-kv_lens // page)
    indptr[0] = 0
    np.cumsum(pages, out=indptr[1 : count + 1])
    indptr[count + 1 :] = indptr[count]
    last_page_len[:count] = kv_lens - np.maximum(pages - 1, 0) * page
    last_page_len[count:] = 0
    return int(indptr[-1])


class _HostLists:
    """Pinned arrays that a plan is made from, free again when the copies out of them are done."""

    def __init__(self, rows: int) -> None:
        def pinned(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=True)

        self.indptr, self.last_page_len, self.starts = pinned(rows + 1), pinned(rows), pinned(rows + 1)
        self.copied = torch.cuda.Event()

    def wait(self) -> None:
        self.copied.synchronize()


@dataclass(slots=True)
class DecodePart:
    wrappers: dict[int | None, Any]  # by window


@dataclass(slots=True)
class GraphPart(DecodePart):
    """Of one decode graph."""

    rows: DeviceRows
    pages: PagePlan  # the graph's own, which `begin` fills
    indptr: torch.Tensor  # int32 [rows + 1] what a plan is made from, in host memory
    last_page_len: torch.Tensor  # int32 [rows]


@dataclass(slots=True)
class PrefillPart:
    wrappers: dict[int | None, Any]


class FlashInferBackend(DeviceBackend):
    name = "flashinfer"
    capabilities = Capabilities(cuda=True, mixed_batches=True, decode_graph=True, device_rows=True)

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        windows: Iterable[int | None],
        dtype: torch.dtype,
        *,
        device: torch.device,
        limits: BatchLimits,
    ) -> None:
        """Only where `unavailable` has no reason against it. Compiles what steps will use."""
        import flashinfer
        from flashinfer.decode import fast_decode_plan

        self._library = flashinfer
        self._plan_again = fast_decode_plan
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.block_size, self.dtype, self.device = block_size, dtype, device
        self.windows = tuple(set(windows))
        self.pages = PagePlan.allocate(limits.max_rows, limits.max_rows * limits.max_blocks, limits.max_tokens, device)
        self._workspace = torch.zeros(self._workspace_bytes(limits.max_rows), dtype=torch.uint8, device=device)
        self._decode_lists, self._prefill_lists = _HostLists(limits.max_rows), _HostLists(limits.max_rows)
        self._decode = {window: self._decode_wrapper() for window in self.windows}
        self._prefill, self.prefill_version = self._prefill_wrappers()

    @staticmethod
    def unavailable(head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
        """Why the library cannot run such a model on the device; empty where it can."""
        if importlib.util.find_spec("flashinfer") is None:
            return "needs the package flashinfer-python"
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            return "needs a CUDA device of compute capability 8.0 or later"
        if dtype is not torch.bfloat16:
            return f"needs bfloat16 (this model runs in {dtype})"
        if head_dim not in _HEAD_DIMS:
            return f"needs heads of {_HEAD_DIMS} (this model: {head_dim})"
        return ""

    def _workspace_bytes(self, rows: int) -> int:
        """For the partial results of decode rows that are cut: one tile of queries for each of the programs."""
        group = self.num_heads // self.num_kv_heads
        tile = next(tile for tile in _QUERY_TILES if group <= tile or tile == _QUERY_TILES[-1])
        tiles = -(-rows * group // tile) + rows + 512
        return max(_LEAST_WORKSPACE, self.num_heads * tiles * tile * (self.head_dim + 1) * 4 + (1 << 20))

    def _integers(self) -> torch.Tensor:
        return torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=self.device)

    def _decode_wrapper(self, pages: PagePlan | None = None) -> Any:
        """For eager steps, or for a graph that reads these lists."""
        fixed: dict[str, Any] = {}
        if pages is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": pages.page_indptr,
                "paged_kv_indices_buffer": pages.page_indices,
                "paged_kv_last_page_len_buffer": pages.last_page_len,
            }
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_tensor_cores=True, backend="fa2", **fixed
        )
        wrapper.reset_workspace_buffer(self._workspace, self._integers())
        return wrapper

    def _prefill_wrappers(self) -> tuple[dict[int | None, Any], str]:
        """Wrappers of the best version that compiles here, planned once, so that it is compiled."""
        _log.info("preparing FlashInfer's kernels; compiling them takes minutes, once per machine")
        versions = ("fa3", "fa2") if torch.cuda.get_device_capability(self.device) == (9, 0) else ("fa2",)
        one = torch.tensor([0, 1], dtype=torch.int32)
        for version in versions:
            wrappers = {}
            for window in self.windows:
                wrappers[window] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, _LAYOUT, backend=version
                )
            try:
                for window, wrapper in wrappers.items():
                    self._plan_prefill(wrapper, window, one, one, self.pages.page_indices[:1], one[1:])
            except Exception:  # the library compiles there, and raises what its tools raise
                if version == versions[-1]:
                    raise
                _log.warning("FlashInfer's %s does not compile here; using %s", version, versions[-1], exc_info=True)
            else:
                break
        for window, wrapper in self._decode.items():
            self._plan_decode(wrapper.plan, window, one, self.pages.page_indices[:1], one[1:])
        torch.cuda.synchronize(self.device)
        return wrappers, version

    # -- plans ----------------------------------------------------------------------------------------------

    def _plan_decode(
        self,
        plan: Callable[..., None],
        window: int | None,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> None:
        plan(
            indptr,
            indices,
            last_page_len,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            window_left=-1 if window is None else window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def _plan_prefill(
        self,
        wrapper: Any,
        window: int | None,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> None:
        wrapper.plan(
            starts,
            indptr,
            indices,
            last_page_len,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            causal=True,
            window_left=-1 if window is None else window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def list_rows(self, rows: AttentionRows) -> None:
        """Enqueues the page list of all rows, one after the other."""
        self._list_pages(device_rows(rows), self.pages)

    def _list_pages(self, rows: DeviceRows, out: PagePlan) -> None:
        page_plan(rows.cu_seqlens, rows.kv_lens, rows.block_tables, self.block_size, out)

    def _page_counts(self, rows: AttentionRows, indptr: torch.Tensor, last_page_len: torch.Tensor) -> int:
        """Fills what decode rows are planned from: int32 [count + 1] and [count] in host memory; rows behind those of
        the host's lists only pad. Returns the number of pages."""
        real = min(last_page_len.shape[0], rows.num_decode)
        kv_lens = np.array(rows.starts[:real], dtype=np.int32) + 1
        return page_lists(kv_lens, self.block_size, indptr.numpy(), last_page_len.numpy())

    def plan_decode(self, rows: AttentionRows, count: int) -> DecodePart:
        lists = self._decode_lists
        lists.wait()
        indptr, last_page_len = lists.indptr[: count + 1], lists.last_page_len[:count]
        pages = self._page_counts(rows, indptr, last_page_len)
        for window, wrapper in self._decode.items():
            self._plan_decode(wrapper.plan, window, indptr, self.pages.page_indices[:pages], last_page_len)
        lists.copied.record()
        return DecodePart(self._decode)

    def plan_prefill(self, rows: AttentionRows, first: int) -> PrefillPart:
        lists = self._prefill_lists
        lists.wait()
        starts, lengths = np.array(rows.starts, dtype=np.int32), np.array(rows.lengths, dtype=np.int32)
        earlier = int((-(-(starts[:first] + lengths[:first]) // self.block_size)).sum())
        count = len(lengths) - first
        indptr, last = lists.indptr[: count + 1], lists.last_page_len[:count]
        pages = page_lists(starts[first:] + lengths[first:], self.block_size, indptr.numpy(), last.numpy())
        bounds = lists.starts[: count + 1]
        bounds.numpy()[1:] = np.cumsum(lengths[first:])
        indices = self.pages.page_indices[earlier : earlier + pages]
        for window, wrapper in self._prefill.items():
            self._plan_prefill(wrapper, window, bounds, indptr, indices, last)
        lists.copied.record()
        return PrefillPart(self._prefill)

    def graph_plan(self, rows: AttentionRows, *, selection_mode: GraphSelectionMode) -> StepPlan:
        if selection_mode is not GraphSelectionMode.DECODE_GRAPH:
            return super().graph_plan(rows, selection_mode=selection_mode)
        device = device_rows(rows)
        count = device.num_rows
        pages = PagePlan.allocate(count, count * device.block_tables.shape[1], count, self.device)
        part = GraphPart(
            {window: self._decode_wrapper(pages) for window in self.windows},
            device,
            pages,
            torch.zeros(count + 1, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
        )
        used = self._page_counts(rows, part.indptr, part.last_page_len)
        for window, wrapper in part.wrappers.items():
            self._plan_decode(wrapper.plan, window, part.indptr, pages.page_indices[:used], part.last_page_len)
        return StepPlan(count, part, None)

    def begin(self, plan: StepPlan) -> None:
        part = plan.decode
        assert isinstance(part, GraphPart)
        self._list_pages(part.rows, part.pages)

    def refresh(self, plan: StepPlan, rows: AttentionRows) -> None:
        part = plan.decode
        assert isinstance(part, GraphPart)
        used = self._page_counts(rows, part.indptr, part.last_page_len)
        for window, wrapper in part.wrappers.items():
            again = functools.partial(self._plan_again, wrapper, global_override_indptr_cpu=part.indptr)
            self._plan_decode(again, window, part.indptr, part.pages.page_indices[:used], part.last_page_len)

    # -- steps ----------------------------------------------------------------------------------------------

    def attend_decode(
        self, part: DecodePart, layer: torch.Tensor, q: torch.Tensor, window: int | None, out: torch.Tensor
    ) -> None:
        part.wrappers[window].run(q, layer, out=out)

    def attend_prefill(
        self, part: PrefillPart, layer: torch.Tensor, q: torch.Tensor, window: int | None, first: int, out: torch.Tensor
    ) -> None:
        part.wrappers[window].run(q[first:], layer, out=out[first:])
