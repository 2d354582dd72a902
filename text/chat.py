"""Messages to a prompt, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from deepinfer.text.chat_sandbox import BoundedEnvironment, checked_padding, metered
from deepinfer.text.errors import ChatMessageError, ChatTemplateError

_FAILURES = (
    TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = frozenset({"role", "content", "name"})


class ChatTemplate:
    """A compiled chat template.

    It comes with the model, so it is untrusted: it sees only what is passed in, may not change
    it, has no attribute access to Python, and is bounded (``chat_sandbox``). The dialect is that of
    Hugging Face's ``apply_chat_template``: trimmed blocks, loop controls, ``raise_exception``,
    ``strftime_now``, ``tojson`` without HTML escapes, and ``{% generation %}``, which marks without
    changing.
    """

    def __init__(
        self, source: str, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        """Compile ``source``; raises :class:`ChatTemplateError` with the line that is wrong."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error}") from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # Of the Python that it is compiled to: a break outside of a loop.
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Return the prompt of ``messages``; with special tokens, so encode it without adding any.

        Each message is ``{"role": …, "content": …}``, the content a string or a list of
        ``{"type": "text", "text": …}`` parts, which are joined by line breaks.
        ``add_generation_prompt`` opens the assistant's turn. ``now`` is what ``strftime_now``
        shows (the local time unless given). Raises :class:`ChatMessageError` naming what is
        malformed, and :class:`ChatTemplateError` with the template's own words if it refuses.
        """
        checked = check_messages(messages)

        def strftime_now(format_: str) -> str:
            return (now or datetime.now().astimezone()).strftime(format_)

        try:
            pieces = self._template.generate(
                messages=checked,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=strftime_now,
                **self._variables,
            )
            return "".join(metered(pieces))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        except _FAILURES as error:
            # A template is a program: "1" + 1 in it raises what Python raises.
            raise ChatTemplateError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from error


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Return ``messages`` with plain string contents, or raise :class:`ChatMessageError`."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatMessageError("messages", messages, "a list of messages")
    if not messages:
        raise ChatMessageError("messages", messages, "at least one message")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ChatMessageError(where, message, "an object with role and content")
    for field in message:
        if field not in _FIELDS:
            raise ChatMessageError(where, field, "made of role, content and name only")
    role = message.get("role")
    if role not in ROLES:
        raise ChatMessageError(f"{where}.role", role, "one of " + ", ".join(ROLES))
    checked = {
        "role": str(role),
        "content": _check_content(message.get("content"), f"{where}.content"),
    }
    if "name" in message:
        if not isinstance(message["name"], str):
            raise ChatMessageError(f"{where}.name", message["name"], "a string")
        checked["name"] = message["name"]
    return checked


def _check_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatMessageError(where, content, "a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ChatMessageError(f"{where}[{i}]", part, '{"type": "text", "text": string}')
    return "\n".join(texts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    checked_padding(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant wrote: its body is kept."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        body: Any = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return list(body)
