"""The Ray under a cluster: a head of our own, or one that runs already.

Both are asked to ``prepare``, for the ``device`` of workers, to ``start`` (which says where actors
go) and to ``stop``; nothing is left of the first, and the second is left as it was found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deepinfer.deploy import interrupts
from deepinfer.deploy.access import CONTROLLER, NAMESPACE
from deepinfer.deploy.config import ClusterConfig, Device
from deepinfer.deploy.devices import local_device, ray_device
from deepinfer.deploy.errors import LaunchError, cause_of
from deepinfer.deploy.leftovers import Mark, leave_mark, remove_link, remove_mark, sweep
from deepinfer.deploy.nodes import HERE, Nodes, check_reachable, choose_nodes

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's own object store carries no KV; this is about the least that it accepts."""
NODES_TIMEOUT_S = 180.0
"""How long Ray's nodes may take to join, if their number is given."""
GONE_S = 2.0
"""How long killed actors may take to lose their names."""


@dataclass(slots=True)
class OwnRay:
    """A Ray head on this machine's loopback, started and stopped with the cluster."""

    starting: str = "starting Ray"
    session: Path | None = None
    """The folder with Ray's sockets and logs; removed unless something failed."""
    swept: tuple[str, ...] = ()
    """What earlier launchers that were killed had left here, a sentence for each."""
    _mark: Mark | None = None
    _started: bool = False
    _cards: int = 0

    def prepare(self) -> None:
        """Remove what launchers that were killed have left on this machine."""
        self.swept = sweep()

    def device(self, config: ClusterConfig, say: Callable[[str], None]) -> Device:
        """What workers compute on.

        Raises:
            LaunchError: a card was asked for, and none can serve.
        """
        device, self._cards = local_device(config, say)
        return device

    def start(self, config: ClusterConfig) -> Nodes:
        """Start it.

        Raises:
            LaunchError: this process has started or joined a Ray already.
        """
        self._mark = leave_mark()
        _import_ray()
        self._started = True
        with interrupts.held():  # a Ray that is half started leaves processes behind
            self.session = _start_ray(config.log_level, self._cards)
        here = replace(HERE.home, cards=self._cards)
        return Nodes(home=here, computing=(here,))

    @property
    def up(self) -> bool:
        """Whether actors can be called."""
        return self._started and _initialized()

    def stop(self, killed: tuple[str, ...], *, keep_logs: bool) -> None:
        """Stop it, half started or not, and whoever is left in it."""
        if self._started:
            import ray

            ray.shutdown()  # of one that came up only half, too
            self._started = False
            if self.session is not None and not keep_logs:
                shutil.rmtree(self.session, ignore_errors=True)
                remove_link(self.session.parent)
        if self._mark is not None:
            remove_mark(self._mark)
            self._mark = None


@dataclass(slots=True)
class RunningRay:
    """A Ray that others started: found by ``RAY_ADDRESS``, as a Ray job has it, or on this machine.

    ``wanted`` is how many of its nodes are to compute.
    """

    wanted: int | Literal["all"] = "all"
    address: str = "auto"
    starting: str = "looking for Ray's nodes"
    session: Path | None = None
    """The folder with Ray's logs on this node."""
    swept: tuple[str, ...] = ()
    """Nothing: what runs in somebody else's Ray is not removed without being asked to."""
    _joined: bool = False
    _device: Device = "cpu"

    def prepare(self) -> None:
        """Join it.

        Raises:
            LaunchError: there is none, or it does not let us in, or a cluster runs there already.
        """
        self.join()
        if CONTROLLER in members():
            raise LaunchError(
                "a DeepInfer cluster runs in this Ray already: stop its job (`ray job stop`), or "
                "remove a detached one with `python -m deepinfer.deploy.job --down`"
            )

    def device(self, config: ClusterConfig, say: Callable[[str], None]) -> Device:
        """What workers compute on: cards, if auto finds a node that has some."""
        import ray

        self._device = ray_device(config, ray.nodes())  # type: ignore[no-untyped-call]
        return self._device

    def start(self, config: ClusterConfig) -> Nodes:
        """Wait for as many nodes as are wanted.

        Raises:
            LaunchError: it has too few nodes, or they could not reach each other.
        """
        deadline = time.monotonic() + NODES_TIMEOUT_S
        while True:
            try:
                nodes = self._nodes()
                break
            except LaunchError:
                if self.wanted == "all" or time.monotonic() > deadline:
                    raise
            interrupts.check()
            time.sleep(0.5)
        check_reachable(config, nodes)
        return nodes

    def join(self) -> None:
        """Connect this process.

        Raises:
            LaunchError: there is no Ray, or it does not let us in.
        """
        with interrupts.held():
            import ray
            from ray.exceptions import RayError
        if ray.is_initialized():
            raise LaunchError("this process already uses Ray: stop that first (ray.shutdown())")
        try:
            with interrupts.held():
                context: Any = ray.init(
                    address=self.address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
        except (ConnectionError, RuntimeError, RayError) as error:
            raise LaunchError(f"cannot join Ray: {cause_of(error)}") from error
        self._joined = True
        folder = context.address_info.get("session_dir")
        self.session = Path(folder) if folder else None

    @property
    def up(self) -> bool:
        """Whether actors can be called."""
        return self._joined and _initialized()

    def stop(self, killed: tuple[str, ...], *, keep_logs: bool) -> None:
        """Leave it, once the killed actors have lost their names.

        Raises:
            LaunchError: some still have theirs after ``GONE_S``.
        """
        if not self._joined:
            return
        import ray

        try:
            if ray.is_initialized():
                await_gone(killed)
        finally:
            self._joined = False
            ray.shutdown()

    def _nodes(self) -> Nodes:
        import ray

        records = ray.nodes()  # type: ignore[no-untyped-call]
        return choose_nodes(records, self.wanted, self._device)


def members() -> tuple[str, ...]:
    """The names of the cluster's actors in the Ray that this process has joined."""
    import ray.util

    listed = ray.util.list_named_actors(all_namespaces=True)
    return tuple(sorted(each["name"] for each in listed if each["namespace"] == NAMESPACE))


def await_gone(names: tuple[str, ...]) -> None:
    """Wait until killed actors have lost their names.

    Raises:
        LaunchError: some still have theirs after ``GONE_S``.
    """
    deadline = time.monotonic() + GONE_S
    while left := [name for name in members() if name in names]:
        if time.monotonic() > deadline:
            raise LaunchError(f"still there {GONE_S:g} s after they were killed: {', '.join(left)}")
        time.sleep(0.05)


def _import_ray() -> None:
    """Import Ray as this launcher needs it.

    Raises:
        LaunchError: this process has started or joined a Ray already.
    """
    if "ray" not in _loaded():
        # Read when Ray is imported; a process that imported it before has what it chose, and
        # ray.init turns token authentication on by itself where nobody chose.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Or Ray takes a loopback address for a mistake, and this machine's own for it: then all of
        # its processes listen on every interface. Read when Ray is imported, too.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's head keeps a record of each of the last 100,000 calls, orders to workers among them, and
    # grows for hours by that; nobody reads them here.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray runs its workers at niceness 15, for batch jobs; these are servers.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would join a cluster named here; the launcher wants one of its own.
    os.environ.pop("RAY_ADDRESS", None)
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        make_ray_token()
    with interrupts.held():
        import ray

    if ray.is_initialized():
        raise LaunchError("this process already uses Ray: stop that first (ray.shutdown())")


def make_ray_token() -> None:
    """Make the token file that Ray would make for its first start on this machine.

    Ray's own way is no single step: of two clusters that begin at once each would make a token,
    and the processes of one would read the other's. Where it cannot be written Ray says so itself.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):  # FileExistsError: another process was first
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        mode = stat.S_IRUSR | stat.S_IWUSR
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def _start_ray(log_level: str, cards: int) -> Path | None:
    """Start a Ray head of our own, on loopback, with token authentication.

    Returns:
        The folder of its session.
    """
    import ray

    try:
        context: Any = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            num_gpus=cards,
            _node_ip_address="127.0.0.1",
            log_to_driver=log_level == "debug",
            logging_level=logging.WARNING,
        )
    except Exception as error:  # Ray says no more than that where its own processes do not come up
        raise LaunchError(f"Ray does not start: {cause_of(error)}") from error
    folder = context.address_info.get("session_dir")
    return Path(folder) if folder else None


def _loaded() -> frozenset[str]:
    return frozenset(sys.modules)


def _initialized() -> bool:
    import ray

    return bool(ray.is_initialized())
