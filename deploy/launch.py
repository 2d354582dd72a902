"""`deepinfer up`, `down`, and finding the cluster that runs here."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deepinfer.deploy import interrupts
from deepinfer.deploy.cluster import Cluster, LaunchError
from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.running import (
    Running,
    TokenFileError,
    alive,
    default_token_file,
    exposed,
    forget,
    process_ticks,
    read_token,
    remember,
    wish_grace,
    wished_grace,
)
from deepinfer.deploy.starting import Starting
from deepinfer.deploy.tls import check_server_tls, client_tls

if TYPE_CHECKING:
    from deepinfer.client import Client

WAKE_S = 1.0
STOP_S = 30.0
"""What a launcher may take, behind the grace, until nothing of its cluster is left."""


def serve(config: ClusterConfig, *, console: Console) -> None:
    """Start a cluster, say where it is, and serve until Ctrl-C, SIGTERM or `deepinfer down`.

    Raises:
        LaunchError: it could not be started.
        ConfigError: its settings or certificates cannot be used.
        TokenFileError: the token file cannot be used.
    """
    with contextlib.suppress(KeyboardInterrupt):
        certificate = check_server_tls(config)
        for warning in (*config.warnings(), *(certificate.warnings if certificate else ())):
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
                tls_cert=None if certificate is None else certificate.file,
                tls_server_name=None if certificate is None else certificate.name,
                operator_token=cluster.operator_token,
                grace_s=config.grace,
            )
            stack.callback(forget, here.name)
            remember(here)
            for note in cluster.notes:
                console.print(note, markup=False, highlight=False)
            stack.callback(console.print, "stopping")
            cluster.say = lambda line: console.print(line, markup=False, highlight=False)
            console.print(f"serving {config.model} at {', '.join(cluster.endpoints)}")
            if certificate is not None:
                how = f"TLS: grpcs://host:port, with the root of {certificate.file}"
                console.print(how, markup=False)
            if cluster.metrics is not None:
                scheme = "http" if certificate is None else "https"
                console.print(f"metrics at {scheme}://{cluster.metrics}/metrics", markup=False)
            console.print(f"token in {cluster.token_file}; Ctrl-C stops", markup=False)
            hold(cluster, lambda: wished_grace(here.name))


def hold(cluster: Cluster, wished: Callable[[], float | None]) -> None:
    """Serve until a signal, and then for as long as its requests take, within the grace.

    Raises:
        KeyboardInterrupt: a second signal: at once.
    """
    try:
        while True:
            time.sleep(WAKE_S)
            interrupts.check()
    except KeyboardInterrupt:
        interrupts.anew()
    grace_s = wished()
    if grace_s is None:
        grace_s = cluster.config.grace
    left = cluster.finish_requests(grace_s) if grace_s else None
    if left:
        cluster.say(f"{left} had not ended after {grace_s:g} s: their clients are told")


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


def stop_running(endpoint: str | None, grace_s: float | None) -> None:
    """Ask a cluster's launcher to stop, and wait until it has.

    ``grace_s``: how long running requests may take to finish; None: as long as `up` was told.

    Raises:
        LaunchError: there is none, or it still runs ``STOP_S`` after the grace.
    """
    target = running(endpoint)
    if grace_s is None:
        grace_s = target.grace_s
    else:
        wish_grace(target.name, grace_s)
    os.kill(target.pid, signal.SIGTERM)
    patience_s = grace_s + STOP_S
    deadline = time.monotonic() + patience_s
    while process_ticks(target.pid) == target.started_ticks:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"cluster {target.name} (process {target.pid}) still runs after {patience_s:g} s"
            )
        time.sleep(0.05)


def connect(
    endpoint: str | None, token_file: Path | None, *, connect_timeout_s: float | None = None
) -> Client:
    """An SDK client for a named endpoint, or for the cluster that runs here.

    ``connect_timeout_s``: how long a request may go without being accepted; default: the SDK's.

    Raises:
        LaunchError: no endpoint was named and no single cluster runs here.
        TokenFileError: the token file cannot be used.
        ConfigError: the endpoint cannot be read, or the environment names unusable certificates.
    """
    from deepinfer.client import Client, ClientConfig

    config = ClientConfig()
    if connect_timeout_s is not None:
        give_up_ms = round(connect_timeout_s * 1000)
        config = replace(
            config,
            connect_give_up_ms=give_up_ms,
            accept_timeout_ms=min(config.accept_timeout_ms, give_up_ms),
        )
    here = running(None) if endpoint is None else None
    if endpoint is not None:
        address = endpoint.rpartition("://")[2]
        here = next((r for r in alive() if address in r.endpoints), None)
    if token_file is None:
        token_file = default_token_file() if here is None else Path(here.token_file)
    if endpoint is not None:
        endpoints = [endpoint]
    else:
        assert here is not None, "or it would have been said that none runs"
        endpoints = list(here.endpoints)
    try:
        token = read_token(token_file)
        return Client(endpoints, token=token, tls=client_tls(here), config=config)
    except TokenFileError:
        raise
    except ValueError as error:
        raise ConfigError(f"--endpoint: {error}") from error
