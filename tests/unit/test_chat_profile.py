"""What is read off chat templates: whether they have tools, in which format, and where thoughts stand."""

from __future__ import annotations

import pytest

from pdserve.api import ChatMessage, GenerateInput, Tool, ToolCall, ToolChoice, ToolMode
from pdserve.chat.formats import FORMATS
from pdserve.chat.prepare import plan_of, prepare
from pdserve.chat.profile import ChatProfile, profile_of
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.tokenizer.templates import ChatTemplate
from tests.support.tokenizer_files import CHATML, chat_templates

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = dict(chat_templates())
LLAMA = (
    "{% if tools %}Respond in the format {\"name\": function name, \"parameters\": dictionary of arguments}."
    "{{ tools|tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)  # fmt: skip
DEEPSEEK = (
    "{% if tools %}{{ tools|tojson }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n"
    "```json\n{}\n```{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    "{{ '</think>' if enable_thinking is false }}"
)
WANTED = {
    "Qwen-Qwen3-0.6B": ("hermes", "<think>", True),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None, False),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None, False),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral11", None, False),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "<think>", True),
    "HuggingFaceTB-SmolLM3-3B": (None, "<think>", True),
    "deepseek-ai-DeepSeek-V3.1": (None, "<think>", True),
    "Qwen3-Coder": (None, None, False),
}
CHAT = (ChatMessage(role="user", content="x"),)
TOOL = Tool(name="now", parameters='{"type": "object", "properties": {}}')


def profile(name: str, tool_format: str = "auto") -> ChatProfile:
    return profile_of(ChatTemplate(TEMPLATES[name]), NAMES, tool_format)


@pytest.mark.parametrize("name", WANTED)
def test_formats_of_templates_in_the_wild(name: str) -> None:
    found = profile(name)
    form, think, switch = WANTED[name]
    assert (found.form.name if found.form else None) == form
    assert (found.think.begin if found.think else None) == think
    assert found.has_switch == switch


def test_formats_of_templates_not_at_hand() -> None:
    assert profile_of(ChatTemplate(LLAMA), NAMES).form == FORMATS["llama3"]
    assert profile_of(ChatTemplate(DEEPSEEK), NAMES).form == FORMATS["deepseek"]


def ask(**fields: object) -> GenerateInput:
    return GenerateInput(messages=CHAT, **fields)  # type: ignore[arg-type]


def test_tools_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedFeature, match="not JSON"):
        prepare(ask(tools=(TOOL,)), profile("Qwen3-Coder"))
    with pytest.raises(UnsupportedFeature, match="no place for tools"):
        prepare(ask(tools=(TOOL,)), profile("HuggingFaceTB-SmolLM3-3B"))
    with pytest.raises(UnsupportedFeature, match="switched off"):
        prepare(ask(tools=(TOOL,)), profile("Qwen-Qwen3-0.6B", "none"))
    answered = (*CHAT, ChatMessage(role="tool", content="1", tool_call_id="a"))
    with pytest.raises(UnsupportedFeature) as caught:
        prepare(GenerateInput(messages=answered), profile("HuggingFaceTB-SmolLM3-3B"))
    assert caught.value.violations[0].field == "chat.messages.tool_calls"
    none = ToolChoice(mode=ToolMode.NONE)
    assert prepare(ask(tools=(TOOL,), tool_choice=none), profile("Qwen3-Coder")).tools == []


def test_thinking_is_refused_where_the_template_has_no_switch() -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        prepare(ask(thinking=True), profile("Qwen-Qwen2.5-7B-Instruct"))
    assert caught.value.violations[0].field == "thinking"
    assert prepare(ask(thinking=False), profile("Qwen-Qwen3-0.6B")).options["enable_thinking"] is False


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": NaN}', "1", '{"a":' * 70 + "1" + "}" * 70, '{"a": 1}' + " " * 65536]
)
def test_json_of_users_is_an_object_within_limits(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(ask(tools=(Tool(name="f", parameters=text),)), profile("Qwen-Qwen3-0.6B"))
    assert caught.value.violations[0].field == "tools.parameters"
    call = ChatMessage(role="assistant", tool_calls=(ToolCall(id="a", name="f", arguments=text),))
    with pytest.raises(InvalidRequest) as caught:
        prepare(GenerateInput(messages=(*CHAT, call)), profile("Qwen-Qwen3-0.6B"))
    assert caught.value.violations[0].field == "chat.messages.tool_calls.arguments"


def test_a_prompt_that_ends_within_the_thoughts_is_seen() -> None:
    found = profile("Qwen-Qwen3-0.6B")
    assert plan_of(ask(), found, "<|im_start|>assistant\n<think>\n", {}).inside
    assert not plan_of(ask(), found, "<|im_start|>assistant\n<think>\n\n</think>\n\n", {}).inside


def test_a_template_without_tools_is_told_of_them_where_the_operator_says_so() -> None:
    found = profile_of(ChatTemplate(CHATML), NAMES, "hermes")
    assert found.spelled
    call = ToolCall(id="a", name="now", arguments='{"zone": "é"}')
    chat = (
        ChatMessage(role="system", content="Be brief."), *CHAT,
        ChatMessage(role="assistant", content="I look.", tool_calls=(call,)),
        ChatMessage(role="tool", content="noon", tool_call_id="a"),
    )  # fmt: skip
    system, _, called, told = prepare(GenerateInput(messages=chat, tools=(TOOL,)), found).messages
    assert system["content"].startswith("Be brief.\n\n")
    assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}' in system["content"]
    assert called["content"] == (
        'I look.\n<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
    )
    assert told == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert profile_of(ChatTemplate(CHATML), NAMES, "mistral").form is None


def test_a_model_that_never_thinks_may_be_told_not_to() -> None:
    never = profile("Qwen-Qwen2.5-7B-Instruct")
    assert prepare(ask(thinking=False), never) == prepare(ask(), never)
    with pytest.raises(UnsupportedFeature, match="thinking"):
        prepare(ask(thinking=True), never)
