"""A cluster on this machine: Ray, then one detached actor a process.

The launcher is the only creator of actors, so that none dies with another; they find each other
by name in one Ray namespace. It owns the Ray head it starts: when the launcher goes, by whatever
signal, Ray's processes go with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from deepinfer.deploy import interrupts
from deepinfer.deploy.access import CONTROLLER, RayController
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.models import resolve_model
from deepinfer.deploy.running import alive, default_token_file, read_or_make_token
from deepinfer.deploy.tls import check_server_tls, server_tls

if TYPE_CHECKING:
    from deepinfer.kvstore.core.layout import KvLayout
    from deepinfer.workers.model.config import ModelConfig

NAMESPACE = "deepinfer"
LINK_HOST = "127.0.0.1"
"""Where workers connect to gateways whose clients use TLS."""
NODE = "local"
START_TIMEOUT_S = 180.0
POLL_S = 0.1
GOODBYE_S = 2.0
"""How long gateways may take to tell their clients that the cluster stops."""
STOPPED = "the cluster was stopped"
FAILED_START_EXIT_S = 10.0
"""Longer than the launcher takes to ask a process why it did not come up."""
RAY_OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's own object store carries no KV; this is about the least that it accepts."""


class LaunchError(RuntimeError):
    """The cluster could not be started, found or stopped; says why and what to do."""


def quiet(*_: object) -> None:
    """A progress listener that ignores everything."""


@dataclass(slots=True)
class Cluster:
    """A cluster that this process started. A context manager: leaving it stops everything.

    ``worker_env`` is set in the workers' environment; tests arm failpoints with it.

    Raises (on entering):
        LaunchError: an address is taken, the model cannot be served, or a process does not come up.
        ConfigError: the pool cannot hold one block, or the certificates cannot be used.
    """

    config: ClusterConfig
    say: Callable[[str], None] = quiet
    """Told of each step of the start."""
    loading: Callable[[str, int, int], None] = quiet
    """Told the bytes of weights read, and those there are, by worker; and of a download."""
    worker_env: dict[str, str] = field(default_factory=dict)
    endpoints: tuple[str, ...] = ()
    token: str = field(default="", repr=False)
    actors: dict[str, Any] = field(default_factory=dict)
    owns_ray: bool = False
    session: Path | None = None
    """The folder with Ray's sockets and logs; removed unless something failed."""

    @property
    def token_file(self) -> Path:
        named = self.config.token_file
        return Path(named).expanduser() if named else default_token_file()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._stop(keep_logs=isinstance(error, Exception))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(keep_logs=isinstance(error, Exception))

    def pid(self, actor: str) -> int:
        """The process id of an actor, by its name."""
        import ray

        pid: int = ray.get(self.actors[actor].pid.remote(), timeout=START_TIMEOUT_S)
        return pid

    def _start(self) -> None:
        config = self.config
        check_server_tls(config)
        _refuse_taken(config)
        self.token = read_or_make_token(self.token_file)
        self.say(f"opening the model {config.model}")
        model = resolve_model(config.model, progress=self._fetching)
        served, layout = _open(model, config)
        blocks = config.cache_size.blocks_of(layout.block_bytes)
        self.say("starting Ray")
        _import_ray()
        self.owns_ray = True
        with interrupts.held():  # a Ray that is half started leaves processes behind
            self.session = _start_ray(config.log_level)
        self.say("starting controller, store, gateways and workers")
        self._create(model, served, layout, blocks)
        self._await_ready()

    def _create(self, model: Path, served: ModelConfig, layout: KvLayout, blocks: int) -> None:
        """Create every actor; none waits for another."""
        with interrupts.held():
            from deepinfer.controller.actor import ControllerActor, ControllerSettings
            from deepinfer.controller.core.config import ControllerConfig
            from deepinfer.gateway.actor import ControllerAccess, GatewayActor, GatewaySettings
            from deepinfer.gateway.core.config import GatewayConfig
            from deepinfer.kvstore.actor import StoreActor, StoreSettings
            from deepinfer.text.load import load_tokenizer
            from deepinfer.workers.actor import WorkerActor, WorkerSettings
            from deepinfer.workers.core.config import WorkerConfig

        config = self.config
        controller = RayController(NAMESPACE)
        self._actor(
            CONTROLLER,
            ControllerActor,
            ControllerSettings(
                namespace=NAMESPACE,
                token=self.token,
                failed_start_exit_s=FAILED_START_EXIT_S,
                config=ControllerConfig(
                    cpu_offload=config.cpu_offload,
                    max_swapped_requests=config.max_swapped_requests,
                    victims=config.victim_policy,
                    reserve=config.reserve,
                    min_residency_tokens=config.min_residency,
                    orphan_grace_ms=round(config.orphan_grace * 1000),
                ),
            ),
        )
        self._actor(
            f"store-{NODE}",
            StoreActor,
            StoreSettings(
                store=f"store-{NODE}",
                node=NODE,
                budget_bytes=config.max_cpu_offload_mb * 2**20,
                page_bytes=layout.block_bytes,
                slab_bytes=_slab_bytes(config.max_cpu_offload_mb * 2**20),
                same_node=config.store_path != "grpc",
                token=self.token,
                failed_start_exit_s=FAILED_START_EXIT_S,
            ),
            controller.address,
        )
        secret = secrets.token_bytes(32)
        tokenizer = load_tokenizer(model)
        for i in range(config.gateways):
            port = config.port + i if config.port else _free_port(config.host)
            self._actor(
                f"gateway-{i}",
                GatewayActor,
                GatewaySettings(
                    gateway=f"gateway-{i}",
                    model=config.model,
                    model_path=str(model),
                    max_context_tokens=served.max_positions,
                    vocab_size=served.vocab_size,
                    eos_token_ids=tuple(tokenizer.eos_ids),
                    kv_cache_dtype=config.kv_cache_dtype,
                    host=config.host,
                    port=port,
                    tls=server_tls(config),
                    link_port=_free_port(LINK_HOST) if config.tls_cert is not None else 0,
                    token=self.token,
                    failed_start_exit_s=FAILED_START_EXIT_S,
                    secret=secret,
                    config=GatewayConfig(
                        max_live_requests=config.max_live_requests,
                        # Ended ones that are still being read have a stream too.
                        max_streams=2 * config.max_live_requests,
                        orphan_grace_ms=round(config.orphan_grace * 1000),
                    ),
                ),
                ControllerAccess(find=controller.address, status=controller.status),
            )
        for i in range(config.workers):
            self._actor(
                f"worker-{i}",
                WorkerActor,
                WorkerSettings(
                    worker=f"worker-{i}",
                    node=NODE,
                    model_path=str(model),
                    kv_cache_dtype=config.kv_cache_dtype,
                    threads=config.threads,
                    store_path=config.store_path,
                    token=self.token,
                    failed_start_exit_s=FAILED_START_EXIT_S,
                    config=WorkerConfig(
                        blocks_total=blocks,
                        block_size=config.block_size,
                        block_bytes=layout.block_bytes,
                        max_batch_tokens=config.max_batch_tokens,
                        max_batch_seqs=min(64, config.max_batch_tokens),
                        prefill_chunk_tokens=config.prefill_chunk_tokens,
                        prefix_cache=config.prefix_cache,
                    ),
                ),
                controller.address,
                env=_worker_env(config) | self.worker_env,
            )

    def _actor(
        self, name: str, kind: type, *args: object, env: dict[str, str] | None = None
    ) -> None:
        import ray

        self.actors[name] = (
            ray.remote(kind)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=0,
                runtime_env={"env_vars": env} if env else None,
            )
            .remote(*args)
        )

    def _await_ready(self) -> None:
        """Wait until every process serves and the controller has heard from all of them."""
        import ray
        from ray.exceptions import RayError

        deadline = time.monotonic() + START_TIMEOUT_S
        addresses: dict[str, str] = {}
        waiting = {
            (actor.pid if name.startswith("worker-") else actor.address).remote(): name
            for name, actor in self.actors.items()
        }
        loading: dict[Any, str] = {}
        """Workers that were asked how far they are."""
        read: dict[str, int] = {}
        while waiting:
            self.say(f"waiting for {', '.join(waiting.values())}")
            for name in waiting.values():
                if name.startswith("worker-") and name not in loading.values():
                    loading[self.actors[name].load_progress.remote()] = name
            done, _ = ray.wait([*waiting, *loading], num_returns=1, timeout=POLL_S)
            interrupts.check()
            ready = [answer for answer in done if answer in waiting]
            for answer in done:
                name = loading.pop(answer, None) or waiting.pop(answer)
                try:
                    said = ray.get(answer)
                except RayError as error:
                    where = f" (logs in {self.session}/logs)" if self.session else ""
                    raise LaunchError(f"{name} did not come up: {_cause(error)}{where}") from error
                if not isinstance(said, tuple):
                    addresses[name] = said
                elif said[1]:
                    self.loading(name, *said)
                    if said[0] > read.get(name, 0):  # a large model takes as long as it takes
                        read[name] = said[0]
                        deadline = time.monotonic() + START_TIMEOUT_S
            if done and not ready:
                time.sleep(POLL_S)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(waiting.values())
                raise LaunchError(f"{names} did not come up in {START_TIMEOUT_S:g} s")
        self.endpoints = tuple(addresses[f"gateway-{i}"] for i in range(self.config.gateways))
        expected = (self.config.workers, 1, self.config.gateways)
        while True:
            status = ray.get(self.actors[CONTROLLER].status.remote(), timeout=START_TIMEOUT_S)
            here = tuple(len(status[kind]) for kind in ("workers", "stores", "gateways"))
            if status["ready"] and status["all_reported"] and here == expected:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the controller has heard from {here} workers, stores and gateways of "
                    f"{expected} after {START_TIMEOUT_S:g} s"
                )
            interrupts.check()
            time.sleep(0.05)

    def _fetching(self, done: int, total: int) -> None:
        self.loading(f"fetching {self.config.model}", done, total)

    def _stop(self, *, keep_logs: bool) -> None:
        """Stop every actor and Ray. A second Ctrl-C does not cut it short."""
        with interrupts.ignored():
            if not self.owns_ray:
                return
            import ray
            from ray.exceptions import RayError

            if ray.is_initialized():
                if self.endpoints:
                    gateways = [a for n, a in self.actors.items() if n.startswith("gateway-")]
                    told = [gateway.close.remote(STOPPED) for gateway in gateways]
                    ray.wait(told, num_returns=len(told), timeout=GOODBYE_S)
                for actor in self.actors.values():
                    with contextlib.suppress(RayError, ValueError):
                        ray.kill(actor, no_restart=True)
            ray.shutdown()  # of one that came up only half, too
            self.actors.clear()
            self.endpoints = ()
            self.owns_ray = False
            if self.session is not None and not keep_logs:
                _remove_session(self.session)


def _worker_env(config: ClusterConfig) -> dict[str, str]:
    """What a worker's process must know before it imports torch."""
    # OpenMP's threads spin while they wait, which starves everyone else on a machine whose cores
    # are all in use: a decode step of two threads was seen to take 15 times as long.
    return {"OMP_WAIT_POLICY": "PASSIVE"} if config.threads > 1 else {}


def _slab_bytes(budget_bytes: int) -> int:
    """How much memory a store takes at a time: the swap that needs a new slab waits for it.

    At least 16 MiB, at most 128 MiB (few registrations of pinned memory), 64 slabs in between.
    """
    return min(128 * 2**20, max(16 * 2**20, budget_bytes // 64))


def _refuse_taken(config: ClusterConfig) -> None:
    """Raise if a gateway's port is in use; name the cluster that has it if it is one of ours."""
    # No port is asked for by 0, but the host may still be none of this machine's.
    for port in range(config.port, config.port + config.gateways) if config.port else (0,):
        where = f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"
        if any(where in cluster.endpoints for cluster in alive()):
            raise LaunchError(
                f"a cluster already serves at {where}: stop it with `deepinfer down --endpoint "
                f"{where}` or name another --port"
            )
        try:
            _bind(config.host, port)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {where}: {error.strerror}: name another --port or --host"
            ) from error


def _bind(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        bound: int = probe.getsockname()[1]
        return bound


def _free_port(host: str) -> int:
    """A port that is free now. Gateways need a fixed one: a restarted one serves there again."""
    return _bind(host, 0)


def _open(model: Path, config: ClusterConfig) -> tuple[ModelConfig, KvLayout]:
    """Check that the model can be served, and how large its KV blocks are.

    Raises:
        LaunchError: damaged, incomplete or unsupported; or a missing tokenizer.
    """
    with interrupts.held():
        from deepinfer.kvstore.core.layout import resolve_kv_dtype
        from deepinfer.text.load import load_tokenizer
        from deepinfer.workers.model.decoder import kv_layout
        from deepinfer.workers.model.load import load_model

    try:
        served = load_model(model).config
        load_tokenizer(model)
    except (OSError, ValueError) as error:
        raise LaunchError(f"model {config.model}: {error}") from error
    return served, kv_layout(served, resolve_kv_dtype(config.kv_cache_dtype), config.block_size)


def _import_ray() -> None:
    """Import Ray as this launcher needs it.

    Raises:
        LaunchError: this process has started or joined a Ray already.
    """
    if "ray" not in _loaded():
        # Read when Ray is imported; a process that imported it before has what it chose, and
        # ray.init turns token authentication on by itself where nobody chose.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at niceness 15, for batch jobs; these are servers.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would join a cluster named here; the launcher wants one of its own.
    os.environ.pop("RAY_ADDRESS", None)
    with interrupts.held():
        import ray

    if ray.is_initialized():
        raise LaunchError("this process already uses Ray: stop that first (ray.shutdown())")


def _start_ray(log_level: str) -> Path | None:
    """Start a Ray head of our own, on loopback, with token authentication.

    Returns:
        The folder of its session.
    """
    import ray

    try:
        context = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=RAY_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            log_to_driver=log_level == "debug",
            logging_level=logging.WARNING,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise LaunchError(f"Ray does not start: {_cause(error)}") from error
    folder = context.address_info.get("session_dir")
    return Path(folder) if folder else None


def _remove_session(folder: Path) -> None:
    """Remove what Ray leaves of a session: logs, sockets, and the link to the latest one."""
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _loaded() -> frozenset[str]:
    return frozenset(sys.modules)


def _cause(error: Exception) -> str:
    """The last line of what Ray says, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
