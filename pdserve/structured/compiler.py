"""A compiler for one model: its vocabulary, made once, and `compile` over it."""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLTokenizer

from pdserve.structured.compile import Compiled, compile_grammar
from pdserve.structured.vocabulary import load_vocabulary
from pdserve.tokenizer.encode import Tokenizer
from pdserve.types import Grammar


class Compiler:
    """Compiles grammars for one model. Once prepared it may be called from several threads."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        """tokenizer: called by `prepare`."""
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None

    def prepare(self) -> None:
        """Makes the vocabulary. Raises UnsupportedFeature where the model can not follow a grammar."""
        self._vocabulary = load_vocabulary(self._tokenizer())

    def __call__(self, grammar: Grammar) -> Compiled:
        """Raises Refused."""
        assert self._vocabulary is not None
        return compile_grammar(self._vocabulary, grammar)
