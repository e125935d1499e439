"""A worker's grammars: compiled when a request comes, held while it lives, masks for its steps.

What lives here: how vocabulary, store and masks go together in a worker. What does not: each of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pdserve.structured.compile import Compiled, size_bytes
from pdserve.structured.compiler import Compiler
from pdserve.structured.masks import GrammarMasks
from pdserve.structured.store import GrammarStore
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.encode import Tokenizer
from pdserve.types import Grammar

WORKER_COMPILE_S = 10.0
"""The router has compiled the grammar within its limit; a worker is busier."""


class WorkerGrammars:
    """All of a worker's grammars. `hold` belongs to the control thread, `masks` to the compute thread."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._bundle = bundle
        self._store: GrammarStore[Compiled] | None = None
        self.masks = GrammarMasks(bundle.vocab_size)

    async def hold(self, tenant: str, grammar: Grammar | None) -> AbstractContextManager[None]:
        """Waits until a request's grammar is compiled; its sequences can run while what comes back is
        entered. Raises as GrammarStore.get."""
        if grammar is None:
            return nullcontext()
        if self._store is None:
            compiler = Compiler(lambda: Tokenizer(self._bundle))
            self._store = GrammarStore(
                compiler, size_bytes, prepare=compiler.prepare, compile_s=WORKER_COMPILE_S
            )
        return self.masks.pinned(grammar, await self._store.get(tenant, grammar))

    def close(self) -> None:
        """Ends what waits."""
        if self._store is not None:
            self._store.close()
