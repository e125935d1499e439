"""GBNF, llama.cpp's EBNF, as a grammar in Lark: every character becomes a terminal of its own.

So the grammar is followed character by character, as llama.cpp does, and no lexer decides in between. The
syntax is that of llama.cpp's grammars/README.md: rules `name ::= …`, "literals", [classes], `.`, groups,
`|`, the repetitions `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`, and comments. Not here: what becomes of the Lark
(`compile`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_DEPTH = 64
"""Parentheses within parentheses."""
MAX_REPEATS = 10_000
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)|(?P<newline>\r\n?|\n)|(?P<define>::=)|(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\\r\n]|\\.)*")|(?P<klass>\[(?:[^\]\\\r\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*[0-9]{1,9}[ ]*(?:,[ ]*[0-9]{0,9}[ ]*)?\})|(?P<mark>[().|])""",
    re.VERBOSE,
)
_CHARACTER = r"(\\(?:x..|u.{4}|U.{8}|.)|[^\\])"
_SPAN = re.compile(f"{_CHARACTER}(?:-{_CHARACTER})?")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_HEX = {"x": 2, "u": 4, "U": 8}


class GbnfError(ValueError):
    """The text is not GBNF. Its message says where, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Reader:
    """Pieces of the text in order, and the Lark made of them. Newlines within parentheses mean nothing."""

    pieces: list[_Piece]
    at: int = 0
    depth: int = 0
    used: dict[str, int] = field(default_factory=dict)

    def peek(self) -> _Piece:
        while self.depth and self.pieces[self.at].kind == "newline":
            self.at += 1
        return self.pieces[self.at]

    def take(self, kind: str, text: str = "") -> str | None:
        """The next piece's text if it is of that kind, else None; it is consumed then."""
        piece = self.peek()
        if piece.kind != kind or (text and piece.text != text):
            return None
        self.at += 1
        return piece.text

    def skip_lines(self) -> None:
        while self.take("newline") is not None:
            pass

    def wrong(self, wanted: str) -> GbnfError:
        return GbnfError(f"line {self.peek().line}: {wanted} was expected here")

    # -- the grammar of grammars -------------------------------------------------------------------------

    def rules(self) -> dict[str, str]:
        """Lark expressions by rule name."""
        found: dict[str, str] = {}
        self.skip_lines()
        while self.peek().kind != "end":
            name = self.take("name")
            if name is None or self.take("define") is None:
                raise self.wrong("a rule, as in: root ::= …,")
            if name in found:
                raise GbnfError(f"the rule {name} is defined twice")
            self.skip_lines()
            found[name] = self.alternatives()
            if self.take("newline") is None and self.peek().kind != "end":
                raise self.wrong("the end of the rule")
            self.skip_lines()
        return found

    def alternatives(self) -> str:
        parts = [self.sequence()]
        while self.take("mark", "|") is not None:
            self.skip_lines()
            parts.append(self.sequence())
        return " | ".join(parts)

    def sequence(self) -> str:
        parts: list[str] = []
        while (item := self.item()) is not None:
            while (repeat := self.take("repeat")) is not None:
                item = f"({item}){_repetition(repeat)}"
            parts.append(item)
        return " ".join(parts) or '""'

    def item(self) -> str | None:
        """One element, or None at the end of a sequence."""
        line = self.peek().line
        if (text := self.take("literal")) is not None:
            return " ".join(map(_terminal, _characters(text[1:-1], line))) or '""'
        if (text := self.take("klass")) is not None:
            return _class(text[1:-1], line)
        if (name := self.take("name")) is not None:
            self.used.setdefault(name, line)
            return rule_name(name)
        if self.take("mark", ".") is not None:
            return r"/(.|\n)/"
        return self.group() if self.take("mark", "(") is not None else None

    def group(self) -> str:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise GbnfError(f"parentheses are nested deeper than {MAX_DEPTH}")
        inner = self.alternatives()
        if self.take("mark", ")") is None:
            raise self.wrong("a closing parenthesis")
        self.depth -= 1
        return f"({inner})"


def to_lark(text: str) -> str:
    """The Lark grammar of a GBNF text, in time linear in it. Raises GbnfError."""
    reader = _Reader(_pieces(text))
    rules = reader.rules()
    for name, line in reader.used.items():
        if name not in rules:
            raise GbnfError(f"line {line}: there is no rule {name}")
    if "root" not in rules:
        raise GbnfError("there is no rule root")
    lines = [f"{rule_name(name)}: {body}" for name, body in rules.items()]
    return "\n".join([f"start: {rule_name('root')}", *lines])


def rule_name(name: str) -> str:
    """A rule's name in Lark: one that no other has, as Lark tells rules from terminals by their case."""
    return "r_" + "".join(c if c.islower() or c.isdigit() else f"_{ord(c):x}_" for c in name)


def _pieces(text: str) -> list[_Piece]:
    found: list[_Piece] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise GbnfError(f"line {line}: {text[at]!r} can not stand here")
        kind = str(match.lastgroup)
        if kind != "space":
            found.append(_Piece(kind=kind, text=match.group(), line=line))
        line += kind == "newline"
        at = match.end()
    return [*found, _Piece(kind="end", text="", line=line)]


def _characters(text: str, line: int) -> list[str]:
    """The characters that a literal or class spells."""
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at] != "\\":
            found.append(text[at])
            at += 1
            continue
        char, at = _escaped(text, at + 1, line)
        found.append(char)
    return found


def _escaped(text: str, at: int, line: int) -> tuple[str, int]:
    """The character of an escape behind its backslash, and where the text goes on."""
    letter = text[at]
    if letter in _ESCAPES:
        return _ESCAPES[letter], at + 1
    end = at + 1 + _HEX.get(letter, 0)
    digits = text[at + 1 : end]
    if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(text) < end:
        raise GbnfError(f"line {line}: the escape \\{letter} is not known or not complete")
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GbnfError(f"line {line}: the escape \\{letter}{digits} is no character")
    return chr(code), end


def _terminal(char: str) -> str:
    return f"/{_spelled(char)}/"


def _spelled(char: str) -> str:
    return rf"\x{{{ord(char):X}}}"


def _class(text: str, line: int) -> str:
    """A class as a regular expression. A "-" that is escaped or stands at an edge is a character."""
    negated = text.startswith("^")
    spans = _SPAN.findall(text, int(negated))
    parts = []
    for low_text, high_text in spans:
        low = _one(low_text, line)
        high = _one(high_text, line) if high_text else low
        if high < low:
            raise GbnfError(f"line {line}: a range in a class ends before it begins")
        parts.append(_spelled(low) + (f"-{_spelled(high)}" if high_text else ""))
    if not parts:
        raise GbnfError(f"line {line}: a class has no characters")
    return f"/[{'^' if negated else ''}{''.join(parts)}]/"


def _one(text: str, line: int) -> str:
    characters = _characters(text, line)
    if len(characters) != 1:
        raise GbnfError(f"line {line}: a class has an escape that is not complete")
    return characters[0]


def _repetition(text: str) -> str:
    """A repetition in Lark. Raises GbnfError for one that is too large or backwards."""
    if text[0] != "{":
        return text
    low_text, comma, high_text = text[1:-1].replace(" ", "").partition(",")
    low = int(low_text)
    high = int(high_text) if high_text else low
    if max(low, high) > MAX_REPEATS or high < low:
        raise GbnfError(f"a repetition must ask for {MAX_REPEATS} times at most, the lower number first")
    return f"{{{low},{high_text}}}" if comma else f"{{{low},{low}}}"
