"""A `Group` over shared memory that those who are left can begin anew when a rank is lost.

What lives here: giving up collectives that nobody will finish, and answers as if all ranks were there. What
does not: who is lost and when all begin anew (`pdserve.ranks.survival`).

Ranks keep their numbers. A lost one gives zeros; it must have no part in what is gathered (no rows are its).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.errors import InternalError
from pdserve.parallel.group import Traffic
from pdserve.parallel.shm_group import ShmGroup


class SurvivingGroup:
    """See the module and `Group`."""

    kind = "shm"

    def __init__(self, fd: int, *, rank: int, size: int) -> None:
        """fd: of a segment for all ranks; may be closed afterwards."""
        self.rank, self.size = rank, size
        self._alive = tuple(range(size))
        self._inner = ShmGroup(fd, rank=rank, size=size)

    @property
    def traffic(self) -> Traffic:
        """Since it was last begun."""
        return self._inner.traffic

    def abort(self) -> None:
        """Collectives of all ranks that wait, and all to come, raise WorkerLost. Any thread."""
        self._inner.abort()

    def renew(self, fd: int, alive: Sequence[int]) -> None:
        """Begins anew with the ranks that are left, ours among them. fd: of a new segment for so many."""
        self._inner.close()
        self._alive = tuple(alive)
        self._inner = ShmGroup(fd, rank=self._alive.index(self.rank), size=len(alive))

    def add(self, x: torch.Tensor) -> None:
        """See Group."""
        self._inner.add(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        return self._whole(self._inner.gather(x))

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        parts = self._inner.gather_first(x)
        return None if parts is None else self._whole(parts)

    def all_to_all(self, x: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """See Group. Only while all ranks are there."""
        if len(self._alive) < self.size:
            raise InternalError("a lost rank has no part in an all-to-all")
        return self._inner.all_to_all(x, counts)

    def close(self) -> None:
        """No more calls."""
        self._inner.close()

    def _whole(self, parts: torch.Tensor) -> torch.Tensor:
        if len(self._alive) == self.size:
            return parts
        whole = parts.new_zeros(self.size, *parts.shape[1:])
        whole[list(self._alive)] = parts
        return whole
