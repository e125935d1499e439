"""Which tokens may come next: how far each sequence has come in its grammar. `TokenMasks` of the engine.

What lives here: a matcher for each sequence, made again from its tokens wherever it does not fit them, and
the compiled grammars of live requests. What does not: compiling (`store`), sampling (the engine).

A step never compiles: whoever takes a request in pins its grammar first. A matcher is a cache: it follows
from grammar and completion: a first token from elsewhere, a preemption and a retry move nothing with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from pdserve.sched.plan import SeqStep
from pdserve.structured.compile import Compiled
from pdserve.structured.refusal import FIELD
from pdserve.types import Grammar

MAX_LIVE = 256
"""Sequences whose matchers are kept; more would be slower, not wrong."""
_GONE = f"{FIELD}: its request is over."
_STUCK = f"{FIELD}: it is too complex to go on with at this place of the answer; write a simpler one."
_LEFT = f"{FIELD}: the tokens so far do not conform to it."


@dataclass(slots=True, kw_only=True)
class _Progress:
    grammar: Grammar
    matcher: LLMatcher
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class _Pin:
    compiled: Compiled
    count: int = 0


class GrammarMasks:
    """pinned: the control thread's. allowed: the compute thread's."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = (vocab_size + 31) // 32
        self._pins: dict[Grammar, _Pin] = {}
        self._live: OrderedDict[str, _Progress] = OrderedDict()

    @contextmanager
    def pinned(self, grammar: Grammar, compiled: Compiled) -> Iterator[None]:
        """Sequences with that grammar can be masked meanwhile."""
        pin = self._pins.setdefault(grammar, _Pin(compiled))
        pin.count += 1
        try:
            yield
        finally:
            pin.count -= 1
            if not pin.count:
                del self._pins[grammar]

    def allowed(self, seq: SeqStep) -> npt.NDArray[np.uint32] | None:
        """See `pdserve.engine.masks.TokenMasks`. An end token is allowed where the answer may end; where it
        must, nothing else is."""
        grammar, history = seq.sampling.grammar, seq.history
        if grammar is None or history is None:
            return None
        matcher = self._advanced(seq.seq_id, grammar, history.token_ids[history.num_prompt :])
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._num_words]
        if matcher.is_error():
            self._fail(seq.seq_id, _STUCK)
        return bits

    def _advanced(self, seq_id: str, grammar: Grammar, tokens: tuple[int, ...]) -> LLMatcher:
        """The sequence's matcher behind all of its tokens."""
        live = self._live.get(seq_id)
        if live is None or live.grammar != grammar or live.tokens != tokens[: len(live.tokens)]:
            live = self._begin(seq_id, grammar)
        self._live.move_to_end(seq_id)
        new = tokens[len(live.tokens) :]
        if not live.matcher.consume_tokens(list(new)):
            self._fail(seq_id, _LEFT if "doesn't satisfy" in live.matcher.get_error() else _STUCK)
        live.tokens = tokens
        return live.matcher

    def _begin(self, seq_id: str, grammar: Grammar) -> _Progress:
        pin = self._pins.get(grammar)
        if pin is None:
            raise ValueError(_GONE)
        for over in [key for key, live in self._live.items() if live.grammar not in self._pins]:
            del self._live[over]
        while len(self._live) >= MAX_LIVE:
            self._live.popitem(last=False)
        live = self._live[seq_id] = _Progress(grammar=grammar, matcher=pin.compiled.start())
        return live

    def _fail(self, seq_id: str, sentence: str) -> None:
        self._live.pop(seq_id, None)
        raise ValueError(sentence)
