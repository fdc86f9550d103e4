"""Host tensors to a device through pinned memory: the next piece is read from the file while the last one travels."""

from __future__ import annotations

import torch

_PIECE_BYTES = 64 << 20
_PIECES = 2


class Upload:
    """Copies into tensors of a device. `out` may be read on the current stream after `copy`, without a wait."""

    def __init__(self, device: torch.device) -> None:
        """device: a CUDA device."""
        self.device = device
        self._pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_PIECES)]
        self._sent = [torch.cuda.Event() for _ in range(_PIECES)]
        self._turn = 0

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """out: contiguous, on the device, of source's shape; another dtype is converted on the host."""
        flat_source, flat_out = source.reshape(-1), out.view(-1)
        step = _PIECE_BYTES // out.element_size()
        for begin in range(0, flat_out.shape[0], step):
            end = min(begin + step, flat_out.shape[0])
            self._sent[self._turn].synchronize()
            piece = self._pieces[self._turn].view(out.dtype)[: end - begin]
            piece.copy_(flat_source[begin:end])
            flat_out[begin:end].copy_(piece, non_blocking=True)
            self._sent[self._turn].record()
            self._turn = (self._turn + 1) % _PIECES
