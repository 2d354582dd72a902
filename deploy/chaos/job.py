"""One cluster of a campaign, in a process of its own: it asks for trials and tells what they found.

Several run on one machine at once: each has its own Ray, state folder, temporary folder and ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deepinfer.deploy.chaos.points import Target
from deepinfer.deploy.chaos.rows import Trial
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.oracle import Answer, Question
from deepinfer.proto.failpoints import Place

LIFE_TRIALS = 200
"""A cluster is replaced after so many: its logs grow, and a start is tried now and then."""
STARTS = 3
"""How often a cluster is tried to be started."""
PORTS_BEGIN, PORTS_END, PORTS_STEP = 21_000, 31_000, 8
"""Where gateways serve: below Linux's ephemeral ports, or another process may take the port of one
that is about to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What one job is told; picklable."""

    job: int
    target: Target
    path: str
    seed: int
    streams: int
    pauses_s: tuple[float, ...]
    config: dict[str, Any]
    """Fields of ``ClusterConfig``, without ports and token file."""
    asked: tuple[tuple[Question, Answer], ...]
    faults: Path
    """A folder for the logs of clusters in which something was wrong."""
    card: str | None = None
    """All that its workers see of CUDA; None: what this process sees."""


@dataclass(frozen=True, slots=True)
class Next:
    """To a job: run this trial."""

    number: int
    point: Place


@dataclass(frozen=True, slots=True)
class Ready:
    """From a job: its cluster serves and waits for a trial."""

    start_s: float
    """What its start took; 0: it was there."""


@dataclass(frozen=True, slots=True)
class Found:
    """From a job: a trial that is through with everything."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class Missed:
    """From a job: nobody came to the point."""

    number: int


@dataclass(frozen=True, slots=True)
class Broken:
    """From a job: its cluster could not be started, or not go on; the trial, if any, is void."""

    number: int | None
    why: str


def run_job(spec: JobSpec, parent: Connection) -> None:
    """Serve the parent until it has no more trials or is gone. The target of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which hangs up
    base = Path(tempfile.mkdtemp(prefix=f"chaos{spec.job}-"))
    for name, value in (
        ("XDG_STATE_HOME", base / "state"),
        ("TMPDIR", base),
        ("RAY_TMPDIR", base),
    ):
        value.mkdir(exist_ok=True)
        os.environ[name] = str(value)
    tempfile.tempdir = None  # found before TMPDIR was set
    _speak_into(base / "job.log")  # Ray and gRPC tell of every death
    if spec.card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.card
    # The token's file would be one for all of the machine's clusters.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = os.urandom(32).hex()
    try:
        _serve(spec, parent, base)
    except (EOFError, BrokenPipeError):
        return
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _serve(spec: JobSpec, parent: Connection, base: Path) -> None:
    failures = 0
    lives = 0
    order: Next | None = None
    while True:
        lives += 1
        if lives > 1 and order is None:  # a cluster is not started for nothing
            parent.send(Ready(0.0))
            order = parent.recv()
            if order is None:
                return
        began = time.perf_counter()
        try:
            with _site(spec, base / f"life{lives}") as site:
                failures = 0
                first, order = order, None
                start_s = time.perf_counter() - began
                if not asyncio.run(_trials(spec, site, parent, start_s, first)):
                    return
        except LaunchError as error:
            failures += 1
            parent.send(Broken(None, f"cluster {spec.job} does not start: {error}"))
            if failures == STARTS:
                return


async def _trials(
    spec: JobSpec, site: Any, parent: Connection, start_s: float, order: Next | None
) -> bool:
    """Run trials on one cluster, ``order`` first if it has been given already.

    Returns:
        Whether another cluster is wanted.
    """
    from deepinfer.client import AsyncClient
    from deepinfer.deploy.chaos.trial import Plan, Trials

    wrong: list[int] = []

    def emit(trial: Trial) -> None:
        if not trial.right:
            wrong.append(trial.number)
        parent.send(Found(trial))

    plan = Plan(
        target=spec.target,
        path=spec.path,
        seed=spec.seed,
        streams=spec.streams,
        pauses_s=spec.pauses_s,
        keep_spare=site.cluster.config.workers * site.nodes > 1,
    )
    endpoints = list(site.cluster.endpoints)
    trials = Trials(site, plan, spec.asked, emit, spec.job)
    async with AsyncClient(endpoints, token=site.cluster.token) as client:
        for _ in range(LIFE_TRIALS):
            if wrong or (spec.target == "node" and len(site.workers) < 2):
                break
            if order is None:
                parent.send(Ready(start_s))
                order = await asyncio.to_thread(parent.recv)
            if order is None:
                await trials.finish()
                if wrong:
                    _keep_logs(site, spec)
                return False
            start_s = 0.0
            number, point = order.number, order.point
            order = None
            try:
                if await trials.run(number, point, client) is None:
                    parent.send(Missed(number))
            except AssertionError as error:
                parent.send(Broken(number, f"trial {number} at {point}: {error}"))
                _keep_logs(site, spec)
                return True
        await trials.finish()
    if wrong:
        _keep_logs(site, spec)
    return True


@contextlib.contextmanager
def _site(spec: JobSpec, base: Path) -> Iterator[Any]:
    """A cluster, and the folder of its failpoints in its processes' environment."""
    from deepinfer.deploy.actors import bind
    from deepinfer.deploy.chaos.nodes import NodeSite, several_nodes
    from deepinfer.deploy.chaos.site import Site, failpoint_folder
    from deepinfer.deploy.cluster import Cluster
    from deepinfer.deploy.config import ClusterConfig
    from deepinfer.deploy.rays import RunningRay

    folder, environment = failpoint_folder(base)
    os.environ.update(environment)  # Ray's processes inherit it
    gateways = spec.config.get("gateways", 1)
    port = _free_ports(gateways, bind)
    config = ClusterConfig(**spec.config, port=port, token_file=str(base / "token"))
    if spec.target != "node":
        with Cluster(config) as cluster:
            yield Site(cluster, folder)
        return
    # Every node has so many workers; here a node has one.
    nodes, config = config.workers, config.model_copy(update={"workers": 1})
    with (
        several_nodes(nodes) as (address, rays),
        Cluster(config, ray=RunningRay(nodes, address=address)) as cluster,
    ):
        site = NodeSite(cluster, folder, nodes, rays=rays)
        status = asyncio.run(site.serving(nodes))
        peers = status["workers"] | status["stores"]
        site.homes = {name: peer["node"] for name, peer in peers.items()}
        yield site


def _speak_into(file: Path) -> None:
    """Let what this process and its children print go into a file."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _free_ports(count: int, bind: Any) -> int:
    """The first of so many free ports in a row; where the search begins differs by process."""
    places = (PORTS_END - PORTS_BEGIN) // PORTS_STEP
    for offset in range(places):
        first = PORTS_BEGIN + PORTS_STEP * ((os.getpid() * 7 + offset) % places)
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                bind("127.0.0.1", port)
            return first
    raise LaunchError(f"no {count} free ports in a row between {PORTS_BEGIN} and {PORTS_END}")


def _keep_logs(site: Any, spec: JobSpec) -> None:
    """Copy what the cluster's processes wrote to where it outlives the cluster."""
    session = site.cluster.ray.session
    if session is None:
        return
    target = spec.faults / f"job{spec.job}-{os.getpid()}-{time.time_ns() // 1_000_000}"
    target.mkdir(parents=True, exist_ok=True)
    for log in [
        *sorted((session / "logs").glob("worker-*")),
        Path(os.environ["TMPDIR"], "job.log"),
    ]:
        if log.stat().st_size:
            shutil.copyfile(log, target / log.name)
