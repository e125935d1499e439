"""The decoders of `tokenizers` as machines that take one token at a time.

Each step turns a stream of pieces into a stream of pieces and may hold some back until it knows what they
become. Joined, the pieces are exactly what the library's decoder makes of the whole list; `raw` is about one
token by itself, in the midst of a text. Not here: the choice of tokens (`incremental`). A decoder that no
step can follow is refused when the model is loaded.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pdserve.errors import ModelError
from pdserve.tokenizer.gguf_build import byte_alphabet

_BYTES = {char: byte for byte, char in byte_alphabet().items()}


class Step(Protocol):
    """One decoder. `push` and `finish` return pieces that will never change; `raw` changes nothing."""

    def push(self, piece: str) -> Sequence[str]: ...
    def finish(self) -> Sequence[str]: ...
    def raw(self, piece: str) -> str | bytes: ...


class _Plain:
    """A step that does to a token by itself what it does to it in a text."""

    def raw(self, piece: str) -> str:
        return piece


class ByteLevel:
    """GPT-2's byte alphabet to UTF-8; a broken sequence becomes U+FFFD once it can not be completed."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> Sequence[str]:
        return (self._utf8.decode(self.raw(piece)),)

    def finish(self) -> Sequence[str]:
        return (self._utf8.decode(b"", True),)

    def raw(self, piece: str) -> bytes:
        try:
            return bytes([_BYTES[char] for char in piece])
        except KeyError:  # an added token, spelled as itself
            return piece.encode("utf-8")


class ByteFallback:
    """Tokens such as <0xE4> to the characters their run spells; a run that is not UTF-8 becomes U+FFFDs.

    The library judges a run as a whole, so it is held until it ends.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> Sequence[str]:
        byte = _fallback_byte(piece)
        if byte is None:
            return (*self.finish(), piece)
        self._run.append(byte)
        return ()

    def finish(self) -> Sequence[str]:
        if not self._run:
            return ()
        run, self._run = bytes(self._run), bytearray()
        try:
            return (run.decode("utf-8"),)
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)

    def raw(self, piece: str) -> str | bytes:
        byte = _fallback_byte(piece)
        return piece if byte is None else bytes([byte])


def _fallback_byte(piece: str) -> int | None:
    if len(piece) != 6 or not (piece.startswith("<0x") and piece.endswith(">")):
        return None
    digits = piece[3:5]
    # The library parses with Rust's from_str_radix, which takes a leading plus sign.
    digits = digits[1:] if digits.startswith("+") else digits
    return int(digits, 16) if digits.isascii() and digits.isalnum() and _is_hex(digits) else None


def _is_hex(digits: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in digits)


class Replace:
    """Replaces a text within each piece."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def push(self, piece: str) -> Sequence[str]:
        return (self.raw(piece),)

    def finish(self) -> Sequence[str]:
        return ()

    def raw(self, piece: str) -> str:
        return piece.replace(self._pattern, self._content)


class StripEach:
    """Strips up to `left` and `right` times a character from the ends of each piece."""

    def __init__(self, content: str, left: int, right: int) -> None:
        self._content, self._left, self._right = content, left, right

    def push(self, piece: str) -> Sequence[str]:
        return (self.raw(piece),)

    def finish(self) -> Sequence[str]:
        return ()

    def raw(self, piece: str) -> str:
        start, end = 0, len(piece)
        while start < min(self._left, len(piece)) and piece[start] == self._content:
            start += 1
        while len(piece) - end < self._right and end > 0 and piece[end - 1] == self._content:
            end -= 1
        return piece[start:end]


class StripStart(_Plain):
    """Strips up to `left` times a character from the start of the whole text."""

    def __init__(self, content: str, left: int) -> None:
        self._content, self._left = content, left

    def push(self, piece: str) -> Sequence[str]:
        while self._left and piece:
            if piece[0] != self._content:
                self._left = 0
                break
            piece, self._left = piece[1:], self._left - 1
        return (piece,)

    def finish(self) -> Sequence[str]:
        return ()


class Metaspace:
    """SentencePiece's space mark to a space; dropped in the first piece where a prefix space was added."""

    def __init__(self, mark: str, drop_first: bool) -> None:
        self._mark, self._drop = mark, drop_first

    def push(self, piece: str) -> Sequence[str]:
        space, self._drop = ("" if self._drop else " "), False
        return (piece.replace(self._mark, space),)

    def finish(self) -> Sequence[str]:
        return ()

    def raw(self, piece: str) -> str:
        return piece.replace(self._mark, " ")


class JoinWithSpaces(_Plain):
    """What the library does without a decoder: tokens with a space between."""

    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> Sequence[str]:
        first, self._first = self._first, False
        return (piece,) if first else (" ", piece)

    def finish(self) -> Sequence[str]:
        return ()


def compile_decoder(spec: Mapping[str, Any] | None) -> Callable[[], list[Step]]:
    """A factory of the steps for a tokenizer.json's decoder. Raises ModelError if it is not supported."""
    if spec is None:
        return lambda: [JoinWithSpaces()]
    flat = spec.get("decoders") if spec.get("type") == "Sequence" else [spec]
    if not isinstance(flat, list) or not all(isinstance(part, dict) for part in flat):
        raise _unsupported("Sequence")
    makers: list[Callable[[], Step]] = []
    fused = False
    for part in flat:
        if part.get("type") == "Fuse":
            fused = True
            continue
        makers.append(_maker(part, fused))
        fused = fused or part.get("type") == "ByteLevel"
    return lambda: [make() for make in makers]


def _maker(part: Mapping[str, Any], fused: bool) -> Callable[[], Step]:
    kind = str(part.get("type"))
    if kind in _FUSED if fused else kind in _SINGLE:
        return (_FUSED if fused else _SINGLE)[kind](part)
    raise _unsupported(kind)


def _unsupported(kind: str) -> ModelError:
    return ModelError(f"The model's tokenizer has a decoder that is not supported ({kind[:40]!r}).")


def _replace(part: Mapping[str, Any]) -> Callable[[], Step]:
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    content = part.get("content")
    if not isinstance(text, str) or not text or not isinstance(content, str):
        raise _unsupported("Replace with a pattern")
    return lambda: Replace(text, content)


def _replace_char(part: Mapping[str, Any]) -> Callable[[], Step]:
    make = _replace(part)
    if len(part["pattern"]["String"]) != 1:  # a longer text could lie across two pieces
        raise _unsupported("Replace of several characters")
    return make


def _strip(part: Mapping[str, Any]) -> tuple[str, int, int]:
    content, left, right = part.get("content"), part.get("start", 0), part.get("stop", 0)
    if not isinstance(content, str) or len(content) != 1 or type(left) is not int or type(right) is not int:
        raise _unsupported("Strip")
    return content, left, right


def _strip_each(part: Mapping[str, Any]) -> Callable[[], Step]:
    content, left, right = _strip(part)
    return lambda: StripEach(content, left, right)


def _strip_start(part: Mapping[str, Any]) -> Callable[[], Step]:
    content, left, right = _strip(part)
    if right:
        raise _unsupported("Strip at the end")
    return lambda: StripStart(content, left)


def _metaspace(part: Mapping[str, Any]) -> Callable[[], Step]:
    mark, scheme = part.get("replacement"), part.get("prepend_scheme", "always")
    if not isinstance(mark, str) or len(mark) != 1:
        raise _unsupported("Metaspace")
    return lambda: Metaspace(mark, scheme != "never")


_SINGLE: dict[str, Callable[[Mapping[str, Any]], Callable[[], Step]]] = {
    "ByteLevel": lambda _: ByteLevel,
    "ByteFallback": lambda _: ByteFallback,
    "Replace": _replace,
    "Strip": _strip_each,
    "Metaspace": _metaspace,
}
_FUSED: dict[str, Callable[[Mapping[str, Any]], Callable[[], Step]]] = {
    "Replace": _replace_char,
    "Strip": _strip_start,
}
