"""Weights of experts as one tensor per layer, whatever way a file splits them.

What lives here: `Stacked`, a weight that is read from several stored tensors, and finding which make one.
What does not: files, names of other weights.

Shapes: X experts, R rows, C columns of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from pdserve.errors import ModelError


class Shaped(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first."""
        ...


T = TypeVar("T", bound=Shaped)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """What a stored tensor is of a stacked weight. expert: None if it holds all experts [X, R, C].

    part, num_parts: which of the pieces that lie below each other in an expert's rows.
    """

    name: str
    expert: int | None
    part: int
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked(Generic[T]):
    """A weight [X, R, C]. pieces: (expert or None for all, first row, tensor)."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[int | None, int, T], ...]

    def read(self, read_one: Callable[[T], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The whole weight in `dtype`, piece by piece. read_one: reads a stored tensor."""
        out_XRC = torch.empty(self.shape, dtype=dtype)
        for expert, row, tensor in self.pieces:
            rows = tensor.shape[-2]
            target = out_XRC if expert is None else out_XRC[expert : expert + 1]
            target[:, row : row + rows] = read_one(tensor)
        return out_XRC


def stack_experts(
    tensors: Mapping[str, T], part_of: Callable[[str], ExpertPart | None]
) -> dict[str, T | Stacked[T]]:
    """The tensors with those that `part_of` knows put together. Raises ModelError where some are missing."""
    whole: dict[str, T | Stacked[T]] = {}
    parts: dict[str, list[tuple[ExpertPart, T]]] = {}
    for name, tensor in tensors.items():
        part = part_of(name)
        if part is None:
            whole[name] = tensor
        else:
            parts.setdefault(part.name, []).append((part, tensor))
    for name, found in parts.items():
        if name in whole:
            raise ModelError(f"The model's files hold {name[:80]} twice: stacked and by expert.")
        whole[name] = _stack(name, found)
    return whole


def _stack(name: str, found: list[tuple[ExpertPart, T]]) -> Stacked[T]:
    by_place = {(part.expert, part.part): tensor for part, tensor in found}
    experts = _experts({part.expert for part, _ in found}, name)
    num_parts = found[0][0].num_parts
    if len(by_place) < len(found) or set(by_place) != {(e, p) for e in experts for p in range(num_parts)}:
        raise ModelError(f"The model's files lack some experts of {name[:80]}, or hold them twice.")
    first = [by_place[experts[0], p].shape for p in range(num_parts)]
    dims = 3 if experts[0] is None else 2
    same = all(by_place[e, p].shape == first[p] for e in experts for p in range(num_parts))
    if not same or any(len(s) != dims or (s[:-2], s[-1]) != (first[0][:-2], first[0][-1]) for s in first):
        raise ModelError(f"The experts of {name[:80]} have different shapes.")
    starts = [sum(s[-2] for s in first[:p]) for p in range(num_parts)]
    count = first[0][0] if experts[0] is None else len(experts)
    return Stacked(
        shape=(count, sum(s[-2] for s in first), first[0][-1]),
        pieces=tuple((e, starts[p], by_place[e, p]) for e in experts for p in range(num_parts)),
    )


def _experts(found: Iterable[int | None], name: str) -> Sequence[int | None]:
    """All of 0..X-1, or [None]."""
    numbers = set(found)
    if numbers == {None}:
        return [None]
    if numbers != set(range(len(numbers))):
        raise ModelError(f"The model's files lack some experts of {name[:80]}.")
    return sorted(n for n in numbers if n is not None)
