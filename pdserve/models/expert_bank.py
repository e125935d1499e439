"""The experts that a rank holds, in blocks of memory that can serve any layer: what a rebalance changes.

What lives here: which block holds which expert, spare blocks, a layer's experts under another table, and the
comparison of two tables on the same rows. What does not: bringing weights into blocks, and when tables change
(`pdserve.ranks`); deciding it (`pdserve.parallel.rebalance`). A swap moves no weight: the blocks' addresses
change places. Everything here belongs to the compute thread, between two steps, but the contents of spare
blocks that are on their way.

Legend: T tokens, C choices per token, E hidden size, G slots of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.kernels.memory import empty_weight
from pdserve.layers.moe import ExpertRows, MoE
from pdserve.layers.replicas import ReplicaMap
from pdserve.models.decoder import Decoder
from pdserve.models.sharded_experts import RankExperts, SwapExperts

CANARY_ROWS = 32
"""Rows of a step that are computed with both tables at most: a trial must not be a pause."""
Homes = Sequence[Sequence[tuple[int, float]]]
"""Of one layer: by expert, (slot, share) of every copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Room for one expert's packed weights."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Of both together."""
        return self.gate_up.nbytes + self.down.nbytes

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of its parts, in order."""
        return tuple((part.data_ptr(), part.nbytes) for part in (self.gate_up, self.down))


class Trial:
    """A layer under another table, beside the one that serves. same: None until rows have come by."""

    def __init__(self, experts: RankExperts, probes: Sequence[tuple[tuple[int, ...], RankExperts]]) -> None:
        """probes: experts with a new copy, and experts whose every row goes to it."""
        self.same: bool | None = None
        self._experts, self._probes = experts, probes

    def compare(self, serving: RankExperts, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> None:
        """Some rows as the step routes them, and one through every new copy. Bits must be equal: a row
        depends on its token and expert alone."""
        rows_TE, chosen_TC = x_TE[:CANARY_ROWS], experts_TC[:CANARY_ROWS]
        same = _agree(serving(rows_TE, chosen_TC), self._experts(rows_TE, chosen_TC))
        for experts, trial in self._probes:
            chosen_T1 = torch.tensor(experts, dtype=torch.int64)[:, None]
            row_TE = x_TE[:1].expand(len(experts), -1).contiguous()
            same = _agree(serving(row_TE, chosen_T1), trial(row_TE, chosen_T1)) and same
        self.same = same


def _agree(one: ExpertRows, other: ExpertRows) -> bool:
    """Whether every choice got the same bits, of those tokens whose rows came here both times."""
    found = [done.tokens for done in (one, other) if done.tokens is not None]
    tokens = found[0] if found else range(len(one.row_of_TC))
    rows = [
        done.row_of_TC if done.tokens is not None else done.row_of_TC[tokens.start : tokens.stop]
        for done in (one, other)
    ]
    counts = rows[0] >= 0
    if not torch.equal(counts, rows[1] >= 0):
        return False
    values = [done.rows_ME[row[counts]] for done, row in zip((one, other), rows, strict=True)]
    return torch.equal(values[0].view(torch.uint8), values[1].view(torch.uint8))


class ExpertBank:
    """All blocks of this rank. Layers are numbered as in a placement: those that have experts, in order."""

    def __init__(self, layers: Sequence[SwapExperts], tables: Sequence[Homes], slots: range) -> None:
        """tables: by layer, what the layers were built with. slots: ours."""
        self._layers, self._slots = tuple(layers), slots
        self._held = [self._built(layer.current, homes) for layer, homes in zip(layers, tables, strict=True)]
        self._free = [
            block
            for layer, homes in zip(layers, tables, strict=True)
            for block in self._empty(layer.current, homes)
        ]
        self._coming: dict[tuple[int, int], Block] = {}
        self.version = 0

    @classmethod
    def of(cls, decoder: Decoder, tables: Sequence[Homes], slots: range) -> ExpertBank:
        """Of a decoder that was built over ranks with a placement. The rest: as for the class."""
        mixtures = (layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoE))
        layers = [mixture.experts for mixture in mixtures]
        assert all(isinstance(layer, SwapExperts) for layer in layers)
        return cls([layer for layer in layers if isinstance(layer, SwapExperts)], tables, slots)

    @property
    def block_bytes(self) -> int:
        """Of one expert of one layer."""
        up, down = self._layers[0].current.gate_up, self._layers[0].current.down
        return up.row(0).nbytes + down.row(0).nbytes

    def block(self, layer: int, expert: int) -> Block:
        """Where this rank holds an expert now. Raises KeyError if it does not."""
        return self._held[layer][expert]

    def expect(self, layer: int, expert: int) -> Block:
        """A spare block for an expert to come; its contents are whoever's brings it."""
        block = self._free.pop() if self._free else self._new_block()
        self._coming[layer, expert] = block
        return block

    def drop(self, copies: Iterable[tuple[int, int]]) -> None:
        """Gives blocks back that were to be (layer, expert). Nobody writes to them any more."""
        for copy in copies:
            block = self._coming.pop(copy, None)
            if block is not None:
                self._free.append(block)

    def begin_trial(self, tables: Mapping[int, Homes], copies: Iterable[tuple[int, int, int]]) -> None:
        """From the next rows on, until `end_trial`, these layers are computed with these tables too.

        tables: by layer. copies: (layer, expert, slot) of all ranks' new copies.
        """
        new: dict[int, list[tuple[int, int]]] = {}
        for layer, expert, slot in copies:
            new.setdefault(layer, []).append((expert, slot))
        for layer, homes in tables.items():
            groups = self._joined(layer, homes)
            probes = [
                (tuple(slots), _with_map(groups, _probe_homes(homes, slots)))
                for slots in _rounds(new.get(layer, ()))
            ]
            self._layers[layer].trial = Trial(_with_map(groups, homes), probes)

    def probe(self) -> None:
        """Runs trials that no step has met on rows of their own. All ranks do it at the same point."""
        for layer in self._layers:
            if layer.trial is not None and layer.trial.same is None:
                seed = torch.Generator().manual_seed(1)
                groups = layer.current.gate_up
                x_TE = torch.randn(8, groups.num_in, generator=seed).to(groups.dtype)
                number = len(layer.current.map.slots_X)
                experts_TC = torch.arange(16).remainder_(number).view(8, 2 if number > 1 else -1)
                layer.trial.compare(layer.current, x_TE, experts_TC)

    def verdict(self) -> bool | None:
        """Whether all trials agreed; None without any, or while one has not met rows yet."""
        found = [layer.trial.same for layer in self._layers if layer.trial is not None]
        return None if not found or None in found else all(found)

    def end_trial(self) -> None:
        """No more comparisons; what was found is forgotten."""
        for layer in self._layers:
            layer.trial = None

    def install(self, tables: Mapping[int, Homes], version: int) -> None:
        """These tables serve from the next step on; blocks that they do not need are spare."""
        for layer, homes in tables.items():
            before = self._held[layer]
            self._layers[layer].current = _with_map(self._joined(layer, homes), homes)
            after = {expert: self._find(layer, expert) for expert in self._own(homes).values()}
            self._free += [block for expert, block in before.items() if expert not in after]
            self._held[layer] = after
            for expert in after:
                self._coming.pop((layer, expert), None)
        self.version = version

    def _own(self, homes: Homes) -> dict[int, int]:
        """Our slots that are in use, with their experts."""
        every = ((slot, expert) for expert, of_expert in enumerate(homes) for slot, _ in of_expert)
        return {slot: expert for slot, expert in every if slot in self._slots}

    def _built(self, experts: RankExperts, homes: Homes) -> dict[int, Block]:
        """Where a layer's experts are that no rebalance has touched."""
        first = self._slots.start
        return {
            expert: Block(gate_up=experts.gate_up.row(slot - first), down=experts.down.row(slot - first))
            for slot, expert in self._own(homes).items()
        }

    def _empty(self, experts: RankExperts, homes: Homes) -> list[Block]:
        """Weights that such a layer has in slots without an expert: room for any."""
        used, first = self._own(homes), self._slots.start
        rows = (slot - first for slot in self._slots if slot not in used)
        return [Block(gate_up=experts.gate_up.row(row), down=experts.down.row(row)) for row in rows]

    def _find(self, layer: int, expert: int) -> Block:
        held = self._held[layer].get(expert)
        return self._coming[layer, expert] if held is None else held

    def _joined(self, layer: int, homes: Homes) -> RankExperts:
        """The layer's experts with the blocks of a table in their slots, still with the present map."""
        current, slots = self._layers[layer].current, self._slots
        own = self._own(homes)
        blocks = {slot: self._find(layer, expert) for slot, expert in own.items()}
        # Nothing is routed to an empty slot: any weights will do there.
        up = [blocks[s].gate_up if s in blocks else current.gate_up.row(0) for s in slots]
        down = [blocks[s].down if s in blocks else current.down.row(0) for s in slots]
        return dataclasses.replace(
            current, gate_up=current.gate_up.scattered(up), down=current.down.scattered(down)
        )

    def _new_block(self) -> Block:
        current = self._layers[0].current
        return Block(gate_up=_like(current.gate_up), down=_like(current.down))


def _like(groups: PackedGroups) -> torch.Tensor:
    row = groups.row(0)
    return empty_weight(row.numel(), row.dtype)


def _with_map(experts: RankExperts, homes: Homes) -> RankExperts:
    return dataclasses.replace(experts, map=ReplicaMap(homes, experts.map.num_slots))


def _rounds(new: Iterable[tuple[int, int]]) -> list[dict[int, int]]:
    """(expert, slot) pairs as few maps from expert to slot: a map sends an expert to one slot."""
    rounds: list[dict[int, int]] = []
    for expert, slot in new:
        free = next((one for one in rounds if expert not in one), None)
        if free is None:
            rounds.append(free := {})
        free[expert] = slot
    return rounds


def _probe_homes(homes: Homes, slots: Mapping[int, int]) -> Homes:
    return [[(slots[e], 1.0)] if e in slots else list(h) for e, h in enumerate(homes)]
