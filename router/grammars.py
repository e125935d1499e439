"""Grammars at the edge: each is compiled for the served model before its request goes further.

What lives here: the check, and that it costs its own tenant only (`pdserve.structured.store`). What does not:
masks, which workers make. Nothing heavy is loaded before the first grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.structured.store import GrammarStore
from pdserve.tokenizer.encode import Tokenizer
from pdserve.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from pdserve.structured.compiler import Compiler

_ENTRY_BYTES = 1024
"""Only the verdict is kept."""


def dialect_of(text: str) -> GrammarKind:
    """vLLM has one field for both dialects of grammars: GBNF writes rules with ::=, Lark with a colon."""
    return GrammarKind.GBNF if "::=" in text else GrammarKind.LARK


class GrammarCheck:
    """Checks the grammars of one model. Owned by the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._store: GrammarStore[bool] | None = None
        self._compiler: Compiler | None = None

    async def check(self, tenant: str, grammar: Grammar | None) -> None:
        """Waits until the tenant's grammar is known to be good; at once where there is none.

        Raises InvalidRequest, UnsupportedFeature for a model without end tokens, or Overloaded.
        """
        if grammar is None:
            return
        if self._store is None:
            self._store = self._made()
        await self._store.get(tenant, grammar)

    def _made(self) -> GrammarStore[bool]:
        return GrammarStore(self._compile, lambda _: _ENTRY_BYTES, prepare=self._prepare)

    def _prepare(self) -> None:
        from pdserve.structured.compiler import Compiler

        compiler = Compiler(lambda: self._tokenizer)
        compiler.prepare()
        self._compiler = compiler

    def _compile(self, grammar: Grammar) -> bool:
        assert self._compiler is not None
        self._compiler(grammar)
        return True
