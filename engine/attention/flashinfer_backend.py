"""Attention of the FlashInfer library, where it is installed: decode rows on tensor cores, prompts by its FA3 or FA2.

The library plans on the host how a step's rows are spread over the device. It is given what it needs there as host
arrays, so that it copies nothing back; the page lists are made on the device from the block tables. A captured graph
runs by a plan too, which therefore is made anew before each replay (`refreshes`), into the graph's fixed buffers.
The library's kernels are compiled at their first use, which takes minutes once per machine: at start-up, not in a step.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.backend import AttentionRows, BatchLimits, Capabilities, GraphSelectionMode
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
    lists: _HostLists


@dataclass(slots=True)
class PrefillPart:
    wrappers: dict[int | None, Any]


class FlashInferBackend(DeviceBackend):
    name = "flashinfer"
    capabilities = Capabilities(cuda=True, mixed_batches=True, decode_graph=True, device_rows=True)
    refreshes = True

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

        self._library = flashinfer
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

    def _decode_wrapper(self, rows: int = 0) -> Any:
        """For eager steps, or for a graph of that many rows."""
        fixed: dict[str, Any] = {}
        if rows:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32, device=self.device),
                "paged_kv_indices_buffer": torch.zeros_like(self.pages.page_indices),
                "paged_kv_last_page_len_buffer": torch.zeros(rows, dtype=torch.int32, device=self.device),
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
        lists = self._decode_lists
        lists.indptr[1] = lists.last_page_len[0] = 1
        for window, wrapper in self._decode.items():
            self._plan_decode(wrapper, window, 1, 1, lists)
        torch.cuda.synchronize(self.device)
        return wrappers, version

    # -- plans ----------------------------------------------------------------------------------------------

    def _plan_decode(self, wrapper: Any, window: int | None, rows: int, pages: int, lists: _HostLists) -> None:
        wrapper.plan(
            lists.indptr[: rows + 1],
            self.pages.page_indices[:pages],
            lists.last_page_len[:rows],
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

    def _list_pages(self, rows: AttentionRows) -> None:
        """Enqueues the page list of all rows, one after the other."""
        device = device_rows(rows)
        page_plan(device.cu_seqlens, device.kv_lens, device.block_tables, self.block_size, self.pages)

    def plan_decode(self, rows: AttentionRows, count: int) -> DecodePart:
        part = DecodePart(self._decode, self._decode_lists)
        self._fill_decode(part, rows, count)
        return part

    def _fill_decode(self, part: DecodePart, rows: AttentionRows, count: int) -> None:
        self._list_pages(rows)
        lists = part.lists
        lists.wait()
        real = min(count, rows.num_decode)
        kv_lens = np.array(rows.starts[:real], dtype=np.int32) + 1
        pages = page_lists(
            kv_lens, self.block_size, lists.indptr.numpy()[: count + 1], lists.last_page_len.numpy()[:count]
        )
        for window, wrapper in part.wrappers.items():
            self._plan_decode(wrapper, window, count, pages, lists)
        lists.copied.record()

    def plan_prefill(self, rows: AttentionRows, first: int) -> PrefillPart:
        self._list_pages(rows)
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
        count = device_rows(rows).num_rows
        part = DecodePart({window: self._decode_wrapper(count) for window in self.windows}, _HostLists(count))
        self._fill_decode(part, rows, count)
        return StepPlan(count, part, None)

    def refresh(self, plan: StepPlan, rows: AttentionRows) -> None:
        assert isinstance(plan.decode, DecodePart)
        self._fill_decode(plan.decode, rows, plan.num_decode)

    # -- steps ----------------------------------------------------------------------------------------------

    def attend_decode(
        self, part: DecodePart, layer: torch.Tensor, q: torch.Tensor, window: int | None, out: torch.Tensor
    ) -> None:
        part.wrappers[window].run(q, layer, out=out)

    def attend_prefill(
        self, part: PrefillPart, layer: torch.Tensor, q: torch.Tensor, window: int | None, first: int, out: torch.Tensor
    ) -> None:
        part.wrappers[window].run(q[first:], layer, out=out[first:])
