"""Chat templates of models in the wild render as in transformers, or are refused with a typed error."""

# ruff: noqa: E501  (one template a line)

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.tokenizer.templates import ChatTemplate
from tests.support.tokenizer_files import chat_templates

renderer = pytest.importorskip("transformers.utils.chat_template_utils")

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get", "arguments": {"city": "Paris", "n": 3}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": "Hello"}],
    "system": [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": 'Hi <b>"quoted"</b> & é 🙂\n'},
    ],
    "thinking": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nreason\n</think>\n\nanswer"},
        {"role": "user", "content": "  b  "},
    ],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x", "reasoning_content": "because", "tool_calls": None},
        {"role": "user", "content": "b"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    ],
    "odd-start": [{"role": "assistant", "content": "first"}],
    "twice": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tools": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ],
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def expected(source: str, chat: list[dict[str, Any]], prompt: bool) -> str | None:
    """What transformers renders, or None where it raises."""
    try:
        rendered, _ = renderer.render_jinja_template(
            conversations=[renderer._normalize_chat_messages(chat)],
            chat_template=source,
            add_generation_prompt=prompt,
            **NAMES,
        )
    except Exception:  # whatever transformers raises, the template does not take this chat
        return None
    return str(rendered[0])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(("name", "source"), chat_templates(), ids=[name for name, _ in chat_templates()])
def test_renders_as_transformers_or_refuses(name: str, source: str, chat: str) -> None:
    template = ChatTemplate(source)
    for prompt in (False, True):
        want = expected(source, CHATS[chat], prompt)
        variables = {**NAMES, "add_generation_prompt": prompt}
        if want is None:
            with pytest.raises(InvalidRequest) as caught:
                template.render(CHATS[chat], variables)
            assert caught.value.violations[0].field == "messages"
        else:
            assert template.render(CHATS[chat], variables) == want


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ loop.length }}{% endfor %}",
        "{{ messages|tojson(indent=2) }}{{ {'a': [1, 'é<']}|tojson }}{{ 'a' ~ 1 ~ none }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro f(x, y='-') %}{{ y }}{{ x }}{% endmacro %}{{ f('a') }}{{ f('b', y='+') }}",
        "{{ messages|map(attribute='role')|join(', ') }}{{ messages[0]['content'][:2] }}{{ undefined_name }}",
        "{% for k, v in {'b': 1, 'a': (1, 2)}|dictsort %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}{{ range(3)|list }}",
        "  {% if true %}\n  x\n  {% endif %}\n{%- set s %}a{{ 1 }}{% endset %}{{ s|upper }}{{ '%s-%d' % ('a', 3) }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'a,b'.split(',') }}{{ [1, 2] + [3] }}",
        "{{ 'x'.format(1) }}{{ '{:>4}|{}'.format('a', 2) }}{{ dict(a=1) }}{{ messages[0].get('no', 'd') }}",
        "{% for m in messages recursive %}{{ m.role }}{% else %}none{% endfor %}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 3 }}",
        "{{ not messages }}{{ 'a' in 'abc' and 1 < 2 <= 3 }}{{ messages is iterable }}{{ 3.0 }}{{ none is none }}",
    ],
)
def test_what_templates_use_renders_as_transformers(source: str) -> None:
    chat = CHATS["thinking"]
    want = expected(source, chat, True)
    assert want is not None
    assert ChatTemplate(source).render(chat, {**NAMES, "add_generation_prompt": True}) == want


def test_time_is_one_instant() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}|{{ strftime_now('%-d%%') }}")
    at = datetime(2026, 3, 5, 14, 7)
    assert template.render(CHATS["short"], {}, now=at) == "05 Mar 2026 14:07|5%"


def test_a_template_s_own_refusal_is_told_to_the_user() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(CHATS["short"], {})
