"""What a grammar may say about a row before it is sampled.

What lives here: the interface that the engine asks, and how a mask's bits lie. What does not: grammars and
how far an output has come in one (`pdserve.structured`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.sched.plan import SeqStep

Bits = npt.NDArray[np.uint32]


class TokenMasks(Protocol):
    """Which tokens may come next. Only the compute thread asks; nothing that it keeps may be needed: a
    sequence comes from anywhere (another worker's first token, a preemption) with its whole history."""

    def allowed(self, seq: SeqStep) -> Bits | None:
        """Tokens that may follow the sequence: [ceil(V / 32)], token t is bit t % 32 of word t // 32, set
        where it is allowed; None: all. Called for sampled sequences with a grammar, whose history is there.
        Raises ValueError, with a sentence for the user, where only this sequence must fail."""
        ...


def unpacked(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """A mask as one value for each token [V]. Tokens behind its end are not allowed."""
    given = np.unpackbits(bits.astype("<u4", copy=False).view(np.uint8), bitorder="little", count=vocab_size)
    return given.view(np.bool_)
