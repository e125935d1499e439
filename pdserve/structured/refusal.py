"""How a grammar is refused, and the one limit that is checked before anything else. Loads nothing heavy."""

from __future__ import annotations

from pdserve.errors import InvalidRequest
from pdserve.types import MAX_GRAMMAR_BYTES, Grammar

FIELD = "sampling.grammar"


class Refused(ValueError):
    """A grammar that can not be used, with a sentence for the user."""


def invalid(sentence: str) -> InvalidRequest:
    """The error that a request with such a grammar ends in."""
    return InvalidRequest.field(FIELD, sentence)


def check_size(grammar: Grammar) -> None:
    """Raises InvalidRequest for a text that is empty, too long or not Unicode; cheap."""
    try:
        size = len(grammar.text.encode("utf-8"))
    except UnicodeEncodeError:
        raise invalid("its text is not valid Unicode.") from None
    if not size:
        raise invalid("its text is empty.")
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(f"its text may have {MAX_GRAMMAR_BYTES} bytes at most.")
