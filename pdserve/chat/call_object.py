"""A call written as one JSON object, such as {"name": "f", "arguments": {...}}, followed as it comes.

Members may come in any order, and others besides; the arguments' text is given out as it is. Not here: what
stands around the object (`calls`).
"""

from __future__ import annotations

import json

from pdserve.chat.json_scan import JsonScanner

MAX_NAME_CHARS = 256
MAX_HELD_CHARS = 64 << 10
"""Arguments that come before the name are held; more of them than this is no call."""


class CallObject:
    """Takes one character after the other until `done`.

    name: None until it is known. pending: the arguments' text that has come; whoever takes it empties it.
    """

    def __init__(self, arguments: str) -> None:
        self.name: str | None = None
        self.pending: list[str] = []
        self.has_arguments = False
        self._arguments = arguments
        self._scan = JsonScanner()
        self._text: list[str] = []
        self._key = ""

    @property
    def done(self) -> bool:
        return self._scan.done

    def push(self, char: str) -> bool:
        """Whether this can still be a call with `char` next; after False nothing more may be pushed."""
        scan = self._scan
        depth, before = scan.depth, scan.state
        if not scan.push(char) or (depth == 0 and char != "{"):
            return False
        if depth == 1:
            return self._member(char, before)
        if depth > 1 and self._key == self._arguments:
            return self._keep(char)
        return True

    def _member(self, char: str, before: str) -> bool:
        """A character on the level of the object's own members."""
        state = self._scan.state
        if state == "key" and before != "key":
            self._text = []
        if before == "key" or state == "key":
            return self._collect(char) and (state != "colon" or self._named())
        if before == "value" and state != "value":
            return self._begins(char)
        if before == "string" and self._key == "name":
            return self._collect(char) and (state != "after" or self._read_name())
        return True

    def _begins(self, char: str) -> bool:
        """A value's first character."""
        if self._key == "name":
            self._text = [char]
            return char == '"'
        if self._key == self._arguments:
            self.has_arguments = True
            return char == "{" and self._keep(char)
        return True

    def _named(self) -> bool:
        key = str(json.loads("".join(self._text)))
        again = (key == "name" and self.name is not None) or (key == self._arguments and self.has_arguments)
        self._key = key
        return not again

    def _read_name(self) -> bool:
        self.name = str(json.loads("".join(self._text)))
        return True

    def _collect(self, char: str) -> bool:
        self._text.append(char)
        return len(self._text) <= MAX_NAME_CHARS

    def _keep(self, char: str) -> bool:
        self.pending.append(char)
        return len(self.pending) <= MAX_HELD_CHARS
