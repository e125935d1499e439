"""Step plans as bytes, for the ranks of a replica, and back. Pure.

What lives here: the format. What does not: sockets (`frames`). A rank computes and does not sample: sampling
parameters stay with the leader, and the plan that comes out has default ones.

    u8 version | i64 step | u32 seqs, zeroed pages, copies | i64 zeroed pages | i64 source, target of copies
    each sequence: u16 name bytes | u32 tokens, pages | i64 start, counter | u8 sampled
                   u32 rows evaluated, their targets (their number is all that a rank needs)
                   name | i64 tokens | i64 pages

All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from pdserve.sched.plan import EvaluateStep, SeqStep, StepPlan
from pdserve.types import SamplingParams

VERSION = 2
_HEAD = struct.Struct("<Bq3I")
_SEQ = struct.Struct("<H2I2qB")
_EVALUATE = struct.Struct("<2I")
_INT = np.dtype("<i8")


def encode_plan(plan: StepPlan) -> bytes:
    """The plan's bytes. Any numbers of 64 bits go: ranks judge sequences as the leader does."""
    parts = [
        _HEAD.pack(VERSION, plan.step_id, len(plan.seqs), len(plan.zero_pages), len(plan.copies)),
        _ints(plan.zero_pages),
        _ints(page for pair in plan.copies for page in pair),
    ]
    for seq in plan.seqs:
        name = seq.seq_id.encode()
        sizes = (len(name), len(seq.token_ids), len(seq.pages))
        parts += [
            _SEQ.pack(*sizes, seq.start, seq.sample_counter, seq.sample),
            _evaluate_bytes(seq.evaluate),
            name,
            _ints(seq.token_ids),
            _ints(seq.pages),
        ]
    return b"".join(parts)


def decode_plan(data: bytes) -> StepPlan:
    """The inverse. Raises ValueError for bytes that are no plan."""
    reader = _Reader(data)
    version, step_id, num_seqs, num_zero, num_copies = reader.take(_HEAD)
    if version != VERSION:
        raise ValueError("a step plan of another version")
    zero_pages = reader.ints(num_zero)
    copied = reader.ints(2 * num_copies)
    seqs = tuple(_seq(reader) for _ in range(num_seqs))
    reader.end()
    return StepPlan(
        step_id=step_id,
        seqs=seqs,
        zero_pages=zero_pages,
        copies=tuple(zip(copied[::2], copied[1::2], strict=True)),
    )


def _seq(reader: _Reader) -> SeqStep:
    name, num_tokens, num_pages, start, counter, sample = reader.take(_SEQ)
    num_rows, num_targets = reader.take(_EVALUATE)
    if not num_targets <= num_rows <= num_tokens:
        raise ValueError("a step plan that evaluates more rows than it has")
    return SeqStep(
        seq_id=reader.bytes(name).decode(),
        token_ids=reader.ints(num_tokens),
        pages=reader.ints(num_pages),
        start=start,
        sample=bool(sample),
        sample_counter=counter,
        sampling=SamplingParams(),
        evaluate=_evaluate(num_rows, num_targets),
    )


def _evaluate_bytes(step: EvaluateStep | None) -> bytes:
    return _EVALUATE.pack(0, 0) if step is None else _EVALUATE.pack(step.num_rows, len(step.targets))


def _evaluate(num_rows: int, num_targets: int) -> EvaluateStep | None:
    if not num_rows:
        return None
    return EvaluateStep(num_rows=num_rows, targets=(0,) * num_targets, num_top=0 if num_targets else None)


class _Reader:
    """Takes one thing after the other; every length is checked before it is used."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError("a step plan that was cut off")
        self._at += count
        return self._data[self._at - count : self._at]

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.bytes(form.size))

    def ints(self, count: int) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.bytes(_INT.itemsize * count), _INT).tolist())

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("a step plan with something behind it")


def _ints(values: Iterable[int]) -> bytes:
    return np.fromiter(values, _INT).tobytes()
