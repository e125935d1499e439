"""Which tokens control the model, and stand-ins that let them be written where user text is plain.

The library can encode with special tokens left as text, but then for the whole string. A chat needs both: the
template's own special tokens parsed, the user's left as text. So each special token gets a stand-in, an added
token with the same rules under a random name in a private-use plane that no user can know. Text with
stand-ins, encoded with special tokens off, is cut exactly as if the special tokens stood there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, models

_PRIVATE = 0x100000  # first code point of private-use plane 16
_NONCE_CHARS = 8  # 15 random bits each: 120 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """The special tokens of a tokenizer. ids by text, and the stand-in's text and id by real id."""

    ids: dict[str, int]
    stand_in: dict[int, str]
    real_id: dict[int, int]


def special_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """The tokens marked special, by id. Tokens that are merely added (such as <think>) are text."""
    return {i: t for i, t in tokenizer.get_added_tokens_decoder().items() if t.special and t.content}


def install_stand_ins(tokenizer: Tokenizer) -> ControlTokens:
    """Turns special tokens off in `tokenizer` and adds a stand-in for each. Changes `tokenizer`."""
    found = special_tokens(tokenizer)
    nonce = "".join(chr(_PRIVATE + secrets.randbits(15)) for _ in range(_NONCE_CHARS))
    names = {i: nonce + _number(i) for i in found}
    tokenizer.encode_special_tokens = True
    tokenizer.add_tokens([_copy(found[i], names[i]) for i in found])
    added = {i: tokenizer.token_to_id(name) for i, name in names.items()}
    real = {alias: i for i, alias in added.items() if alias is not None}
    return ControlTokens(ids={t.content: i for i, t in found.items()}, stand_in=names, real_id=real)


def _number(value: int) -> str:
    """A fixed-length spelling of an id, so that no stand-in is the start of another."""
    return "".join(chr(_PRIVATE + ((value >> shift) & 0xFFF)) for shift in (24, 12, 0))


def _copy(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=False,
    )


class ControlFinder:
    """Finds special tokens in a text as the library would, at the cost of a search instead of an encoding.

    It is a tokenizer with the same added tokens and an empty vocabulary, so that nothing else comes out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._native = Tokenizer(models.BPE())
        self._native.normalizer = tokenizer.normalizer
        self._native.add_tokens([added[i] for i in sorted(added)])
        self._ids = {token.content: i for i, token in special_tokens(tokenizer).items()}

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(id, start, end) of each special token, in order; start and end are those of its own characters."""
        encoding = self._native.encode(text, add_special_tokens=False)
        for name, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            token_id = self._ids.get(name)
            if token_id is not None and (at := text.find(name, start, end)) >= 0:
                yield token_id, at, at + len(name)


def spell_out(tokenizer: Tokenizer, token_id: int) -> list[int]:
    """Ids of a token's characters, each encoded on its own, so that they can not join to the token again.

    Used where a vocabulary builds a special token out of plain letters. The model below the pre-tokenizer is
    asked, in the vocabulary's own spelling, so that no prefix space is added.
    """
    spelling = tokenizer.model.id_to_token(token_id) or ""
    return [piece.id for char in spelling for piece in tokenizer.model.tokenize(char)]
