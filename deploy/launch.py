"""`deepinfer up`, `down`, and finding the cluster that runs here."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deepinfer.deploy import interrupts
from deepinfer.deploy.cluster import Cluster, LaunchError
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.interrupts import Terminated
from deepinfer.deploy.running import (
    Running,
    alive,
    default_token_file,
    exposed,
    forget,
    process_ticks,
    read_token,
    remember,
)
from deepinfer.deploy.starting import Starting

if TYPE_CHECKING:
    from deepinfer.client import Client

WAKE_S = 1.0


def serve(config: ClusterConfig, *, console: Console) -> None:
    """Start a cluster, say where it is, and serve until Ctrl-C, SIGTERM or `deepinfer down`.

    Raises:
        LaunchError: it could not be started.
        TokenFileError: the token file cannot be used.
    """
    with contextlib.suppress(KeyboardInterrupt, Terminated):
        for warning in config.warnings():
            console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
        view = Starting(console)
        with contextlib.ExitStack() as stack:
            with view:
                cluster = stack.enter_context(Cluster(config, say=view.say, loading=view.loading))
            if (loose := exposed(cluster.token_file)) is not None:
                console.print(f"warning: {loose}", style="yellow", markup=False, highlight=False)
            ticks = process_ticks(os.getpid())
            assert ticks is not None, "this process lives"
            here = Running(
                endpoints=cluster.endpoints,
                pid=os.getpid(),
                started_ticks=ticks,
                token_file=str(cluster.token_file),
                model=config.model,
            )
            stack.callback(forget, here.name)
            remember(here)
            stack.callback(console.print, "stopping")
            console.print(f"serving {config.model} at {', '.join(cluster.endpoints)}")
            console.print(f"token in {cluster.token_file}; Ctrl-C stops", markup=False)
            while True:
                time.sleep(WAKE_S)
                interrupts.check()


def running(endpoint: str | None) -> Running:
    """The cluster started here with that endpoint, or the only one.

    Raises:
        LaunchError: there is none, or several and no endpoint was named.
    """
    found = alive()
    if endpoint is not None:
        found = tuple(r for r in found if endpoint in r.endpoints)
    if not found:
        where = f" at {endpoint}" if endpoint else ""
        raise LaunchError(f"no cluster runs here{where}: start one with `deepinfer up`")
    if len(found) > 1:
        names = ", ".join(r.name for r in found)
        raise LaunchError(f"several clusters run here ({names}): name one with --endpoint")
    return found[0]


def stop_running(endpoint: str | None, grace_s: float) -> None:
    """Ask a cluster's launcher to stop, and wait until it has.

    Raises:
        LaunchError: there is none, or it still runs after ``grace_s``.
    """
    target = running(endpoint)
    os.kill(target.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while process_ticks(target.pid) == target.started_ticks:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"cluster {target.name} (process {target.pid}) still runs after {grace_s:g} s"
            )
        time.sleep(0.05)


def connect(endpoint: str | None, token_file: Path | None) -> Client:
    """An SDK client for a named endpoint, or for the cluster that runs here.

    Raises:
        LaunchError: no endpoint was named and no single cluster runs here.
        TokenFileError: the token file cannot be used.
    """
    from deepinfer.client import Client

    if endpoint is None:
        here = running(None)
        return Client(list(here.endpoints), token=read_token(token_file or Path(here.token_file)))
    if token_file is None:
        local = [r for r in alive() if endpoint in r.endpoints]
        token_file = Path(local[0].token_file) if local else default_token_file()
    return Client([endpoint], token=read_token(token_file))
