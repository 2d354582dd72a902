"""A chat template can neither hang the process that renders it nor fill its memory."""

from __future__ import annotations

import contextlib
import resource
import time

import pytest

from deepinfer.text.chat import ChatTemplate
from deepinfer.text.chat_sandbox import SIZE_MAX, STEPS_MAX
from deepinfer.text.errors import ChatTemplateError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a\nb"}]

GREEDY = (
    "{{ 'a' * 999999999 }}",
    "{{ 999999999 * 'a' }}",
    "{{ [1] * 99999999 }}",
    "{{ 9 ** 99999 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.zfill(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a' | indent(999999999) }}",
    "{{ ['a'] | map('center', 999999999) | list }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ 'a'.expandtabs(99999999) }}",
    "{% set b = 'b' * 9999 %}{{ ('a' * 9999).replace('a', b) }}",
    "{% set b = 'b' * 9999 %}{{ ('a' * 9999) | replace('a', b) }}",
    "{% set b = 'b' * 99999 %}{{ b.join(['a'] * 9999) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{% set t = s | upper %}{% endfor %}",
    "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{% set t = s.upper() %}{% endfor %}",
    "{{ lipsum(99999) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
)


@pytest.mark.parametrize("source", GREEDY)
def test_a_greedy_template_is_refused_at_once(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - began < 2
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 12 * SIZE_MAX


@pytest.mark.parametrize(
    "source",
    [
        "{% break %}",
        "{% continue %}",
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ 1 " + "+ 1 " * 5000 + "}}",
        "{% if " + "not " * 3000 + "1 %}{% endif %}",
        "{{ " + "9" * 5000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_what_python_does_not_compile_is_refused(source: str) -> None:
    with contextlib.suppress(ChatTemplateError):  # or compiled, by a newer Python
        ChatTemplate(source).render(MESSAGES)


def test_ordinary_templates_do_what_they_did() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.last %}!{% endif %}"
        "{{ loop.index ~ '/' ~ loop.length ~ ' ' ~ m.role + ':' }}"
        "{{ m.content | indent(2) | trim }}"
        "{% set ns.n = ns.n + 2 * loop.index %}{% endfor %}{{ ns.n }}"
        "{{ '%s and %05d' % ('x', 7) }}{{ '{} {:>4}'.format('y', 5) }}{{ 'a-b'.replace('-', '+') }}"
        "{{ ['p', 'q'] | join(', ') }}{{ 'ab' | center(6) }}{{ 'z' * 3 }}"
        "{{ {'k': 1} | tojson(indent=1) }}"
        "{{ 'one two' | wordwrap(3) }}{{ messages[::-1][0].role }}{{ 'x'.ljust(3) }}|"
    )
    assert ChatTemplate(source).render(MESSAGES) == (
        "1/2 user:Hi!2/2 assistant:a\n  b6x and 00007y    5a+bp, q  ab  zzz"
        '{\n "k": 1\n}one\ntwoassistantx  |'
    )


def test_many_messages_fit() -> None:
    inner = "{% for n in messages[:8] %}{{ n.role | trim }}{% endfor %}"
    source = "{% for m in messages %}" + inner + "{% endfor %}"
    messages = MESSAGES * 2_048
    text = ChatTemplate(source).render(messages)
    assert len(text) == 4_096 * 4 * len("userassistant")
    assert STEPS_MAX > 4_096 * 9 * 2


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(4):
        assert template.render(MESSAGES) == "Hi"
