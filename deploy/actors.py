"""The actors of a cluster: what each is told, where it runs, and whether all of them serve."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.deploy import interrupts
from deepinfer.deploy.access import CONTROLLER, NAMESPACE, RayController
from deepinfer.deploy.config import ClusterConfig, Device
from deepinfer.deploy.devices import share_cards
from deepinfer.deploy.errors import LaunchError, cause_of
from deepinfer.deploy.kv_quality import quality_settings
from deepinfer.deploy.nodes import Node, Nodes, advertised_host
from deepinfer.deploy.precision import precision_settings
from deepinfer.deploy.running import TOKEN_BYTES
from deepinfer.deploy.tls import server_tls

if TYPE_CHECKING:
    from deepinfer.controller.scrape import ScrapeSettings
    from deepinfer.kvstore.core.layout import KvLayout
    from deepinfer.workers.model.config import ModelConfig
    from deepinfer.workers.quality_settings import QualitySettings

START_TIMEOUT_S = 180.0
METRICS_TIMEOUT_S = 10.0
POLL_S = 0.1
GOODBYE_S = 2.0
"""How long gateways may take to tell their clients that the cluster stops."""
STOPPED = "the cluster was stopped"
FAILED_START_EXIT_S = 10.0
"""Longer than the launcher takes to ask a process why it did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model that can be served, and what its KV looks like."""

    path: Path
    config: ModelConfig
    layout: KvLayout
    device: Device = "cpu"
    blocks: int | None
    """In each worker's pool; None: what fits on its card."""


@dataclass(slots=True)
class Actors:
    """Every actor of one cluster, by name, as far as it was created here."""

    config: ClusterConfig
    nodes: Nodes
    token: str = field(repr=False)
    """The clients'."""
    handles: dict[str, Any] = field(default_factory=dict)
    cluster_token: str = field(
        default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False
    )
    """What its processes prove to each other that they are: no client has it."""
    operator_token: str = field(
        default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False
    )
    """Who has it may drain and restart them."""

    def create(self, model: Served, worker_env: dict[str, str]) -> None:
        """Create all; none waits for another.

        Raises:
            LaunchError: another cluster has taken the names meanwhile.
        """
        self._create_controller(model)
        for node in self.nodes.computing:
            self._create_store(model, node)
        self._create_gateways(model)
        quality = quality_settings(self.config, model.path, model.layout.dtype.name)
        number = 0
        for node in self.nodes.computing:
            for _ in range(self.config.workers):
                self._create_worker(f"worker-{number}", model, node, worker_env, quality)
                number += 1

    def _create_controller(self, model: Served) -> None:
        with interrupts.held():
            from deepinfer.controller.actor import ControllerActor, ControllerSettings
            from deepinfer.controller.core.config import ControllerConfig

        config = self.config
        self._actor(
            CONTROLLER,
            self.nodes.home,
            ControllerActor,
            ControllerSettings(
                namespace=NAMESPACE,
                token=self.token,
                cluster_token=self.cluster_token,
                operator_token=self.operator_token,
                host=self.nodes.home.address,
                metrics=_scrape_settings(config),
                model=config.model,
                kv_cache_dtype=model.layout.dtype.name,
                failed_start_exit_s=FAILED_START_EXIT_S,
                config=ControllerConfig(
                    cpu_offload=config.cpu_offload,
                    max_swapped_requests=config.max_swapped_requests,
                    victims=config.victim_policy,
                    precision=precision_settings(config),
                    deterministic=config.deterministic,
                    shed=config.shed and not config.deterministic,
                    shed_exact_wait_ms=config.shed_exact_wait_ms,
                    reserve=config.reserve,
                    min_residency_tokens=config.min_residency,
                    prefetch_bytes_max=config.prefetch_mb * 2**20,
                    stores_are_mapped=config.store_path != "grpc",
                    orphan_grace_ms=round(config.orphan_grace * 1000),
                ),
            ),
        )

    def _create_store(self, model: Served, node: Node) -> None:
        with interrupts.held():
            from deepinfer.kvstore.actor import StoreActor, StoreSettings

        config = self.config
        self._actor(
            f"store-{node.name}",
            node,
            StoreActor,
            StoreSettings(
                store=f"store-{node.name}",
                node=node.name,
                budget_bytes=config.max_cpu_offload_mb * 2**20,
                page_bytes=model.layout.block_bytes,
                slab_bytes=_slab_bytes(config.max_cpu_offload_mb * 2**20),
                host=node.address,
                same_node=config.store_path != "grpc",
                token=self.cluster_token,
                failed_start_exit_s=FAILED_START_EXIT_S,
            ),
            RayController(NAMESPACE).address,
        )

    def _create_gateways(self, model: Served) -> None:
        with interrupts.held():
            from deepinfer.gateway.actor import ControllerAccess, GatewayActor, GatewaySettings
            from deepinfer.gateway.core.config import GatewayConfig
            from deepinfer.text.load import load_tokenizer

        config = self.config
        controller = RayController(NAMESPACE)
        link_host = self.nodes.home.address
        secret = secrets.token_bytes(32)
        tokenizer = load_tokenizer(model.path)
        for i in range(config.gateways):
            port = config.port + i if config.port else free_port(config.host)
            self._actor(
                f"gateway-{i}",
                self.nodes.home,
                GatewayActor,
                GatewaySettings(
                    gateway=f"gateway-{i}",
                    model=config.model,
                    model_path=str(model.path),
                    max_context_tokens=model.config.max_positions,
                    vocab_size=model.config.vocab_size,
                    eos_token_ids=tuple(tokenizer.eos_ids),
                    kv_cache_dtype=model.layout.dtype.name,
                    host=config.host,
                    port=port,
                    advertised_host=advertised_host(config, self.nodes),
                    tls=server_tls(config),
                    link_host=link_host,
                    link_port=free_port(link_host) if config.tls_cert else 0,
                    token=self.token,
                    cluster_token=self.cluster_token,
                    failed_start_exit_s=FAILED_START_EXIT_S,
                    secret=secret,
                    config=GatewayConfig(
                        max_live_requests=config.max_live_requests,
                        # Ended ones that are still being read have a stream too.
                        max_streams=2 * config.max_live_requests,
                        orphan_grace_ms=round(config.orphan_grace * 1000),
                        lifetime_ms=max(1, round(config.request_timeout * 1000)),
                        unread_ms=max(1, round(config.unread_timeout * 1000)),
                    ),
                ),
                ControllerAccess(find=controller.address, status=controller.status),
            )

    def _create_worker(
        self,
        name: str,
        model: Served,
        node: Node,
        env: dict[str, str],
        quality: QualitySettings | None,
    ) -> None:
        with interrupts.held():
            from deepinfer.workers.actor import WorkerActor, WorkerSettings
            from deepinfer.workers.core.config import WorkerConfig
            from deepinfer.workers.gpu.settings import GpuSettings

        config = self.config
        gpu, share = None, 0.0
        if model.device == "cuda":
            share = share_cards(config.workers, node.cards).of_card
            gpu = GpuSettings(
                memory_utilization=config.gpu_memory_utilization * share,
                shared=share < 1,
                fill_card=model.blocks is None,
                probe=config.gpu_probe,
                deterministic=config.deterministic,
            )
        self._actor(
            name,
            node,
            WorkerActor,
            WorkerSettings(
                worker=name,
                node=node.name,
                model_path=str(model.path),
                kv_cache_dtype=config.kv_cache_dtype,
                weights=config.weights,
                precision_levels=config.precision_levels,
                fp8_products=config.fp8_products,
                shed=config.sheds(model.device),
                shed_head=config.shed_head,
                start_shed=config.start_shed,
                threads=config.threads,
                deterministic=config.deterministic,
                gpu=gpu,
                quality=quality,
                store_path=config.store_path,
                token=self.cluster_token,
                failed_start_exit_s=FAILED_START_EXIT_S,
                config=WorkerConfig(
                    blocks_total=1 if model.blocks is None else model.blocks,
                    block_size=config.block_size,
                    block_bytes=model.layout.block_bytes,
                    max_batch_tokens=config.max_batch_tokens,
                    max_batch_seqs=min(64, config.max_batch_tokens),
                    prefill_chunk_tokens=config.prefill_chunk_tokens,
                    prefix_cache=config.prefix_cache,
                    prefetch_bytes_max=config.prefetch_mb * 2**20,
                    step_timeout_ms=max(1, round(config.step_timeout * 1000)),
                ),
            ),
            RayController(NAMESPACE).address,
            env=_worker_env(config) | env,
            num_gpus=share,
        )

    def _actor(
        self,
        name: str,
        node: Node,
        kind: type,
        *args: object,
        env: dict[str, str] | None = None,
        num_gpus: float = 0.0,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {}
        if node.ray_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
        try:
            self.handles[name] = (
                ray.remote(kind)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    max_restarts=-1,
                    max_task_retries=0,
                    num_cpus=0,
                    num_gpus=num_gpus,
                    runtime_env={"env_vars": env} if env else None,
                    **options,
                )
                .remote(*args)
            )
        except ValueError as error:  # what Ray raises for a name that is taken
            raise LaunchError(f"{name}: another cluster has just started in this Ray") from error

    def await_ready(
        self,
        say: Callable[[str], None],
        loading: Callable[[str, int, int], None],
        session: Path | None,
    ) -> tuple[str, ...]:
        """Wait until every process serves and the controller has heard from all of them.

        Returns:
            host:port of each gateway.

        Raises:
            LaunchError: one did not come up; says why, if it has said so.
        """
        import ray

        deadline = time.monotonic() + START_TIMEOUT_S
        addresses: dict[str, str] = {}
        waiting = {
            (actor.pid if name.startswith("worker-") else actor.address).remote(): name
            for name, actor in self.handles.items()
        }
        asked: dict[Any, str] = {}
        """Workers that were asked how far they are."""
        read: dict[str, int] = {}
        while waiting:
            say(f"waiting for {', '.join(waiting.values())}")
            # Two waits: in one, for the first of many, the worker that answers how far it is again
            # and again was seen to keep those that had come up from ever being told.
            ready, _ = ray.wait([*waiting], num_returns=len(waiting), timeout=POLL_S)
            interrupts.check()
            for answer in ready:
                name = waiting.pop(answer)
                said = self._answer(name, answer, session)
                if name.startswith("worker-"):
                    # Once more, for one that loads faster than it is asked.
                    last = self.handles[name].load_progress.remote()
                    loading(name, *self._answer(name, last, session))
                else:
                    addresses[name] = said
            for name in waiting.values():
                if name.startswith("worker-") and name not in asked.values():
                    asked[self.handles[name].load_progress.remote()] = name
            told, _ = ray.wait([*asked], num_returns=len(asked), timeout=0) if asked else ([], [])
            for answer in told:
                name = asked.pop(answer)
                bytes_read, bytes_total = self._answer(name, answer, session)
                if bytes_total:
                    loading(name, bytes_read, bytes_total)
                if bytes_read > read.get(name, 0):  # a large model takes as long as it takes
                    read[name] = bytes_read
                    deadline = time.monotonic() + START_TIMEOUT_S
            if waiting and time.monotonic() > deadline:
                names = ", ".join(waiting.values())
                raise LaunchError(f"{names} did not come up in {START_TIMEOUT_S:g} s")
        self._await_reports(deadline)
        return tuple(addresses[f"gateway-{i}"] for i in range(self.config.gateways))

    def notes(self) -> tuple[str, ...]:
        """What the workers have to say of their devices, a line each; they serve."""
        import ray

        workers = [name for name in self.handles if name.startswith("worker-")]
        asked = [self.handles[name].notes.remote() for name in workers]
        said = ray.get(asked, timeout=START_TIMEOUT_S)
        return tuple(
            f"{name}: {line}" for name, lines in zip(workers, said, strict=True) for line in lines
        )

    def _answer(self, name: str, answer: Any, session: Path | None) -> Any:
        """What an actor said.

        Raises:
            LaunchError: it could not start.
        """
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(answer)
        except RayError as error:
            where = f" (logs in {session}/logs)" if session else ""
            raise LaunchError(f"{name} did not come up: {cause_of(error)}{where}") from error

    def await_metrics(self) -> str | None:
        """Wait until ``/metrics`` is served; return where, host:port, or None if nowhere.

        Raises:
            LaunchError: it is not.
        """
        import ray

        if self.config.metrics_fixed_port == 0:
            return None
        deadline = time.monotonic() + METRICS_TIMEOUT_S
        answer = self.handles[CONTROLLER].metrics_address.remote()
        while not ray.wait([answer], timeout=POLL_S)[0]:
            interrupts.check()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"/metrics is not served after {METRICS_TIMEOUT_S:g} s: its port was taken "
                    "meanwhile: name another --metrics-port"
                )
        where: str = ray.get(answer)
        return where

    def _await_reports(self, deadline: float) -> None:
        import ray

        computing = len(self.nodes.computing)
        expected = (self.config.workers * computing, computing, self.config.gateways)
        while True:
            status = ray.get(self.handles[CONTROLLER].status.remote(), timeout=START_TIMEOUT_S)
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


def end_actors(handles: Mapping[str, Any], *, serving: bool) -> None:
    """Kill actors for good; their gateways say goodbye first, if they serve."""
    import ray
    from ray.exceptions import RayError

    if serving:
        told = [a.close.remote(STOPPED) for n, a in handles.items() if n.startswith("gateway-")]
        ray.wait(told, num_returns=len(told), timeout=GOODBYE_S)
    for actor in handles.values():
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)


def _scrape_settings(config: ClusterConfig) -> ScrapeSettings | None:
    """Where the controller serves ``/metrics``: on the gateways' host, with their certificate."""
    with interrupts.held():
        from deepinfer.controller.scrape import ScrapeSettings

    port = config.metrics_fixed_port
    if port == 0:
        return None
    tls = server_tls(config)
    return ScrapeSettings(
        host=config.host,
        port=free_port(config.host) if port is None else port,
        cert_file=None if tls is None else tls.cert_file,
        key_file=None if tls is None else tls.key_file,
        client_ca_file=None if tls is None else tls.client_ca_file,
    )


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


def bind(host: str, port: int) -> int:
    """Find out whether a port can be listened on; return it, or a free one for 0.

    Raises:
        OSError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        bound: int = probe.getsockname()[1]
        return bound


def free_port(host: str) -> int:
    """A port that is free now. Gateways need a fixed one: a restarted one serves there again."""
    return bind(host, 0)
