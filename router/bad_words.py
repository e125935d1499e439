"""Texts that must not be made, as the token sequences that spell them.

What lives here: limits of the texts, and the two ways to spell one. What does not: sequences that clients
give themselves (`sampling`), keeping them out (`pdserve.engine`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import InvalidRequest
from router.model import ServedModel
from router.sampling import MAX_BAD_WORD_IDS, MAX_BAD_WORDS

MAX_BYTES = 256


async def spelled(model: ServedModel, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each text as it stands and after a space: most tokenisers have tokens of their own for words after one.
    Other ways to spell it stay possible. Raises InvalidRequest."""
    if len(texts) > MAX_BAD_WORDS:
        raise InvalidRequest.field("bad_words", f"may have {MAX_BAD_WORDS} texts at most.")
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        if not text or len(text.encode()) > MAX_BYTES:
            raise InvalidRequest.field("bad_words", f"each text must have 1 to {MAX_BYTES} bytes.")
        bare = text.lstrip(" ") or text
        alone = await model.encode_plain(bare, special_tokens=False)
        after_space = await model.encode_plain(" " + bare, special_tokens=False)
        found[alone] = None
        if after_space[-len(alone) :] != alone:  # else the space is a token by itself
            found[after_space] = None
    if any(not 0 < len(word) <= MAX_BAD_WORD_IDS for word in found):
        raise InvalidRequest.field("bad_words", f"each text must have 1 to {MAX_BAD_WORD_IDS} tokens.")
    return tuple(found)
