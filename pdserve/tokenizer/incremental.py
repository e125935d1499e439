"""Text of a token stream, piece by piece: what was given out never changes and adds up to the full decode.

Not here: which ids there are (`encode`), what each decoder does (`decode_steps`), stop strings (`stops`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.tokenizer.decode_steps import Step
from pdserve.tokenizer.encode import Tokenizer


class IncrementalDecoder:
    """Decodes one stream. O(1) amortised in the number of tokens; never gives out half a character.

    shown: texts of special tokens that are not skipped.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._skip_special = skip_special_tokens
        self._steps = tokenizer.new_decode_steps()

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        text = self._tokenizer.token_text(token_id)
        if text is None or self._is_hidden(text):
            return ""
        return "".join(_through([text], self._steps))

    def _is_hidden(self, text: str) -> bool:
        return self._skip_special and text not in self._shown and self._tokenizer.is_special(text)

    def finish(self) -> str:
        """The rest of the text. Nothing may be pushed afterwards."""
        pieces: list[str] = []
        for at, step in enumerate(self._steps):
            pieces.extend(_through(step.finish(), self._steps[at + 1 :]))
        return "".join(pieces)


def _through(pieces: Sequence[str], steps: Sequence[Step]) -> Sequence[str]:
    for step in steps:
        pieces = [out for piece in pieces for out in step.push(piece)]
    return pieces
