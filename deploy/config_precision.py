"""Which settings of nested weights go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from deepinfer.deploy.config import ClusterConfig

_POLICIES: Final = {
    "precision_threshold_tokens": ("threshold",),
    "ttft_target_ms": ("slo",),
    "tpot_target_ms": ("slo",),
    "precision_dwell_ms": ("slo",),
    "precision_levels": ("fp8", "threshold", "slo"),
    "fp8_products": ("fp8", "threshold", "slo"),
}
"""The policies that a parameter has a meaning for."""

NESTED_ONLY: Final = (
    "precision",
    *_POLICIES,
    "shed",
    "shed_head",
    "start_shed",
    "shed_exact_wait_ms",
)
"""The settings that have no meaning for weights that are not nested."""


def check_precision_fields(config: ClusterConfig) -> None:
    """Raise ValueError naming what contradicts another setting of nested weights."""
    if config.deterministic:
        _check_deterministic(config)
    for name, policies in _POLICIES.items():
        if name in config.model_fields_set and config.policy not in policies:
            other = f"precision = {config.precision!r}"
            raise ValueError(
                f"{name} = {_shown(getattr(config, name))} has no meaning with "
                + ("deterministic = True" if config.deterministic else other)
            )
    _check_shedding(config)


def _check_deterministic(config: ClusterConfig) -> None:
    """Weights must be read at one level only, whatever the load, and whoever shares the step."""
    given = config.model_fields_set
    if "precision" in given and config.precision != "fp16" and not config.start_shed:
        raise ValueError(
            f"precision = {config.precision!r} with deterministic = True: must be 'fp16', or 'fp8' "
            "with start_shed = True (an exact request would make a whole step FP16)"
        )
    for name, allowed in (("shed", False), ("fp8_products", "w8a16")):
        if name in given and getattr(config, name) != allowed:
            raise ValueError(
                f"{name} = {getattr(config, name)!r} with deterministic = True: must be {allowed!r}"
            )
    if config.shed_head and not config.start_shed:
        raise ValueError("shed_head = True with deterministic = True: only with start_shed = True")


def _shown(value: float | str) -> str:
    return repr(value) if isinstance(value, str) else f"{value:g}"


def _check_shedding(config: ClusterConfig) -> None:
    given = config.model_fields_set

    def refuse(name: str, other: str) -> None:
        raise ValueError(
            f"{name} = {getattr(config, name)!r} has no meaning with "
            f"{other} = {getattr(config, other)!r}"
        )

    if config.start_shed and "shed" in given and config.shed:
        refuse("shed", "start_shed")
    if config.start_shed and "precision" in given and config.precision != "fp8":
        refuse("precision", "start_shed")
    if config.precision == "fp16":
        for name in ("shed", "shed_head"):
            if name in given and getattr(config, name):
                refuse(name, "precision")
    if config.shed_head and not (config.shed or config.start_shed):
        refuse("shed_head", "shed")
    if "shed_exact_wait_ms" in given:
        if config.start_shed:
            refuse("shed_exact_wait_ms", "start_shed")
        if not config.shed:
            refuse("shed_exact_wait_ms", "shed")
        if config.precision == "fp16":
            refuse("shed_exact_wait_ms", "precision")
