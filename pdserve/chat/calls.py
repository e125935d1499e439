"""Calls of tools in an answer, found as its text comes: what is a call, what is text, without taking back.

A machine over single characters, so that it does not matter how the text was cut. It holds back what may turn
out to be a call until the call's name is known and its arguments begin; what turns out to be none comes out
as text. Cost: constant for each character; held: no more than `MAX_HELD_CHARS`. Not here: reasoning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TypeVar

from pdserve.api import ToolCallDelta
from pdserve.chat.call_object import MAX_HELD_CHARS, MAX_NAME_CHARS, CallObject
from pdserve.chat.formats import ToolFormat
from pdserve.chat.json_scan import JsonScanner
from pdserve.chat.parts import merged
from pdserve.tokenizer.stops import StopMatcher

_SPACE = " \t\r\n"
T = TypeVar("T")
Machine = Generator[None, str, T]
"""Takes a character at each yield; "" is the end of the text."""


class _NoCall(Exception):
    """What was read is no call."""


class CallParser:
    """Splits one answer's text into text and calls. names: tools that may be called. mint: a call's id.

    A call of any other name is text, and so is one whose JSON is damaged before its arguments begin. Where
    they are damaged further on, what came of them stays a part of the call and the rest is text.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], mint: Callable[[int], str]) -> None:
        self._form, self._names, self._mint = form, names, mint
        self._queue: deque[str] = deque()
        self._raw: list[str] = []  # read of a run and not given out
        self._spaces: list[str] = []  # white space that a call may follow
        self._num_calls = 0
        self._in_call = False  # this call's name was given out, and its run goes on
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._machine = self._main()
        next(self._machine)

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Takes more of the answer. Returns the text and the parts of calls that became certain."""
        for char in text:
            self._machine.send(char)
        return self._given()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What was held back at the answer's end. Nothing may be fed afterwards."""
        with suppress(StopIteration):
            self._machine.send("")
        if not self._num_calls:
            self._content += self._spaces
        return self._given()

    def _given(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        given = "".join(self._content), merged(self._deltas)
        self._content, self._deltas = [], []
        return given

    # -- the machine -----------------------------------------------------------------------------------

    def _main(self) -> Machine[None]:
        if self._form.bare:
            with suppress(_NoCall):  # so much white space is text, like what follows
                yield from self._skip_space()
            self._spaces, self._raw = self._raw, []
            if (yield from self._peek()) == "{":
                yield from self._run()
        while (yield from self._text()):
            self._raw = [self._form.begin]
            yield from self._run()

    def _text(self) -> Machine[bool]:
        """Text up to the start of a run. False: up to the end."""
        matcher = StopMatcher([self._form.begin])
        while char := (yield from self._peek()):
            self._queue.popleft()
            text, found = matcher.feed(char)
            self._say(text)
            if found:
                return True
        self._say(matcher.finish())
        return False

    def _run(self) -> Machine[None]:
        form, self._in_call = self._form, False
        try:
            yield from self._literal(form.opening)
            yield from self._call()
            while (yield from self._either(form.more, form.end)) == form.more != "":
                yield from self._call()
            self._raw = []
        except _NoCall:
            yield from self._give_up()

    def _give_up(self) -> Machine[None]:
        """What was held is text; but of a call that the answer's end cuts off, no closing mark is."""
        if not (self._in_call and (yield from self._peek()) == ""):
            self._say("".join(self._raw))
        self._raw = []

    def _call(self) -> Machine[None]:
        self._in_call = False
        yield from (self._named() if self._form.name_end else self._object())
        self._raw = []

    def _object(self) -> Machine[None]:
        call = CallObject(self._form.arguments)
        yield from self._skip_space()
        while not call.done:
            char = yield from self._peek()
            if not char or not call.push(char):
                raise _NoCall
            self._take()
            if call.name is not None and call.pending:
                self._give(call.name, "".join(call.pending))
                call.pending.clear()
            elif len(self._raw) > MAX_HELD_CHARS:
                raise _NoCall
        if call.name is None:
            raise _NoCall
        if not call.has_arguments:
            self._give(call.name, "{}")

    def _named(self) -> Machine[None]:
        form = self._form
        for text in form.head:
            yield from self._literal(text)
        name = (yield from self._until(form.name_end)).strip()
        if form.id_mark:
            name = name.partition(form.id_mark)[0]
        for text in form.args_begin:
            yield from self._literal(text)
        yield from self._skip_space()
        if (yield from self._peek()) != "{":
            raise _NoCall
        scan = JsonScanner()
        while not scan.done:
            char = yield from self._peek()
            if not char or not scan.push(char):
                raise _NoCall
            self._take()
            self._give(name, char)
        for text in form.args_end:
            yield from self._literal(text)

    # -- reading ---------------------------------------------------------------------------------------

    def _peek(self) -> Machine[str]:
        if not self._queue:
            self._queue.append((yield))
        return self._queue[0]

    def _take(self) -> None:
        self._raw.append(self._queue.popleft())

    def _skip_space(self) -> Machine[None]:
        while (char := (yield from self._peek())) and char in _SPACE:
            if len(self._raw) > MAX_HELD_CHARS:
                raise _NoCall
            self._take()

    def _until(self, end: str) -> Machine[str]:
        """What stands before `end`, which is read too."""
        text = ""
        while not text.endswith(end):
            char = yield from self._peek()
            if not char or len(text) > MAX_NAME_CHARS:
                raise _NoCall
            self._take()
            text += char
        return text.removesuffix(end)

    def _literal(self, text: str) -> Machine[None]:
        if text and (yield from self._either(text, text)) != text:
            raise _NoCall

    def _either(self, one: str, other: str) -> Machine[str]:
        """Reads one of two texts, after white space. An empty one stands for anything else; else raises."""
        options = {one, other} - {""}
        if not options:
            return ""
        yield from self._skip_space()
        got = ""
        char = yield from self._peek()
        while char and any(option.startswith(got + char) for option in options):
            self._take()
            got += char
            if got in options:
                return got
            char = yield from self._peek()
        if char:  # the start of such a text may be the start of another run
            self._queue.extendleft(reversed(got))
            del self._raw[len(self._raw) - len(got) :]
        if one and other:
            raise _NoCall
        return ""

    # -- giving out ------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Text; white space at its end waits, as a call may follow."""
        kept = text.rstrip(_SPACE)
        if kept:
            self._content += (*self._spaces, kept)
            self._spaces = []
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])

    def _give(self, name: str, arguments: str) -> None:
        """More of a call's arguments; with its name and id if they are the first."""
        if self._in_call:
            delta = ToolCallDelta(index=self._num_calls - 1, arguments=arguments)
        elif name not in self._names:
            raise _NoCall
        else:
            delta = ToolCallDelta(
                index=self._num_calls, id=self._mint(self._num_calls), name=name, arguments=arguments
            )
            self._num_calls, self._in_call, self._spaces = self._num_calls + 1, True, []
        self._raw = []
        self._deltas.append(delta)
