"""A cluster: one detached actor a process, on a Ray of its own or on one that runs already.

The launcher is the only creator of actors, so that none dies with another; they find each other
by name in one Ray namespace. A Ray head that it starts it also owns: when the launcher goes, by
whatever signal, that Ray's processes go with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from deepinfer.deploy import interrupts
from deepinfer.deploy.actors import START_TIMEOUT_S, Actors, Served, bind, end_actors
from deepinfer.deploy.config import ClusterConfig, ConfigError, Device
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.models import check_model, resolve_model
from deepinfer.deploy.precision import check_precision
from deepinfer.deploy.rays import OwnRay, RunningRay
from deepinfer.deploy.running import alive, default_token_file, read_or_make_token
from deepinfer.deploy.stopping import finish_requests
from deepinfer.deploy.tls import check_server_tls
from deepinfer.proto.redaction import hide

if TYPE_CHECKING:
    from deepinfer.kvstore.core.layout import KvLayout
    from deepinfer.workers.model.config import ModelConfig

__all__ = ["Cluster", "LaunchError", "quiet"]


def quiet(*_: object) -> None:
    """A progress listener that ignores everything."""


@dataclass(slots=True)
class Cluster:
    """A cluster that this process started. A context manager: leaving it stops everything.

    ``worker_env`` is set in the workers' environment; tests arm failpoints with it.

    Raises (on entering):
        LaunchError: an address is taken, or a process does not come up.
        ModelUnavailableError: there is no such model, or it cannot be served.
        ConfigError: the pool cannot hold one block, or the certificates cannot be used.
    """

    config: ClusterConfig
    say: Callable[[str], None] = quiet
    """Told of each step of the start."""
    loading: Callable[[str, int, int], None] = quiet
    """Told the bytes of weights read, and those there are, by worker; and of a download."""
    worker_env: dict[str, str] = field(default_factory=dict)
    ray: OwnRay | RunningRay = field(default_factory=OwnRay)
    endpoints: tuple[str, ...] = ()
    metrics: str | None = None
    """host:port of ``/metrics``; None: nowhere."""
    notes: tuple[str, ...] = ()
    """What workers have to say of their memory."""
    token: str = field(default="", repr=False)
    operator_token: str = field(default="", repr=False)
    """Who has it may drain and restart single processes."""
    actors: dict[str, Any] = field(default_factory=dict)
    """Ray's handle of each, by name."""

    @property
    def token_file(self) -> Path:
        named = self.config.token_file
        return Path(named).expanduser() if named else default_token_file()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            with interrupts.ignored():
                if self.ray.up:
                    self.say("stopping")
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

    def finish_requests(self, grace_s: float) -> int | None:
        """Take nothing new and let what was accepted end, for so long; how many have not.

        None if nobody could say.
        """
        return finish_requests(self.actors, grace_s, self.say)

    def detach(self) -> None:
        """Let the cluster run on when this is left: another process has to remove it."""
        self.actors.clear()
        self.endpoints = ()

    def _start(self) -> None:
        config = self.config
        check_server_tls(config)
        self.ray.prepare()
        for line in self.ray.swept:
            self.say(line)
        device = self.ray.device(config, self.say)
        _refuse_taken(config)
        self.token = read_or_make_token(self.token_file)
        hide(self.token)
        self.say(f"opening the model {config.model}")
        model = resolve_model(config.model, progress=self._fetching)
        served = _open(model, config, device)
        self.say(self.ray.starting)
        nodes = self.ray.start(config)
        self.say("starting controller, store, gateways and workers")
        actors = Actors(config, nodes, self.token, self.actors)
        self.operator_token = actors.operator_token
        actors.create(served, self.worker_env)
        self.endpoints = actors.await_ready(self.say, self.loading, self.ray.session)
        self.notes = actors.notes()
        self.metrics = actors.await_metrics()

    def _fetching(self, done: int, total: int) -> None:
        self.loading(f"fetching {self.config.model}", done, total)

    def _stop(self, *, keep_logs: bool) -> None:
        """Stop every actor and leave Ray. A second Ctrl-C does not cut it short."""
        with interrupts.ignored():
            names = tuple(self.actors)
            if self.ray.up and names:
                end_actors(self.actors, serving=bool(self.endpoints))
            self.actors.clear()
            self.endpoints, self.metrics = (), None
            self.ray.stop(names, keep_logs=keep_logs)


def _refuse_taken(config: ClusterConfig) -> None:
    """Raise if a port is in use; name the cluster that has a gateway's if it is one of ours."""
    # No port is asked for by 0, but the host may still be none of this machine's.
    for port in range(config.port, config.port + config.gateways) if config.port else (0,):
        where = f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"
        if any(where in cluster.endpoints for cluster in alive()):
            raise LaunchError(
                f"a cluster already serves at {where}: stop it with `deepinfer down --endpoint "
                f"{where}` or name another --port"
            )
        try:
            bind(config.host, port)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {where}: {error.strerror}: name another --port or --host"
            ) from error
    if config.metrics_fixed_port:
        try:
            bind(config.host, config.metrics_fixed_port)
        except OSError as error:
            raise LaunchError(
                f"cannot serve /metrics on port {config.metrics_fixed_port} of {config.host}: "
                f"{error.strerror}: name another --metrics-port, or 0 for none"
            ) from error


def _open(model: Path, config: ClusterConfig, device: Device) -> Served:
    """Check that the model can be served, and how large its KV blocks are.

    Raises:
        ModelUnavailableError: damaged, incomplete or unsupported; or no tokenizer of its own.
        ConfigError: the pool cannot hold one block, the GPU kernels know no such sizes, or nested
            weights' settings are given for a model without any.
    """
    with interrupts.held():
        import deepinfer.text.load
        import deepinfer.workers.backends.cpu
        import deepinfer.workers.model.load  # noqa: F401
        from deepinfer.kvstore.core.layout import resolve_kv_dtype
        from deepinfer.workers.model.decoder import kv_layout

    served = check_model(
        model,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        threads=config.threads if device == "cpu" else None,
    )
    check_precision(config, model)
    layout = kv_layout(served, resolve_kv_dtype(config.kv_cache_dtype), config.block_size)
    if device == "cuda":
        _check_kernels(served, layout)
    size = config.cache_size(device)
    return Served(
        path=model,
        config=served,
        layout=layout,
        device=device,
        blocks=None if size is None else size.blocks_of(layout.block_bytes),
    )


def _check_kernels(model: ModelConfig, layout: KvLayout) -> None:
    """Raise ConfigError for sizes that the GPU kernels were not made for."""
    with interrupts.held():
        from deepinfer.workers.gpu.shapes import check_kernels
    try:
        check_kernels(model, layout)
    except ValueError as error:
        raise ConfigError(f"device = 'cuda': {error}") from error
