"""What the cluster is told about nested weights, and whether a model has any."""

from __future__ import annotations

from pathlib import Path

from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.kvstore.core.precision import PrecisionSettings, resolve_policy


def precision_settings(config: ClusterConfig) -> PrecisionSettings:
    """The controller's policy, as configured."""
    return PrecisionSettings(
        policy=resolve_policy(config.policy),
        level_max=config.precision_levels - 1,
        threshold_tokens=config.precision_threshold_tokens,
        ttft_target_ms=config.ttft_target_ms,
        tpot_target_ms=config.tpot_target_ms,
        dwell_ms=config.precision_dwell_ms,
    )


def check_precision(config: ClusterConfig, model: Path) -> None:
    """Refuse settings of nested weights for a model that has none, before anything is started.

    Raises:
        ModelUnavailableError: the weights cannot be nested, and ``weights`` asks for that.
        ConfigError: a setting was given that has no meaning for this model.
    """
    given = config.precision_given
    if not given and config.weights == "auto":
        return
    from deepinfer.workers.model.load import load_model

    try:
        nested = load_model(model, weights=config.weights).nested
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"model {str(model)!r}: {error}") from error
    if given and not nested:
        raise ConfigError(
            f"{given[0]} = {getattr(config, given[0])!r} has no meaning for {config.model}: its "
            "weights are not nested (--weights nested makes them so as they are loaded, "
            "`deepinfer convert` for good)"
        )
