"""The controller's settings, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.kvstore.core.precision import PrecisionSettings

RESERVES = ("growth", "full")
VICTIM_POLICIES = ("lru", "youngest", "cost")


class ConfigError(ValueError):
    """A setting that is not legal: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Times are milliseconds of the clock whose readings are given to ``handle``."""

    cpu_offload: bool = True
    """Whether running requests may be swapped out to the stores at all."""
    max_swapped_requests: int | None = None
    """Most requests swapped out or on their way out or in; None: as many as the stores hold."""
    victims: str = "lru"
    reserve: str = "growth"
    """``growth`` admits for the prompt and lets requests grow; ``full`` sets aside every block that
    a request may come to need."""
    growth_reserve_blocks: int = 1
    """Blocks kept free for each resident when something is placed beside it."""
    min_residency_tokens: int = 8
    """Tokens that a resumed request generates before it may be swapped out again."""
    reserve_slack_tokens: int = 128
    """Tokens that a victim may compute between its report and its copy."""
    order_timeout_ms: int = 1000
    """An order or store call that nothing confirmed for so long is sent again."""
    settle_ms: int = 500
    """How long reports that race each other are given before they are taken at their word."""
    startup_grace_ms: int = 3000
    """Longest wait for members that do not report after this controller started."""
    suspect_ms: int = 2000
    """A worker silent for so long gets nothing new."""
    dead_ms: int = 10_000
    """A worker silent for so long is taken for dead; so is the hope for an unconfirmed order."""
    orphan_grace_ms: int = 5000
    """How long a lost gateway's requests wait for another gateway's claim."""
    shed: bool = True
    """Whether workers whose weights are nested may give up their lower planes for KV blocks."""
    shed_dwell_ms: int = 1000
    """Planes stay away, or on the card, at least so long; ten copies back if that is longer."""
    shed_calm_ms: int = 1000
    """Ordinary blocks must have been enough for so long before the planes return."""
    shed_exact_wait_ms: int = 60_000
    """An exact request for which no planes have returned for so long ends with an error."""
    retry_ms: int = 1000
    """Pause after a refused or failed swap-out before its store is asked again."""
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    """The policy that nested weights follow, and its parameters."""
    deterministic: bool = False
    """What workers were told, for the status page: nothing here depends on it."""
    prefetch_bytes_max: int = 256 * 2**20
    """Longest payload that a worker is told to fetch ahead of its resume; 0: none is."""
    prefetch_renew_ms: int = 10_000
    """A worker is told again so often; it forgets what it was told after some times as long."""
    stores_are_mapped: bool = True
    """Workers map their own node's store: to fetch ahead from there gains nothing."""

    def __post_init__(self) -> None:
        def check(name: str, legal: bool, allowed: str) -> None:
            if not legal:
                raise ConfigError(name, getattr(self, name), allowed)

        bound = self.max_swapped_requests
        check("max_swapped_requests", bound is None or bound >= 0, "None or at least 0")
        check("victims", self.victims in VICTIM_POLICIES, f"one of {', '.join(VICTIM_POLICIES)}")
        check("reserve", self.reserve in RESERVES, f"one of {', '.join(RESERVES)}")
        for name in (
            "growth_reserve_blocks",
            "min_residency_tokens",
            "reserve_slack_tokens",
            "prefetch_bytes_max",
        ):
            check(name, getattr(self, name) >= 0, "at least 0")
        for name in (
            "order_timeout_ms",
            "settle_ms",
            "startup_grace_ms",
            "suspect_ms",
            "orphan_grace_ms",
            "shed_dwell_ms",
            "shed_calm_ms",
            "shed_exact_wait_ms",
            "retry_ms",
            "prefetch_renew_ms",
        ):
            check(name, getattr(self, name) >= 1, "at least 1")
        check("dead_ms", self.dead_ms > self.suspect_ms, f"above suspect_ms ({self.suspect_ms})")
