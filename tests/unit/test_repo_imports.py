"""Who may import whom, as a table, checked on every module of the tree without running it.

Lazy imports inside functions, imports under ``TYPE_CHECKING`` and
``importlib.import_module("...")`` with a literal name count like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# Folder -> what its shell may import of ours. A name covers everything below it.
SHELL_RULES: dict[str, tuple[str, ...]] = {
    "deploy": ("",),
    "workers": ("workers", "kvstore.client", "kvstore.core", "kernels", "text", "proto"),
    "gateway": ("gateway", "kvstore.core", "text", "proto"),
    "controller": ("controller", "kvstore.core", "proto"),
    "kvstore": ("kvstore", "proto"),
    "client": ("client", "kvstore.core", "proto"),
    "kernels": ("kernels",),
    "proto": ("proto",),
    "text": ("text",),
}
CORE_SHARED = "kvstore.core"
NAMESPACE_FOLDERS = frozenset({"kernels", "proto"})


def module_name(path: str) -> str:
    """Return the import name below ``deepinfer`` of a file: ``kvstore/core/ids.py``."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def allowed_imports(module: str) -> tuple[str, ...]:
    """Return the prefixes that ``module`` (``workers.core.batch``) may import of ours."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] == "core":
        return (f"{parts[0]}.core", CORE_SHARED)
    return SHELL_RULES[parts[0]]


def is_below(target: str, prefix: str) -> bool:
    return prefix == "" or target == prefix or target.startswith(prefix + ".")


def our_imports(tree: ast.AST, path: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, target below ``deepinfer``) for each import of ours in a parsed file.

    ``from deepinfer.a import b`` means the module ``a.b`` if there is one, else the module ``a``.
    """
    folder = path.rsplit("/", 1)[0].split("/")
    for node in ast.walk(tree):
        bases: list[tuple[str, str | None]]
        if isinstance(node, ast.Import):
            bases = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["deepinfer", *folder[: len(folder) - node.level + 1]]
                base = ".".join([*above, base] if base else above)
            bases = [(base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and _is_import_call(node.func):
            name = node.args[0]
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                continue
            bases = [(name.value, None)]
        else:
            continue
        for base, member in bases:
            if not is_below(base, "deepinfer"):
                continue
            target = base.removeprefix("deepinfer").removeprefix(".")
            nested = ".".join(filter(None, (target, member)))
            yield node.lineno, nested if nested in modules else target


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def violations(source: str, path: str, modules: frozenset[str]) -> list[str]:
    """Return one sentence for each import in ``source`` that the table forbids."""
    module = module_name(path)
    allowed = allowed_imports(module)
    return [
        f"{path}:{line}: {module} may not import deepinfer.{target}"
        for line, target in our_imports(ast.parse(source), path, modules)
        if not any(is_below(target, prefix) for prefix in allowed)
    ]


def python_files(root: Path) -> list[str]:
    return sorted(
        file.relative_to(root).as_posix()
        for folder in SHELL_RULES
        for file in (root / folder).rglob("*.py")
    )


def test_tree_keeps_the_rules(repo_root: Path) -> None:
    files = python_files(repo_root)
    modules = frozenset(module_name(path) for path in files) | _packages(files)
    found = [
        violation
        for path in files
        for violation in violations((repo_root / path).read_text("utf-8"), path, modules)
    ]
    assert not found, "\n".join(found)


def _packages(files: list[str]) -> frozenset[str]:
    parents = (Path(path).parents for path in files)
    return frozenset(p.as_posix().replace("/", ".") for some in parents for p in some) - {"."}


def test_table_names_every_linked_folder(repo_root: Path) -> None:
    links = {link.name: link for link in (repo_root / "src/deepinfer").iterdir()}
    assert links.keys() - {"__pycache__"} == SHELL_RULES.keys()
    for name in SHELL_RULES:
        assert links[name].is_symlink()
        assert links[name].readlink().as_posix() == f"../../{name}"


def test_packages_say_what_they_hold(repo_root: Path) -> None:
    """A folder of modules has an ``__init__`` with a docstring; kernels and proto have none."""
    found = []
    for folder in sorted({Path(path).parent for path in python_files(repo_root)}):
        init = repo_root / folder / "__init__.py"
        if folder.as_posix() in NAMESPACE_FOLDERS:
            if init.exists():
                found.append(f"{folder}/__init__.py would hide the PyPI package {folder.name!r}")
        elif not init.exists():
            found.append(f"{folder} has modules but no __init__.py")
        elif not ast.get_docstring(ast.parse(init.read_text("utf-8"))):
            found.append(f"{folder}/__init__.py has no docstring")
    assert not found, "\n".join(found)


MODULES = frozenset(
    {
        "kvstore",
        "kvstore.actor",
        "kvstore.client",
        "kvstore.core",
        "kvstore.core.ids",
        "workers",
        "workers.actor",
        "workers.core",
        "controller",
        "controller.core",
        "proto.kv_pb2",
    }
)


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("workers/actor.py", "from deepinfer.gateway.service import X", "gateway.service"),
        ("workers/actor.py", "from deepinfer.kvstore import actor", "kvstore.actor"),
        ("workers/actor.py", "from deepinfer import kvstore", "kvstore"),
        ("workers/actor.py", "from deepinfer import controller", "controller"),
        ("workers/swap.py", "import deepinfer.kvstore.clientele", "kvstore.clientele"),
        ("workers/core/batch.py", "from deepinfer.proto import kv_pb2", "proto.kv_pb2"),
        ("workers/core/batch.py", "from deepinfer.workers.actor import A", "workers.actor"),
        ("workers/core/batch.py", "from ..actor import A", "workers.actor"),
        ("workers/core/batch.py", "from deepinfer.controller.core import X", "controller.core"),
        ("kvstore/core/ids.py", "def f():\n    import deepinfer.text", "text"),
        ("kernels/ops.py", "from deepinfer.proto.kv_pb2 import X", "proto.kv_pb2"),
        ("text/chat.py", "from deepinfer.kvstore.core.ids import X", "kvstore.core.ids"),
        ("client/sdk.py", "importlib.import_module('deepinfer.gateway')", "gateway"),
        ("client/sdk.py", "if TYPE_CHECKING:\n    import deepinfer.deploy", "deploy"),
        ("client/sdk.py", "import deepinfer", ""),
        ("gateway/__init__.py", "from .. import controller", "controller"),
        ("controller/actor.py", "from deepinfer.workers import core", "workers.core"),
    ],
)
def test_planted_violation_is_found(path: str, source: str, target: str) -> None:
    (found,) = violations(source, path, MODULES)
    assert found.endswith(f"may not import deepinfer.{target}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("workers/actor.py", "from deepinfer.kvstore import client"),
        ("workers/actor.py", "from deepinfer.kvstore.client import Client"),
        ("workers/actor.py", "from deepinfer.workers.core import Batch"),
        ("workers/actor.py", "from deepinfer.kernels import ops"),
        ("workers/core/batch.py", "from deepinfer.kvstore.core import ids"),
        ("workers/core/batch.py", "from . import attach"),
        ("gateway/service.py", "from deepinfer.proto import kv_pb2"),
        ("deploy/cli.py", "from deepinfer import controller, workers"),
        ("text/chat.py", "import deepinferior"),
    ],
)
def test_allowed_import_passes(path: str, source: str) -> None:
    assert violations(source, path, MODULES) == []
