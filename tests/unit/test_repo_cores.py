"""The cores are pure and their order is declared, as far as the syntax tree can show it.

A core imports only what is listed here, calls no builtin that does I/O or differs from run to run,
and never takes elements out of a set in the set's own order.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

# The modules of the standard library that neither know the time nor touch the world.
PURE_MODULES = frozenset(
    {
        "__future__",
        "abc",
        "array",
        "base64",
        "binascii",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "graphlib",
        "hashlib",
        "heapq",
        "hmac",
        "itertools",
        "json",
        "math",
        "numbers",
        "operator",
        "re",
        "statistics",
        "string",
        "struct",
        "textwrap",
        "types",
        "typing",
        "unicodedata",
        "zlib",
    }
)
# I/O, or (hash of a str, id) a value that differs between two runs of the same program.
IMPURE_BUILTINS = frozenset(
    {"__import__", "breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}
)
SET_NAMES = frozenset({"set", "frozenset", "Set", "AbstractSet", "MutableSet"})
DICT_NAMES = frozenset({"dict", "defaultdict", "Mapping", "MutableMapping", "OrderedDict"})
SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
# Their result does not depend on the order of their one argument.
ORDER_FREE = frozenset({"all", "any", "frozenset", "len", "max", "min", "set", "sorted"})
# They hand the elements on in the order in which they get them.
ORDER_KEEPING = frozenset(
    {"deque", "dict", "enumerate", "filter", "iter", "list", "map", "reversed", "sum", "tuple"}
    | {"zip"}
)


def impurities(source: str, path: str) -> list[str]:
    """Return one sentence for each import or call that a core may not contain."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [] if node.level else [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in IMPURE_BUILTINS:
                found.append(f"{path}:{node.lineno}: a core may not call {node.func.id}()")
            continue
        else:
            continue
        tops = [name.split(".")[0] for name in names]
        found += [
            f"{path}:{node.lineno}: a core may not import {top}"
            for top in tops
            if top not in PURE_MODULES and top != "deepinfer"
        ]
    return found


class SetOrder(ast.NodeVisitor):
    """Finds where a module takes elements out of a set in the set's own order.

    A name or attribute counts as a set if the module annotates it as one or assigns it a value
    that is visibly one, and nowhere in the module says otherwise by annotation; likewise as a dict
    whose values are sets. Types that only another module states are out of sight.
    """

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self.found: list[str] = []
        self.sets: set[str] = set()
        self.dicts_of_sets: set[str] = set()
        self.others: set[str] = set()
        self._collect(tree)
        self.sets -= self.others
        self.dicts_of_sets -= self.others
        self.visit(tree)

    def _collect(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                self._annotate(_name_of(node.target), node.annotation)
            elif isinstance(node, ast.arg):
                self._annotate(node.arg, node.annotation)
            elif isinstance(node, ast.FunctionDef):
                self._annotate(f"{node.name}()", node.returns)
        for node in ast.walk(tree):  # after the annotations: an operand's kind may rest on one
            if isinstance(node, ast.Assign | ast.NamedExpr) and self.is_set(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.sets.update(filter(None, map(_name_of, targets)))

    def _annotate(self, name: str | None, annotation: ast.expr | None) -> None:
        if name is None or annotation is None:
            return
        outer, arguments = _annotation_parts(annotation)
        if outer in SET_NAMES:
            self.sets.add(name)
        elif outer in DICT_NAMES and arguments and _annotation_parts(arguments[-1])[0] in SET_NAMES:
            self.dicts_of_sets.add(name)
        else:
            self.others.add(name)

    def is_set(self, node: ast.expr) -> bool:
        """Whether an expression's value is a set, as far as this module shows."""
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, SET_OPERATORS):
                return any(self.is_set(side) or _is_dict_view(side) for side in (left, right))
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_set(body) or self.is_set(orelse)
            case ast.Call(func=ast.Name(id="set" | "frozenset")):
                return True
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if (
                attr in SET_METHODS
                or (attr == "copy" and self.is_set(owner))
                or (attr in {"get", "pop", "setdefault"} and self.is_dict_of_sets(owner))
            ):
                return True
            case ast.Call(func=function):
                return f"{_name_of(function)}()" in self.sets
            case ast.Subscript(value=owner):
                return self.is_dict_of_sets(owner)
            case ast.Name() | ast.Attribute():
                return _name_of(node) in self.sets
        return False

    def is_dict_of_sets(self, node: ast.expr) -> bool:
        return _name_of(node) in self.dicts_of_sets

    def _flag(self, node: ast.expr, what: str) -> None:
        if self.is_set(node):
            text = ast.unparse(node)
            self.found.append(f"{self.path}:{node.lineno}: {what} the set `{text}`: sort it first")

    def visit_For(self, node: ast.For) -> None:
        self._flag(node.iter, "for-loop over")
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node)

    def _comprehension(self, node: ast.ListComp | ast.DictComp | ast.GeneratorExp) -> None:
        for generator in node.generators:
            self._flag(generator.iter, "comprehension over")
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        self._flag(node.value, "unpacking of")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if name in ORDER_KEEPING or (name in {"min", "max", "sorted"} and node.keywords):
            # Equal keys would leave the choice to the set; a sort key has to end in the id, and
            # the way to show it is to sort by the elements first.
            verb = "keyed " if name in {"min", "max", "sorted"} else ""
            if not verb or not _key_ends_in_element(node):
                for argument in node.args:
                    self._flag(argument, f"{verb}{name}() of")
        elif name in {"extend", "join", "extendleft", "fromkeys"}:
            for argument in node.args:
                self._flag(argument, f"{name}() of")
        elif name == "pop" and isinstance(node.func, ast.Attribute) and not node.args:
            self._flag(node.func.value, "pop() from")
        if name in ORDER_FREE and not node.keywords and len(node.args) == 1:
            argument = node.args[0]
            if isinstance(argument, ast.GeneratorExp | ast.ListComp):
                self.generic_visit(argument)  # the order is lost again at once
                return
        self.generic_visit(node)


def _key_ends_in_element(call: ast.Call) -> bool:
    """Whether a call's key is a lambda whose tuple ends in its own argument or that one's id."""
    for keyword in call.keywords:
        if keyword.arg == "key" and isinstance(keyword.value, ast.Lambda):
            body, arguments = keyword.value.body, keyword.value.args.args
            last = body.elts[-1] if isinstance(body, ast.Tuple) and body.elts else body
            if isinstance(last, ast.Attribute) and last.attr.endswith("id"):
                last = last.value
            return isinstance(last, ast.Name) and last.id == arguments[0].arg
    return not any(keyword.arg == "key" for keyword in call.keywords)


def _name_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _annotation_parts(node: ast.expr) -> tuple[str | None, list[ast.expr]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if not isinstance(node, ast.Subscript):
        return _name_of(node), []
    inner = node.slice
    return _name_of(node.value), inner.elts if isinstance(inner, ast.Tuple) else [inner]


def _is_dict_view(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"keys", "items"}
    )


def set_order(source: str, path: str) -> list[str]:
    """Return one sentence for each place where ``source`` depends on a set's own order."""
    return SetOrder(path, ast.parse(source)).found


def core_files(root: Path) -> list[Path]:
    return sorted(file for core in root.glob("*/core") for file in core.rglob("*.py"))


def test_cores_are_pure(repo_root: Path) -> None:
    found = [
        violation
        for file in core_files(repo_root)
        for violation in impurities(file.read_text("utf-8"), file.relative_to(repo_root).as_posix())
    ]
    assert not found, "\n".join(found)


def test_cores_declare_their_order(repo_root: Path) -> None:
    found = [
        violation
        for file in core_files(repo_root)
        for violation in set_order(file.read_text("utf-8"), file.relative_to(repo_root).as_posix())
    ]
    assert not found, "\n".join(found)


def test_pure_modules_are_standard_library() -> None:
    assert PURE_MODULES - {"__future__"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import numpy as np",
        "from random import Random",
        "def f():\n    import logging",
        "import os.path",
        "from asyncio import Queue",
        "from concurrent.futures import Future",
        "if TYPE_CHECKING:\n    import torch",
        "print('x')",
        "def f(x):\n    return hash(x)",
        "open('f')",
    ],
)
def test_planted_impurity_is_found(source: str) -> None:
    assert len(impurities(source, "a/core/b.py")) == 1


def test_pure_core_passes() -> None:
    source = "import heapq\nfrom collections.abc import Iterator\nfrom . import ids\n"
    source += "from deepinfer.kvstore.core.ids import RequestId\nself.open(x.id)\n"
    assert impurities(source, "a/core/b.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "for x in {1, 2}: f(x)",
        "for x in set(xs): f(x)",
        "[f(x) for x in frozenset(xs)]",
        "{x: 1 for x in {y for y in xs}}",
        "sum(w[x] for x in set(xs))",
        "class A:\n    live: set[int]\n    def f(self):\n        for x in self.live: g(x)",
        "class A:\n    def __init__(self):\n        self.a = set()\n    def f(s): return list(s.a)",
        "def f(xs: frozenset[int]):\n    yield from [x for x in xs]",
        "def f(xs: 'set[int]'):\n    return next(iter(xs))",
        "def f(d: dict[str, set[int]], k):\n    for x in d[k]: g(x)",
        "def f(d: dict[str, set[int]], k):\n    for x in d.get(k, ()): g(x)",
        "for x in a.keys() - b.keys(): f(x)",
        "for x in a.union(b): f(x)",
        "def f() -> set[int]: ...\nfor x in f(): g(x)",
        "xs = set(ys)\nout.extend(xs)",
        "xs = set(ys)\nreturn_ = [*xs]",
        "xs = set(ys)\nx = xs.pop()",
        "min(set(xs), key=lambda x: x.age)",
        "sorted(set(xs), key=len)",
        "for i, x in enumerate({1} | xs): f(x)",
    ],
)
def test_planted_set_iteration_is_found(source: str) -> None:
    assert len(set_order(source, "a/core/b.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "for x in sorted(set(xs)): f(x)",
        "for x in sorted(x for x in set(xs) if x): f(x)",
        "len(set(xs))",
        "any(x > 3 for x in set(xs))",
        "{x + 1 for x in set(xs)}",
        "max(set(xs))",
        "min(set(xs), key=lambda x: (x.age, x))",
        "sorted(set(xs), key=lambda x: (x.age, x.request_id))",
        "max(set(xs), default=0)",
        "class A:\n    a: list[int]\n    def f(self):\n        for x in self.a: g(x)",
        "def f(d: dict[str, set[int]]):\n    for k in d: g(k)",
        "def f(d: dict[str, int]):\n    for x in d.pop(k): g(k)",
        "if x in {1, 2}: f()",
        "total = sum(sizes)",
    ],
)
def test_declared_order_passes(source: str) -> None:
    assert set_order(source, "a/core/b.py") == []
