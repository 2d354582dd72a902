"""The cluster's configuration: a YAML file and the same names as flags, checked once.

Frozen; unknown keys, values out of range and impossible combinations are errors that name them.
Nothing is adjusted quietly.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer.deploy.config_cache import AUTO_CPU_CACHE, CacheSize
from deepinfer.deploy.config_precision import NESTED_ONLY, check_precision_fields
from deepinfer.deploy.errors import ConfigError
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.precision import LEVELS_MAX

__all__ = [
    "METRICS_PORT_OFFSET",
    "CacheSize",
    "ClusterConfig",
    "ConfigError",
    "Device",
    "check_kv_dtypes",
    "load_config",
    "reference",
]

Device = Literal["cpu", "cuda"]
"""What workers compute on, once it is known."""

METRICS_PORT_OFFSET = 10
"""From the first gateway's port, so that several clusters do not meet."""


class ClusterConfig(BaseModel):
    """Everything ``deepinfer up`` takes. Field names are the YAML keys; flags use dashes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    model: str = Field(
        default="demo",
        min_length=1,
        description="Model folder, GGUF file, org/name of a hub, or demo.",
    )
    workers: int = Field(default=1, ge=1, le=256, description="Worker processes on each node.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="What workers compute on: cpu, cuda, or auto: a card where one can serve.",
    )
    gateways: int = Field(
        default=1, ge=1, le=64, description="Gateway processes, on ports from --port."
    )
    kv_cache_dtype: str = Field(
        default="auto", description="auto, fp16, int8, fp8, fp8_e5m2 or k16v8."
    )
    kv_quality: Literal["strict", "warn", "off"] = Field(
        default="strict",
        description="What if the KV dtype costs this model too much: refuse, warn, or do not look.",
    )
    weights: Literal["auto", "nested"] = Field(
        default="auto",
        description="nested: weights in FP16 or BF16 are nested as they are loaded; auto: as the "
        "checkpoint has them.",
    )
    precision: Literal["fp16", "fp8", "threshold", "slo"] = Field(
        default="slo",
        description="Who decides when nested weights are read in FP8: never, always, steps of many "
        "tokens, or predicted times and the two targets.",
    )
    precision_threshold_tokens: int = Field(
        default=1024, ge=0, le=1 << 20, description="threshold: FP8 in steps of more tokens."
    )
    ttft_target_ms: float = Field(
        default=2000, gt=0, le=3_600_000, description="slo: time to the first token."
    )
    tpot_target_ms: float = Field(
        default=100, gt=0, le=3_600_000, description="slo: mean time of each token after it."
    )
    precision_dwell_ms: int = Field(
        default=500, ge=0, le=3_600_000, description="slo: the level stays at least so long."
    )
    precision_levels: int = Field(
        default=2,
        ge=2,
        le=LEVELS_MAX,
        description="Levels from FP16 to FP8; between them some layers are in FP8.",
    )
    fp8_products: Literal["w8a16", "w8a8"] = Field(
        default="w8a16",
        description="w8a8: steps in FP8 of more than 128 tokens have activations in FP8 too; cards "
        "need compute capability 9.0.",
    )
    shed: bool = Field(
        default=True,
        description="Under KV pressure the lower planes of nested weights leave the card for KV "
        "blocks (on a CPU only if this is set).",
    )
    shed_head: bool = Field(default=False, description="Those of the LM head too.")
    start_shed: bool = Field(
        default=False,
        description="Never load lower planes: all FP8, for cards that could not hold both; exact "
        "requests are refused.",
    )
    shed_exact_wait_ms: int = Field(
        default=60_000,
        ge=1,
        le=3_600_000,
        description="Longest that an exact request waits for lower planes to return.",
    )
    deterministic: bool = Field(
        default=False,
        description="A request's tokens depend on the request alone, not on its batch, swaps, "
        "moves and recomputes; slower on a card.",
    )
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens in a KV block.")
    max_cache: str = Field(
        default="auto",
        description='KV pool of a worker: "512MiB", "3 blocks", or auto: what fits on its card '
        f"({AUTO_CPU_CACHE} on a CPU).",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        ge=0.05,
        le=1,
        description="Share of a card that its workers fill, if max_cache is auto.",
    )
    gpu_probe: bool = Field(
        default=True,
        description="Measure the bus and what can be pinned when a GPU worker starts.",
    )
    prefill_chunk_tokens: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Prompt tokens of one request in one step, at most.",
    )
    max_batch_tokens: int = Field(
        default=512, ge=1, le=65536, description="Tokens in one step, at most."
    )
    cpu_offload: bool = Field(default=True, description="Swap KV to the store when blocks run out.")
    max_cpu_offload_mb: int = Field(
        default=2048,
        ge=0,
        le=1 << 24,
        description="The store's budget in MiB; 0 refuses every swap.",
    )
    max_swapped_requests: int = Field(
        default=1024, ge=0, le=1 << 20, description="Requests swapped out at a time, at most."
    )
    prefetch_mb: int = Field(
        default=256,
        ge=0,
        le=1 << 20,
        description="Longest payload in MiB fetched ahead from another node; 0: none.",
    )
    prefix_cache: bool = Field(
        default=True, description="Share KV blocks of equal prompt prefixes."
    )
    reserve: Literal["growth", "full"] = Field(
        default="growth",
        description="Blocks set aside at admission: the prompt's, or all it may need.",
    )
    victim_policy: Literal["lru", "youngest", "cost"] = Field(
        default="lru", description="Who is swapped out first."
    )
    min_residency: int = Field(
        default=8,
        ge=0,
        le=1 << 20,
        description="Tokens a resumed request makes before it may go again.",
    )
    store_path: Literal["auto", "memfd", "grpc"] = Field(
        default="auto",
        description="How payloads reach the store: shared memory, gRPC, or what fits.",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="Compute threads of a CPU worker.")
    max_live_requests: int = Field(
        default=4096, ge=1, le=1 << 20, description="Requests a gateway holds at a time, at most."
    )
    orphan_grace: float = Field(
        default=5.0, ge=0, le=3600, description="Seconds a request outlives its client's stream."
    )
    request_timeout: float = Field(
        default=3600.0,
        gt=0,
        le=604_800,
        description="Seconds that a request may take in all, wherever it waits.",
    )
    step_timeout: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Seconds after which a worker whose step has not ended gives itself up.",
    )
    unread_timeout: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="Seconds until the stream of a client that reads nothing is ended.",
    )
    grace: float = Field(
        default=20.0,
        ge=0,
        le=86_400,
        description="Seconds that running requests may take to finish when the cluster is stopped.",
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address the gateways listen on."
    )
    port: int = Field(
        default=7470, ge=0, le=65535, description="First gateway's port; 0 picks free ones."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of /metrics on the same address; unset: --port + 10, and 0: no metrics.",
    )
    token_file: str | None = Field(
        default=None, min_length=1, description="File with the bearer token; made if it is missing."
    )
    tls_cert: str | None = Field(
        default=None, min_length=1, description="PEM certificate of the gateways; turns TLS on."
    )
    tls_key: str | None = Field(default=None, min_length=1, description="Its private key.")
    tls_client_ca: str | None = Field(
        default=None,
        min_length=1,
        description="Roots of the client certificates that are then asked for (mTLS).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="What the processes log: debug, info, warning or error."
    )

    @field_validator("kv_cache_dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        resolve_kv_dtype(value)
        return value

    @field_validator("max_cache")
    @classmethod
    def _readable_size(cls, value: str) -> str:
        if value != "auto":
            CacheSize.parse(value)
        return value

    @model_validator(mode="after")
    def _possible_together(self) -> Self:
        if self.prefill_chunk_tokens > self.max_batch_tokens:
            raise ValueError(
                f"prefill_chunk_tokens = {self.prefill_chunk_tokens}: must not exceed "
                f"max_batch_tokens = {self.max_batch_tokens}"
            )
        if not self.cpu_offload:
            for name in (
                "max_cpu_offload_mb",
                "max_swapped_requests",
                "prefetch_mb",
                "store_path",
            ):
                if name in self.model_fields_set:
                    raise ValueError(
                        f"{name} = {getattr(self, name)!r} has no meaning with cpu_offload = false"
                    )
        check_precision_fields(self)
        if self.device == "cpu":
            for name in ("gpu_memory_utilization", "gpu_probe"):
                if name in self.model_fields_set:
                    raise ValueError(
                        f"{name} = {getattr(self, name)!r} has no meaning with device = 'cpu'"
                    )
        if self.max_cache != "auto" and "gpu_memory_utilization" in self.model_fields_set:
            raise ValueError(
                f"gpu_memory_utilization = {self.gpu_memory_utilization:g} has no meaning with "
                f"max_cache = {self.max_cache!r}: must be one of them"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = "tls_cert", "tls_key"
            if self.tls_cert is None:
                given, missing = missing, given
            raise ValueError(
                f"{given} = {getattr(self, given)!r} without {missing}: must be both or none"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                f"tls_client_ca = {self.tls_client_ca!r} has no meaning without tls_cert"
            )
        if self.port and self.port + self.gateways - 1 > 65535:
            raise ValueError(
                f"port = {self.port} with gateways = {self.gateways}: the last port would be "
                f"{self.port + self.gateways - 1}, above 65535"
            )
        metrics_port = self.metrics_fixed_port
        if metrics_port is not None and metrics_port > 65535:
            raise ValueError(
                f"port = {self.port}: /metrics would be at {metrics_port}, above 65535: name a "
                "metrics_port"
            )
        if metrics_port and self.port and 0 <= metrics_port - self.port < self.gateways:
            raise ValueError(
                f"metrics_port = {metrics_port}: is gateway-{metrics_port - self.port}'s port "
                f"(port = {self.port}, gateways = {self.gateways}): name another"
            )
        return self

    def sheds(self, device: Device) -> bool:
        """Whether a worker of a nested model on ``device`` may give up its lower planes."""
        if self.start_shed or self.policy == "fp16":
            return False
        return self.shed and (device == "cuda" or "shed" in self.model_fields_set)

    @property
    def policy(self) -> str:
        """The precision policy: that of ``precision``, where it may switch."""
        return "fp16" if self.deterministic and not self.start_shed else self.precision

    @property
    def precision_given(self) -> tuple[str, ...]:
        """The settings that were given and concern nested weights only."""
        return tuple(name for name in NESTED_ONLY if name in self.model_fields_set)

    @property
    def metrics_fixed_port(self) -> int | None:
        """Where ``/metrics`` is; 0: nowhere. None: on a free port, as the gateways are."""
        if self.metrics_port is not None:
            return self.metrics_port
        return self.port + METRICS_PORT_OFFSET if self.port else None

    def cache_size(self, device: Device) -> CacheSize | None:
        """The KV pool of a worker on ``device``; None: what fits on its card."""
        if self.max_cache != "auto":
            return CacheSize.parse(self.max_cache)
        return None if device == "cuda" else CacheSize.parse(AUTO_CPU_CACHE)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the gateways."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def warnings(self) -> tuple[str, ...]:
        """What is legal but should be known at start-up, a sentence each."""
        found = []
        if not self.loopback:
            said = (
                f"host = {self.host!r} is not loopback: whoever reaches it and holds the token can "
                "use the cluster"
            )
            if self.tls_cert is None:
                said += ", and traffic is not encrypted (tls_cert, tls_key)"
            found.append(said)
        dtype = resolve_kv_dtype(self.kv_cache_dtype).name
        if self.kv_quality == "off" and dtype in ("fp8", "fp8_e5m2", "k16v8"):
            what = "V is" if dtype == "k16v8" else "K and V are"
            found.append(
                f"kv_cache_dtype = {self.kv_cache_dtype!r}: {what} cast to 8-bit floats without a "
                "scale and values beyond their range saturate (counted in "
                "deepinfer_worker_kv_saturations_total); some models lose much of their quality "
                "even where nothing saturates, and kv_quality = 'off' does not look"
            )
        return tuple(found)


def check_kv_dtypes(names: tuple[str, ...]) -> None:
    """Raise ConfigError if a name is no KV dtype; it lists the legal ones."""
    for name in names:
        try:
            resolve_kv_dtype(name)
        except ValueError as error:
            raise ConfigError(f"kv_cache_dtype: {error}") from error


def load_config(file: Path | None = None, flags: dict[str, Any] | None = None) -> ClusterConfig:
    """Read the YAML file, lay the flags that were given over it, and check the whole.

    Args:
        file: YAML mapping of field names; None for flags alone.
        flags: values given on the command line; those that are None were not given.

    Raises:
        ConfigError: unreadable file, unknown key, illegal value or combination; one line each.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {file}: cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"config file {file}: not YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {file}: must be a mapping of names to values")
        values |= loaded or {}
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(values, e) for e in error.errors())) from error


def _explain(values: dict[str, Any], error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = ", ".join(sorted(ClusterConfig.model_fields))
        return f"unknown key {name!r}: must be one of {known}"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if not name or text.startswith(name) else f"{name}: {text}"
    return f"{name} = {values.get(name)!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def reference() -> str:
    """Every setting as a Markdown table; docs/configuration.md holds it word for word."""
    rows = ["| key | flag | default | what |", "| --- | --- | --- | --- |"]
    for name, info in ClusterConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(info.default, bool):
            flag += f" / --no-{name.replace('_', '-')}"
        default = "none" if info.default is None else f"{info.default}"
        rows.append(f"| `{name}` | `{flag}` | {default} | {info.description} |")
    return "\n".join(rows) + "\n"
