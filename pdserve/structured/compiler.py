"""A compiler for one model: its vocabulary, made at the first grammar, and `compile` over it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llguidance import LLTokenizer

from pdserve.structured.compile import Compiled, compile_grammar
from pdserve.structured.vocabulary import load_vocabulary
from pdserve.tokenizer.encode import Tokenizer
from pdserve.types import Grammar


class Compiler:
    """Compiles grammars for one model. May be called from several threads."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        """tokenizer: called once, at the first grammar."""
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None
        self._making = threading.Lock()

    def __call__(self, grammar: Grammar) -> Compiled:
        """Raises Refused, or UnsupportedFeature where the model can not follow a grammar."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._tokenizer())
        return compile_grammar(self._vocabulary, grammar)
