"""Chat templates: Hugging Face's dialect, in a sandbox, fed with checked messages."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from deepinfer.text.chat import ChatTemplate
from deepinfer.text.errors import ChatMessageError, ChatTemplateError

HI = [{"role": "user", "content": "hi"}]


def test_renders_messages_and_opens_the_assistants_turn() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(HI) == "<s>[user] hi</s>[assistant]"
    assert template.render(HI, add_generation_prompt=False) == "<s>[user] hi</s>"


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    template = ChatTemplate("  {% if true %}\n  a\n  {% endif %}\nb")
    assert template.render(HI) == "  a\nb"


def test_dialect() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%d %b %Y') }}{{ tools is none }}"
    )
    text = template.render(
        [{"role": "user", "content": "é<b>"}, *HI], now=datetime(2026, 11, 30, tzinfo=UTC)
    )
    assert text == '"é<b>"30 Nov 2026True'


def test_today_is_the_default_date() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(HI)
    assert 2024 < int(year) < 10_000


def test_a_template_may_refuse_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="refused the messages: roles must alternate"):
        template.render(HI)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_the_sandbox_holds(attack: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(attack).render(HI)


@pytest.mark.parametrize("broken", ["{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{{ absent.field }}"])
def test_failures_inside_a_template_are_its_own(broken: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(broken).render(HI)


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="chat template, line 2"):
        ChatTemplate("fine\n{% if %}")


def test_text_parts_are_joined_by_lines() -> None:
    template = ChatTemplate("{{ messages[0].content }}|{{ messages[0].name }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts, "name": "Al"}]) == "a\nb|Al"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"messages = \[\]: must be at least one message"),
        ("hi", "messages = 'hi': must be a list of messages"),
        ({"role": "user"}, "must be a list of messages"),
        (["hi"], r"messages\[0\] = 'hi': must be an object"),
        (
            [*HI, {"role": "bot", "content": "x"}],
            r"messages\[1\]\.role = 'bot': must be one of sys",
        ),
        ([{"content": "x"}], r"messages\[0\]\.role = None"),
        ([{"role": "user"}], r"messages\[0\]\.content = None: must be a string or"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content = 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\] = \{'type': 'image'"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "'tool_calls': must be made of"),
        ([{"role": "user", "content": "x", "name": 3}], r"messages\[0\]\.name = 3"),
    ],
)
def test_malformed_messages_are_named(messages: list[dict[str, object]], words: str) -> None:
    with pytest.raises(ChatMessageError, match=words) as caught:
        ChatTemplate("").render(messages)
    assert len(str(caught.value)) < 250


def test_long_values_are_shortened_in_errors() -> None:
    with pytest.raises(ChatMessageError) as caught:
        ChatTemplate("").render([{"role": "x" * 10_000, "content": ""}])
    assert len(str(caught.value)) < 250
