"""What a model's chat template can do: tools, in which format; thoughts, between which tags; a switch.

Read off the template once, when a model is loaded. Not here: the formats (`formats`), one chat (`prepare`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pdserve.chat.formats import FORMATS, HERMES, THINK_TAGS, ThinkTags, ToolFormat
from pdserve.errors import PdserveError
from pdserve.tokenizer.templates import ChatTemplate

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates let the model think or not."""
_PROBE_CHAT = [{"role": "user", "content": "x"}]
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
_NO_PLACE = "the model's chat template has no place for tools; leave them out."
_NOT_JSON = "the model's tool format is not JSON, so tools are not supported with it; leave them out."
_HERMES = re.compile(r'<tool_call>\s*\{"(?:name|arguments)":')
_LLAMA = re.compile(r'\{"name":[^{}]{1,80}"parameters":')


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatProfile:
    """form: of its calls; None: tools are refused, no_tools says why. spelled: the template has no place for
    tools, so they are told in text. think: tags of its thoughts. has_switch: it takes `SWITCHES`."""

    form: ToolFormat | None = None
    no_tools: str = _NO_PLACE
    spelled: bool = False
    think: ThinkTags | None = None
    has_switch: bool = False


def profile_of(
    template: ChatTemplate, variables: Mapping[str, Any], tool_format: str = "auto"
) -> ChatProfile:
    """variables: the model's special tokens by name. tool_format: a name of FORMATS, "auto" or "none"."""
    think = next((t for t in THINK_TAGS if t.begin in template.source and t.end in template.source), None)
    has_switch = not template.names.isdisjoint(SWITCHES)
    if tool_format == "none":
        return ChatProfile(
            no_tools="tools are switched off on this server.", think=think, has_switch=has_switch
        )
    knows = _knows_tools(template, variables)
    form = _detected(template.source) if tool_format == "auto" else FORMATS[tool_format]
    spelled = not knows and tool_format == HERMES.name
    return ChatProfile(
        form=form if knows or spelled else None,
        no_tools=_NOT_JSON if knows else _NO_PLACE,
        spelled=spelled,
        think=think,
        has_switch=has_switch,
    )


def _knows_tools(template: ChatTemplate, variables: Mapping[str, Any]) -> bool:
    """Whether it matters to the template that there are tools."""
    now = datetime.now()
    try:
        with_tools = template.render(_PROBE_CHAT, {**variables, "tools": _PROBE_TOOLS}, now=now)
        return with_tools != template.render(_PROBE_CHAT, dict(variables), now=now)
    except PdserveError:
        return False


def _detected(source: str) -> ToolFormat | None:
    text = source.replace('\\"', '"').replace("\\n", "\n")
    if _HERMES.search(text):
        return HERMES
    if "[TOOL_CALLS]" in text:
        return FORMATS["mistral11" if "[ARGS]" in text else "mistral"]
    if "<｜tool▁calls▁begin｜>" in text:
        return FORMATS["deepseek" if "```json" in text else "deepseek31"]
    if "<|tool_call|>" in text:
        return FORMATS["granite"]
    return FORMATS["llama3"] if _LLAMA.search(text) else None
