"""What becomes certain of an answer as its tokens come: text, reasoning, parts of tool calls. Data only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdserve.api import ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of an answer; false if it holds nothing. reasoning and tool_calls are no part of text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


def joined(parts: Iterable[Part]) -> Part:
    """Parts that came one after the other as one; deltas of the same call become one."""
    parts = tuple(parts)
    if len(parts) == 1:
        return parts[0]
    return Part(
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=merged(delta for part in parts for delta in part.tool_calls),
    )


def merged(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta for each call, in order."""
    first: dict[int, ToolCallDelta] = {}
    more: dict[int, list[str]] = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
        more.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(delta, arguments="".join(more[index])) for index, delta in first.items())
