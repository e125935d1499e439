"""One chat made ready for its model: what the template is given, and how the answer will be read.

Not here: what may be asked at all (`router.validate_chat`), rendering and tokens (`pdserve.tokenizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.api import ChatMessage, GenerateInput, Tool, ToolMode
from pdserve.chat.grammar import grammar_for
from pdserve.chat.messages import spelled_out, template_messages, template_tools
from pdserve.chat.parser import ChatPlan
from pdserve.chat.profile import SWITCHES, ChatProfile
from pdserve.errors import UnsupportedFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """messages, tools, options: for `Tokenizer.encode_chat`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]


def prepare(source: GenerateInput, profile: ChatProfile) -> Prepared:
    """source: a chat that was checked. Raises UnsupportedFeature for what the model's template lacks, and
    InvalidRequest for JSON that is damaged."""
    messages = source.messages or ()
    offered = source.tools if _mode(source) is not ToolMode.NONE else ()
    if profile.form is None:
        _without_tools(messages, offered, profile.no_tools)
    thinks = source.thinking
    if thinks is False and profile.think is None:
        thinks = None  # it never does
    if thinks is not None and not profile.has_switch:
        raise UnsupportedFeature.field(
            "thinking", "the model's chat template has no such switch; leave it out."
        )
    options = {} if thinks is None else dict.fromkeys(SWITCHES, thinks)
    if profile.spelled:
        return Prepared(messages=spelled_out(messages, offered), tools=[], options=options)
    short = profile.form is not None and profile.form.name.startswith("mistral")
    return Prepared(
        messages=template_messages(messages, short_ids=short), tools=template_tools(offered), options=options
    )


def _without_tools(messages: tuple[ChatMessage, ...], offered: tuple[Tool, ...], why: str) -> None:
    if offered:
        raise UnsupportedFeature.field("tools", why)
    if any(message.tool_calls or message.role == "tool" for message in messages):
        raise UnsupportedFeature.field("chat.messages.tool_calls", why)


def plan_of(
    source: GenerateInput, profile: ChatProfile, prompt_end: str, special_ids: Mapping[str, int]
) -> ChatPlan:
    """How the answer of a chat that is `prepare`d is read. prompt_end: the text that its prompt ends with.
    Raises InvalidRequest for tools whose grammar is too large."""
    think = profile.think
    inside = think is not None and prompt_end.rstrip().endswith(think.begin)
    mode = _mode(source)
    if not source.tools or mode is ToolMode.NONE or profile.form is None:
        return ChatPlan(think=think, inside=inside)
    grammar = None
    if source.tool_choice is not None and mode is not ToolMode.AUTO:
        grammar = grammar_for(
            profile.form, source.tools, source.tool_choice, think if inside else None, special_ids
        )
    names = frozenset(tool.name for tool in source.tools)
    return ChatPlan(form=profile.form, tools=names, think=think, inside=inside, grammar=grammar)


def _mode(source: GenerateInput) -> ToolMode:
    return ToolMode.AUTO if source.tool_choice is None else source.tool_choice.mode
