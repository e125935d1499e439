"""JSON checked as it comes, one character at a time, in constant memory for each level of nesting.

Here: whether a character may come next, and where strings and containers begin and end (RFC 8259). Not here:
values; whoever wants one keeps its characters.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.json_depth import MAX_DEPTH

_SPACE = " \t\n\r"
_HEX = "0123456789abcdefABCDEF"
_ESCAPES = '"\\/bfnrtu'
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
# Numbers by state and kind of character: RFC 8259 section 6. Upper case: a number may end here.
_NUMBERS = {
    ("start", "-"): "minus", ("start", "0"): "ZERO", ("start", "1"): "INT",
    ("minus", "0"): "ZERO", ("minus", "1"): "INT",
    ("INT", "0"): "INT", ("INT", "1"): "INT",
    ("ZERO", "."): "dot", ("INT", "."): "dot", ("ZERO", "e"): "exp", ("INT", "e"): "exp",
    ("dot", "0"): "FRAC", ("dot", "1"): "FRAC", ("FRAC", "0"): "FRAC", ("FRAC", "1"): "FRAC",
    ("FRAC", "e"): "exp", ("exp", "-"): "sign", ("exp", "+"): "sign",
    ("exp", "0"): "EXP", ("exp", "1"): "EXP", ("sign", "0"): "EXP", ("sign", "1"): "EXP",
    ("EXP", "0"): "EXP", ("EXP", "1"): "EXP",
}  # fmt: skip


class JsonScanner:
    """Follows one JSON value. Once `push` has said no, or `done` is true, nothing more may be pushed.

    depth: open containers. state: what may come next; "key" and "string" within strings of either kind.
    """

    def __init__(self) -> None:
        self.state = "value"
        self.done = False
        self._open: list[str] = []
        self._escaped = ""
        self._word = ""
        self._number = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, char: str) -> bool:
        """Whether `char` may come next; if so, it has."""
        return _PUSH[self.state](self, char)

    def _value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char == '"':
            self.state = "string"
        elif char in "{[":
            return self._enter(char)
        elif char in _WORDS:
            self.state, self._word = "word", _WORDS[char]
        else:
            self.state, self._number = "number", "start"
            return self._in_number(char)
        return True

    def _enter(self, char: str) -> bool:
        self._open.append(char)
        self.state = "first_key" if char == "{" else "first_value"
        return len(self._open) <= MAX_DEPTH

    def _first_value(self, char: str) -> bool:
        return self._leave(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._leave(char) if char == "}" else self._before_key(char)

    def _before_key(self, char: str) -> bool:
        if char == '"':
            self.state = "key"
        elif char in _SPACE:
            self.state = "before_key" if self.state == "before_key" else "first_key"
        else:
            return False
        return True

    def _string(self, char: str) -> bool:
        if self._escaped:
            return self._in_escape(char)
        if char == '"':
            self._close_string()
        elif char == "\\":
            self._escaped = char
        return char >= " "

    def _close_string(self) -> None:
        if self.state == "key":
            self.state = "colon"
        else:
            self._after_value()

    def _in_escape(self, char: str) -> bool:
        if self._escaped == "\\":
            self._escaped = "u" if char == "u" else ""
            return char in _ESCAPES
        self._escaped = "" if len(self._escaped) == 4 else self._escaped + char
        return char in _HEX

    def _colon(self, char: str) -> bool:
        if char == ":":
            self.state = "value"
        return char == ":" or char in _SPACE

    def _in_word(self, char: str) -> bool:
        good, self._word = char == self._word[0], self._word[1:]
        if not self._word:
            self._after_value()
        return good

    def _in_number(self, char: str) -> bool:
        kind = "1" if char in "123456789" else "e" if char == "E" else char
        moved = _NUMBERS.get((self._number, kind))
        if moved is not None:
            self._number = moved
            return True
        if not self._number.isupper() or not self._open:
            return False
        self._after_value()
        return self._after(char)

    def _after_value(self) -> None:
        self.state = "after"
        self.done = not self._open

    def _after(self, char: str) -> bool:
        if char == ",":
            self.state = "before_key" if self._open[-1] == "{" else "value"
            return True
        return char in _SPACE or self._leave(char)

    def _leave(self, char: str) -> bool:
        if char not in "}]" or self._open[-1] != {"}": "{", "]": "["}[char]:
            return False
        self._open.pop()
        self._after_value()
        return True


_PUSH: dict[str, Callable[[JsonScanner, str], bool]] = {
    "value": JsonScanner._value,
    "first_value": JsonScanner._first_value,
    "first_key": JsonScanner._first_key,
    "before_key": JsonScanner._before_key,
    "key": JsonScanner._string,
    "string": JsonScanner._string,
    "colon": JsonScanner._colon,
    "word": JsonScanner._in_word,
    "number": JsonScanner._in_number,
    "after": JsonScanner._after,
}
