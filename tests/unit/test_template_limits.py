"""Chat templates that would run, grow or reach too far are ended with a typed error.

No timing is asserted: a limit that does not hold shows as a test that hangs or eats the memory.
"""

# ruff: noqa: E501  (one template a line)

from __future__ import annotations

import pytest

from pdserve.errors import InvalidRequest, ModelError, PdserveError
from pdserve.tokenizer.bundle import MAX_TEMPLATE_BYTES
from pdserve.tokenizer.templates import ChatTemplate

CHAT = [{"role": "user", "content": "hello"}]

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "filter chain": "{{ range(99999)|map('string')|map('list')|map('join')|map('upper')|map('list')|list * 50 }}",
    "loop of filters": "{% for a in range(99999) %}{% set x = range(99999)|list|reverse|list %}{% endfor %}",
    "sorting": "{% for a in range(99999) %}{% set x = range(99999)|sort(reverse=true) %}{% endfor %}",
    "searching": "{% set s = 'a' * 8000000 %}{% for a in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
}
GROWING = {
    "repeat": "{{ 'a' * 9999999999 }}",
    "repeat list": "{{ [1] * 9999999999 }}",
    "repeat by number first": "{{ 9999999999 * 'a' }}",
    "double": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "double by ~": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "double by block": (
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = t %}{% endfor %}"
    ),
    "double by format": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}"
    "{% endfor %}",
    "double by join": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s]|join %}"
    "{% endfor %}",
    "double by replace": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s|replace('a', ns.s) %}{% endfor %}",
    "double by method": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
    "nested pairs": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "nested tuples": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
    "{{ {ns.x: 1} }}",
    "nested mappings": "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}"
    "{% endfor %}{{ ns.x|tojson }}",
    "nested namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "namespaces filled later": "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = [b, b] %}"
    "{% set b.x = [1] * 1000 %}{{ a }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "wide format": "{{ '%9999999999d' % 1 }}",
    "wide format by argument": "{{ '%*d' % (999999999, 1) }}",
    "wide str.format": "{{ '{:9999999999}'.format(1) }}",
    "wide nested str.format": "{{ '{:{}}'.format(1, 999999999) }}",
    "wide format filter": "{{ '%9999999999d'|format(1) }}",
    "indent": "{{ 'a\nb'|indent(9999999999) }}",
    "json indent": "{{ [[[1]]]|tojson(indent=999999999) }}",
    "join": "{{ range(99999)|join('a' * 1000000) }}",
    "join method": "{{ ('a' * 1000000).join(range(99999)|map('string')|list) }}",
    "rounding": "{{ 1.5|round(999999999, 'ceil') }}",
    "large range": "{{ range(999999999)|list }}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "much plain output": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "list of a long text": "{{ ('a' * 8000000)|list }}",
    "time format": "{{ strftime_now('%9999999999d') }}",
}
REACHING = {
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "format to a class": "{{ '{0.__class__.__mro__}'.format('') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(a=1) }}",
    "to bytes": "{{ (1).to_bytes(999999999) }}",
    "padding": "{{ 'a'.ljust(9999999999) }}",
    "tabs": "{{ '\t'.expandtabs(9999999999) }}",
    "namespace names": "{% set ns = namespace(__init__=1) %}{% set ns.__class__ = 2 %}",
    "attr of a method": "{{ messages[0].items.__self__.x }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_is_ended(name: str) -> None:
    template = ChatTemplate(ENDLESS[name], cpu_s=0.1)
    with pytest.raises(InvalidRequest) as caught:
        template.render(CHAT, {})
    assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_ended(name: str) -> None:
    with pytest.raises(PdserveError):
        ChatTemplate(GROWING[name], cpu_s=0.5).render(CHAT, {})


@pytest.mark.parametrize("name", REACHING)
def test_the_sandbox_holds(name: str) -> None:
    with pytest.raises(PdserveError) as caught:
        ChatTemplate(REACHING[name]).render(CHAT, {})
    assert "0x" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 'a'|center(99) }}",
        "{{ lipsum() }}{% for %}",
        "{{ x|pprint }}",
        "{% include 'a' %}",
        "{% import 'a' as b %}",
        "{% extends 'a' %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "x" * (MAX_TEMPLATE_BYTES + 1),
    ],
)
def test_templates_that_can_not_be_used_are_refused_when_loaded(source: str) -> None:
    with pytest.raises(ModelError):
        ChatTemplate(source)


def test_a_limit_of_one_render_does_not_touch_the_next() -> None:
    template = ChatTemplate("{% for i in range(messages[0].content|int) %}{{ 'a' * 1000 }}{% endfor %}")
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "99999"}], {})
    assert template.render([{"role": "user", "content": "2"}], {}) == "a" * 2000


def test_limits_on_what_goes_in() -> None:
    template = ChatTemplate("{{ messages|length }}")
    for chat in ([], CHAT * 1025, [{"role": "user", "content": "a" * (9 << 20)}]):
        with pytest.raises(InvalidRequest):
            template.render(chat, {})
    nested: object = "x"
    for _ in range(80):
        nested = [nested]
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": nested}], {})


def test_a_long_honest_chat_renders() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content|trim }}]{% else %}({{ m.content }})"
        "{% endif %}{% endfor %}"
    )
    chat = [{"role": "user" if n % 2 else "assistant", "content": "word " * 500} for n in range(1000)]
    assert len(template.render(chat, {})) > 2_000_000
