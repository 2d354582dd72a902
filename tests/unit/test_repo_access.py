"""Who may call what: every RPC of every contract has a rule, and the guard keeps it."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from deepinfer.proto.access import RULES, Access
from deepinfer.proto.bearer import MISSING, NO_RULE, OTHER_ROLE, WRONG, Guard

CLIENT, CLUSTER = "the-token-of-clients", "the-token-of-the-cluster"
OPERATOR = "the-token-of-the-operator"
OF_OTHERS = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


def methods(file: FileDescriptor) -> list[str]:
    """Every RPC of a file, as gRPC spells it."""
    services = file.services_by_name.values()
    return [
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    ]


def contracts(repo_root: Path) -> list[FileDescriptor]:
    """The descriptors of all that is written in ``proto/``."""
    names = sorted(path.stem for path in (repo_root / "proto").glob("*.proto"))
    assert len(names) >= 5
    return [import_module(f"deepinfer.proto.{name}_pb2").DESCRIPTOR for name in names]


def test_every_rpc_has_a_rule_and_every_rule_an_rpc(repo_root: Path) -> None:
    ours = [method for file in contracts(repo_root) for method in methods(file)]
    assert len(ours) == len(set(ours)) >= 18
    without = sorted(set(ours) - RULES.keys())
    assert not without, f"say in proto/access.py who may call {', '.join(without)}"
    theirs = [method for file in OF_OTHERS for method in methods(file)]
    assert set(ours) | set(theirs) == RULES.keys()


def test_what_is_open_and_what_clients_may(repo_root: Path) -> None:
    """Widening either is a decision, not a line that slips in."""
    by_access = {access: {m for m, a in RULES.items() if a is access} for access in Access}
    assert by_access[Access.OPEN] == {"/grpc.health.v1.Health/Check"}
    services = {method.split("/")[1] for method in by_access[Access.CLIENT]}
    assert services == {
        "deepinfer.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def decide(guard: Guard, method: str, *authorizations: str | bytes) -> str | None:
    """Why the guard refuses a call, with its code's name; None if it lets it through."""
    through = object()

    async def served(_: object) -> object:
        return through

    async def main() -> str | None:
        metadata = [("user-agent", "x"), *(("authorization", said) for said in authorizations)]
        details: Any = SimpleNamespace(method=method, invocation_metadata=tuple(metadata))
        handler: Any = await guard.intercept_service(served, details)  # type: ignore[arg-type]
        if handler is through:
            return None
        said: list[tuple[grpc.StatusCode, str]] = []

        class Context:
            async def abort(self, code: grpc.StatusCode, why: str) -> None:
                said.append((code, why))

        await handler.stream_stream(None, Context())
        [(code, why)] = said
        return f"{code.name}: {why}"

    return asyncio.run(main())


ALL = Guard(client=CLIENT, cluster=CLUSTER, operator=OPERATOR)


@pytest.mark.parametrize("method", [*RULES, "/deepinfer.v1.Inference/Added", "/x/y", ""])
def test_each_rpc_is_for_its_role_alone(method: str) -> None:
    rule = RULES.get(method)
    free = rule is Access.OPEN
    assert decide(ALL, method) == (None if free else f"UNAUTHENTICATED: {MISSING}")
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {CLIENT}x",
        f"bearer {CLIENT}",
        b"\xff",
        CLIENT,
    ):
        assert decide(ALL, method, wrong) == (None if free else f"UNAUTHENTICATED: {WRONG}")
    tokens = {Access.CLIENT: CLIENT, Access.CLUSTER: CLUSTER, Access.OPERATOR: OPERATOR}
    for role, token in tokens.items():
        got = decide(ALL, method, f"Bearer {token}")
        if free or rule is role:
            assert got is None
        elif rule is None:
            assert got == f"PERMISSION_DENIED: {NO_RULE}"
        else:
            assert got == f"PERMISSION_DENIED: {OTHER_ROLE[rule]}"


def test_a_server_knows_only_the_tokens_it_was_told() -> None:
    store = Guard(cluster=CLUSTER)
    for method in RULES:
        if RULES[method] is not Access.OPEN:
            assert decide(store, method, f"Bearer {CLIENT}") == f"UNAUTHENTICATED: {WRONG}"


def test_any_right_header_of_several_counts() -> None:
    method = "/deepinfer.v1.Inference/Abort"
    assert decide(ALL, method, "Bearer nothing", f"Bearer {CLIENT}".encode()) is None
    assert decide(ALL, method, f"Bearer {CLUSTER}", "x") is not None


@pytest.mark.parametrize(
    ("client", "cluster"), [(None, None), (CLIENT, CLIENT), ("", None), (None, " x"), ("ä", None)]
)
def test_tokens_that_prove_nothing_are_refused(client: str | None, cluster: str | None) -> None:
    with pytest.raises(ValueError, match=r"token|client, cluster and operator"):
        Guard(client=client, cluster=cluster)
