"""One chat answer's text into text, reasoning and tool calls: all that a router does with it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pdserve.api import ToolCallDelta
from pdserve.chat.calls import CallParser
from pdserve.chat.formats import ThinkTags, ToolFormat
from pdserve.chat.parts import Part
from pdserve.chat.reasoning import ReasoningParser
from pdserve.types import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """How the answer of one chat is read, and written: grammar, where a tool must be called.

    form, tools: of the calls looked for; None: none. think, inside: of the thoughts looked for; inside: the
    prompt ends within them.
    """

    form: ToolFormat | None = None
    tools: frozenset[str] = frozenset()
    think: ThinkTags | None = None
    inside: bool = False
    grammar: Grammar | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Texts that must be seen even where they are special tokens."""
        tags = frozenset() if self.think is None else frozenset({self.think.begin, self.think.end})
        return tags if self.form is None else tags | self.form.markers


class ChatParser:
    """Follows one answer. call_key: what its calls' ids are made of; equal keys make equal ids."""

    def __init__(self, plan: ChatPlan, call_key: str) -> None:
        self._reasoning = None if plan.think is None else ReasoningParser(plan.think, inside=plan.inside)
        self._calls: CallParser | None = None
        if plan.form is not None:
            self._calls = CallParser(plan.form, plan.tools, lambda index: call_id(call_key, index))

    def feed(self, text: str) -> Part:
        """Takes more text; returns what became certain."""
        reasoning = ""
        calls: tuple[ToolCallDelta, ...] = ()
        if self._reasoning is not None:
            text, reasoning = self._reasoning.feed(text)
        if self._calls is not None:
            text, calls = self._calls.feed(text)
        return Part(text=text, reasoning=reasoning, tool_calls=calls)

    def finish(self) -> Part:
        """What was held back, at the answer's end."""
        text, reasoning = ("", "") if self._reasoning is None else self._reasoning.finish()
        calls: tuple[ToolCallDelta, ...] = ()
        if self._calls is not None:
            more, first = self._calls.feed(text)
            rest, last = self._calls.finish()
            text, calls = more + rest, first + last
        return Part(text=text, reasoning=reasoning, tool_calls=calls)


def call_id(call_key: str, index: int) -> str:
    """The id of a call: the same whenever the same stream is made again."""
    return "call_" + hashlib.sha256(f"{call_key}\0{index}".encode()).hexdigest()[:24]
