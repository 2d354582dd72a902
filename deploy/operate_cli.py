"""``deepinfer drain`` and ``deepinfer restart``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.deploy.console import out, plain_errors

if TYPE_CHECKING:
    from deepinfer.deploy.operate import Kind

GRACE_S = 30.0
Grace = Annotated[
    float,
    typer.Option(min=0, max=86_400, help="Seconds that requests may take to finish there."),
]
StartedAt = Annotated[
    str | None, typer.Option(help="host:port it was started with; default: the only one.")
]


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False)


def drain(
    name: Annotated[str, typer.Argument(help="worker-N, gateway-N, or all: every gateway.")],
    grace: Grace = GRACE_S,
    endpoint: StartedAt = None,
) -> None:
    """Give a process nothing new, and wait until nothing needs it; it serves again once restarted.

    A worker's requests go on elsewhere, KV and all; those that fit nowhere else have the grace
    time, and then wait for its restart. A gateway's streams have the grace time, and then resume
    at another gateway. With all, requests finish where they are.
    """
    with plain_errors():
        from deepinfer.deploy.operate import drain_one, operator

        with operator(endpoint) as cluster:
            names = cluster.names("gateways") if name == "all" else (name,)
            for each in names:  # all at once, before the first is waited for
                cluster.drain(each, None if name == "all" else grace)
            for each in names:
                drain_one(cluster, each, None if name == "all" else grace, _say)
                _say(f"{each}: drained")


def restart(
    workers: Annotated[bool, typer.Option("--workers", help="Every worker.")] = False,
    gateways: Annotated[bool, typer.Option("--gateways", help="Every gateway.")] = False,
    everyone: Annotated[bool, typer.Option("--all", help="Workers, then gateways.")] = False,
    grace: Grace = GRACE_S,
    endpoint: StartedAt = None,
) -> None:
    """Restart processes one after the other while the cluster serves: drain, restart, wait."""
    if not (workers or gateways or everyone):
        raise typer.BadParameter("name --workers, --gateways or --all")
    with plain_errors():
        from deepinfer.deploy.operate import operator, restart_all

        kinds: list[Kind] = []
        kinds += ["workers"] if workers or everyone else []
        kinds += ["gateways"] if gateways or everyone else []
        with operator(endpoint) as cluster:
            restart_all(cluster, kinds, grace, _say)
