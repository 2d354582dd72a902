"""Jinja in a sandbox that also bounds what a template may do: steps, and how large things get.

jinja2's own sandbox keeps a template away from Python, not from the processor: ``'a' * 10**9``, a
padded format or loops in loops would end a gateway. Every turn of a loop, every call and every
filter takes from a budget here, more for long texts, and what would be made too long is refused
before it is made. Comparisons and searches cost nothing, so a template that was written to be slow
can still be slow in proportion to the messages; it cannot be slow beyond every measure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS_MAX: Final = 250_000
"""Of one rendering: turns of loops, calls, filters, and one more for each 1,024 characters."""
SIZE_MAX: Final = 1 << 24
"""Characters or elements of anything that a template makes, its output among them."""
PADDING_MAX: Final = 10_000
"""Width of a padded or indented text, and of a number."""
_BITS_MAX: Final = 4_096
_CHARS_A_STEP: Final = 1_024

_WIDE = re.compile(r"[0-9]{5,}|\*|:[^}]*\{")
"""What in a format could pad without measure: a wide field, or a width that is an argument."""
_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_steps: ContextVar[list[int]] = ContextVar("steps")


class TooMuchError(SecurityError):
    """A template would do or make more than it may."""


def charge(size: int = 0) -> None:
    """Take a step from the budget of the rendering under way, and those for what it handles.

    Raises:
        TooMuchError: there are none left.
    """
    left = _steps.get(None)
    if left is None:
        return  # constants of a template that is being compiled
    left[0] -= 1 + size // _CHARS_A_STEP
    if left[0] < 0:
        raise TooMuchError(f"more than {STEPS_MAX} steps")


def bound(size: int) -> None:
    """Charge for something that is about to be made.

    Raises:
        TooMuchError: it would be too long, or there are no steps left.
    """
    if size > SIZE_MAX:
        raise TooMuchError(f"{size} characters or elements: at most {SIZE_MAX} are made")
    charge(size)


def metered(pieces: Iterable[str]) -> Iterator[str]:
    """Pass a rendering's pieces on, with a budget of its own, up to ``SIZE_MAX`` characters."""
    token = _steps.set([STEPS_MAX])
    try:
        size = 0
        for piece in pieces:
            size += len(piece)
            bound(size if size > SIZE_MAX else len(piece))
            yield piece
    finally:
        _steps.reset(token)


def checked_padding(*numbers: object) -> None:
    """Raise TooMuchError for a width beyond ``PADDING_MAX``."""
    for number in numbers:
        if isinstance(number, int) and abs(number) > PADDING_MAX:
            raise TooMuchError(f"a width of {str(number)[:20]}: at most {PADDING_MAX}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates are to be rendered through ``metered``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("lipsum", "joiner", "cycler"):
            self.globals.pop(name, None)
        padded = {name: self.filters[name] for name in ("center", "indent", "wordwrap")}
        for name, plain in padded.items():
            self.filters[name] = _padded(plain)
        for name in ("batch", "slice", "format", "xmlattr", "urlize"):
            self.filters.pop(name, None)
        self.filters["replace"] = _replaced
        self.filters |= {"_counted": _counted, "_charged": _charged, "_joined": _joined}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation whose result may be larger than what it is made of."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if max(bits, right.bit_length()) > _BITS_MAX:
                raise TooMuchError(f"a number of more than {_BITS_MAX} bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
            text, count = (left, right) if isinstance(left, Sized) else (right, left)
            bound(len(text) * count if isinstance(count, int) else 0)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            bound(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """``str.format`` as jinja2 gives it to templates, unless its text could pad at will."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of anything; jinja2's own signature, for a template may name any keyword."""
        owner = getattr(__obj, "__self__", None)
        charge(len(owner) if isinstance(owner, str) else 0)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)


class _Metering(NodeTransformer):
    """Puts the budget where a template could go round and round."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        if node.node is not None:
            node.node = _filter(node.node, "_charged")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)  # what is looped over always is
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        charge()
        yield item


def _charged(value: Any) -> Any:
    charge(len(value) if isinstance(value, str | list | tuple) else 0)
    return value


def _joined(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    bound(sum(map(len, texts)))
    return "".join(texts)


def _padded(plain: Any) -> Any:
    def padded(text: object, *args: Any, **kwargs: Any) -> Any:
        checked_padding(*args, *kwargs.values())
        lines = str(text).count("\n") + 1
        widths = [abs(a) for a in (*args, *kwargs.values()) if isinstance(a, int)]
        bound(len(str(text)) + lines * max(widths, default=4))
        return plain(text, *args, **kwargs)

    plainly = plain
    if getattr(plain, "jinja_pass_arg", None) is not None:  # wordwrap is given its environment

        def plain(text: object, *args: Any, **kwargs: Any) -> Any:
            return plainly(_PLAIN, text, *args, **kwargs)

    return padded


_PLAIN: Final = ImmutableSandboxedEnvironment()


def _replaced(text: object, old: str, new: str, count: int | None = None) -> str:
    owner = str(text)
    _check_replaced(owner, str(old), str(new))
    return owner.replace(str(old), str(new), -1 if count is None else count)


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _PADDING:
        checked_padding(*args)
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str):
        _check_replaced(owner, args[0], str(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        bound(sum(len(item) + len(owner) for item in args[0] if isinstance(item, str)))


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise TooMuchError(f"the format {text[:40]!r} could pad without measure")


def _check_replaced(owner: str, old: str, new: str) -> None:
    bound(len(owner) + owner.count(old) * len(new))
