"""Memory for weights on huge pages where the system has them: fewer translation misses while they stream.

Small weights share large blocks, since a huge page is 2 MiB. KV pages are not here (`kvcache.pool`).
"""

from __future__ import annotations

import threading

import torch

from pdserve.kernels.native import library

_BLOCK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_ALIGN_BYTES = 64


class _Blocks:
    """Hands out pieces of the current block; a block lives as long as one of its pieces does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        size_bytes = -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        with self._lock:
            if self._used + size_bytes > self._block.numel():
                block = _new_block(max(size_bytes, _BLOCK_BYTES))
                if size_bytes > _BLOCK_BYTES // 2:
                    return block[:size_bytes]
                self._block, self._used = block, 0
            self._used += size_bytes
            return self._block[self._used - size_bytes : self._used]


_blocks = _Blocks()


def empty_weight(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised 1-D tensor for data that is written once and then read often."""
    return _blocks.take(numel * dtype.itemsize).view(dtype)[:numel]


def _new_block(size_bytes: int) -> torch.Tensor:
    block = torch.empty(size_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    skip = -block.data_ptr() % _HUGE_PAGE_BYTES
    block = block[skip : skip + size_bytes]
    library().pds_advise_huge(block.data_ptr(), size_bytes)
    return block
