"""A running cluster as a trial sees it: who lives, what they hold, and how they are stopped.

Asks the controller's actor, not a gateway: a gateway may be the one that stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.deploy.access import CONTROLLER
from deepinfer.deploy.cluster import Cluster
from deepinfer.proto.failpoints import FOLDER_VARIABLE

ANSWER_S = 2.0
"""How long an actor may take to answer before it counts as not there."""
POLL_S = 0.005
SETTLE_PATIENCE_S = 60.0
RETURN_PATIENCE_S = 120.0

Status = Mapping[str, Any]
KINDS = ("workers", "stores", "gateways")


@dataclass(slots=True)
class Site:
    """One cluster. ``folder`` is where its processes look for failpoints."""

    cluster: Cluster
    folder: Path
    nodes: int = 1
    """Machines that compute."""
    lost: set[str] = field(default_factory=set)
    """Actors that will never come back: their machine is gone."""

    @property
    def workers(self) -> list[str]:
        return self.named("worker-")

    def named(self, prefix: str) -> list[str]:
        """The actors of a kind that may still live."""
        found = [name for name in self.cluster.actors if name.startswith(prefix)]
        return sorted(set(found) - self.lost)

    async def status(self) -> Status | None:
        """The controller's document; None if it does not answer."""
        answer = await self._ask(CONTROLLER, "status")
        return answer if isinstance(answer, Mapping) else None

    async def pids(self, names: Iterable[str]) -> dict[int, str]:
        """Which process each of these actors is; those that do not answer are left out."""
        asked = list(names)
        found = await asyncio.gather(*(self._ask(name, "pid") for name in asked))
        return {p: n for n, p in zip(asked, found, strict=True) if isinstance(p, int)}

    async def _ask(self, actor: str, method: str) -> object:
        from ray.exceptions import RayError  # how Ray starts is for the launcher

        try:
            call: Any = getattr(self.cluster.actors[actor], method).remote()
            return await asyncio.wait_for(call, ANSWER_S)
        except (RayError, TimeoutError):
            return None

    def doomed(self, name: str, pid: int) -> list[int]:
        """The processes that go when ``name`` is killed: here its own alone."""
        return [pid]

    def away(self, name: str) -> set[str]:
        """The actors that go with it."""
        return {name}

    async def serving(self, spare: int, absent: Iterable[str] = ()) -> Status:
        """Wait until the controller knows everyone but ``absent``; of workers, ``spare`` at least.

        Raises:
            AssertionError: patience ended; says who is missing.
        """
        deadline = time.monotonic() + RETURN_PATIENCE_S
        missing = ["no status"]
        while time.monotonic() < deadline:
            status = await self.status()
            if status is not None:
                missing = list(self._missing(status, spare, set(absent)))
                if not missing:
                    return status
            await asyncio.sleep(0.02)
        raise AssertionError("; ".join(missing))

    def _missing(self, status: Status, spare: int, absent: set[str]) -> Iterator[str]:
        if not (status["ready"] and status["all_reported"]):
            yield "the controller has not heard from everyone"
        workers = [n for n, w in status["workers"].items() if w["state"] == "serving"]
        if len(workers) < min(spare, len(self.workers)):
            yield f"of {len(self.workers)} workers only {sorted(workers)} serve"
        for kind, prefix in (("stores", "store-"), ("gateways", "gateway-")):
            for name in set(self.named(prefix)) - absent:
                if not status[kind].get(name, {}).get("alive"):
                    yield f"{name} is not there"

    async def settled(self, lives: Mapping[str, int]) -> list[str]:
        """Wait until nothing is held by anybody that lives.

        ``lives`` has the lives in which actors were killed: those may still be missing.

        Returns:
            What is left after ``SETTLE_PATIENCE_S``: nothing, if nothing leaks.
        """
        deadline = time.monotonic() + SETTLE_PATIENCE_S
        left = ["no status"]
        while left and time.monotonic() < deadline:
            status = await self.status()
            if status is not None:
                left = list(self.left_over(status, lives))
                held, quarantined = await self.pages()
                if held:
                    left.append(f"stores hold {held} pages, {quarantined} in quarantine")
                if not left:
                    break
            await asyncio.sleep(0.02)
        return left

    def left_over(self, status: Status, lives: Mapping[str, int]) -> Iterator[str]:
        """What is held though no request runs, a sentence each.

        Of every pool free + held = total, so all must be free; every byte of a store must be.
        """
        if not status["ready"]:
            yield "the controller has not heard from enough"
        if status["epoch"] <= lives.get(CONTROLLER, -1):
            yield "the controller is the old one"
        for name, worker in status["workers"].items():
            if worker["state"] == "gone" or worker["incarnation"] == lives.get(name):
                if name not in lives and name not in self.lost:
                    yield f"{name} is {worker['state']}"
            elif worker["blocks_free"] != worker["blocks_total"] or worker["residents"]:
                yield f"{name} has {worker['blocks_free']} of {worker['blocks_total']} blocks free"
        for name, store in status["stores"].items():
            if not store["alive"]:
                if name not in lives and name not in self.lost:
                    yield f"{name} is gone"
            elif store["used_bytes"] or store["tickets"]:
                yield f"{name} holds {store['used_bytes']} bytes, {store['tickets']} tickets"
        if status["sequences"]:
            known = [f"{s['request']} {s['state']}" for s in status["sequences"]]
            yield f"sequences are known: {', '.join(known)}"

    async def pages(self) -> tuple[int, int]:
        """(pages that are not free, of these in quarantine) of all stores, by their own word.

        A store that does not answer holds nothing that could be told.
        """
        asked = [self._ask(name, "status") for name in self.named("store-")]
        found = [f for f in await asyncio.gather(*asked) if isinstance(f, Mapping) and f]
        return (
            sum(int(f["pages_total"]) - int(f["pages_free"]) for f in found),
            sum(int(f["pages_quarantined"]) for f in found),
        )


def lives_of(status: Status, actors: Iterable[str]) -> dict[str, int]:
    """Which life of each actor the status shows; those it does not know are left out."""
    lives = {CONTROLLER: status["epoch"]}
    for kind in KINDS:
        lives |= {name: peer["incarnation"] for name, peer in status[kind].items()}
    return {actor: lives[actor] for actor in actors if actor in lives}


def is_gone(status: Status, lives: Mapping[str, int]) -> bool:
    """Whether the controller has noticed that none of these lives goes on."""
    for name, life in lives.items():
        if name == CONTROLLER:
            if status["epoch"] <= life:
                return False
            continue
        peer = next((status[kind][name] for kind in KINDS if name in status[kind]), None)
        if peer is None or peer["incarnation"] != life:
            continue
        if peer.get("state") in ("serving", "draining") or peer.get("alive"):
            return False
    return True


def is_back(status: Status, lives: Mapping[str, int]) -> bool:
    """Whether all of these actors serve in a later life."""
    if not status["ready"] or status["epoch"] <= lives.get(CONTROLLER, -1):
        return False
    for name, life in lives.items():
        if name == CONTROLLER:
            continue
        peer = next((status[kind][name] for kind in KINDS if name in status[kind]), None)
        if peer is None or peer["incarnation"] <= life:
            return False
        if not (peer.get("state") == "serving" or peer.get("alive")):
            return False
    return True


def send(pids: Iterable[int], number: signal.Signals) -> float:
    """Send a signal to processes, those that are gone left out; returns when, by perf_counter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return time.perf_counter()


def failpoint_folder(base: Path) -> tuple[Path, dict[str, str]]:
    """A folder for failpoints, and the environment that makes processes look there."""
    folder = base / "failpoints"
    folder.mkdir(parents=True)
    return folder, {FOLDER_VARIABLE: str(folder)}
