"""What ``deterministic`` forbids: anything that lets the load decide how a token is computed."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.deploy.config import ConfigError, load_config
from deepinfer.deploy.precision import precision_settings
from deepinfer.kvstore.core.precision import Policy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "slo"}, "precision = 'slo' with deterministic = True: must be 'fp16', or"),
        ({"precision": "threshold"}, "precision = 'threshold' with deterministic = True"),
        ({"precision": "fp8"}, "or 'fp8' with start_shed = True"),
        ({"shed": True}, "shed = True with deterministic = True: must be False"),
        ({"shed_head": True}, "shed_head = True with deterministic = True: only with start_shed"),
        ({"fp8_products": "w8a8", "start_shed": True}, "fp8_products = 'w8a8' with deterministic"),
        ({"tpot_target_ms": 5.0}, "tpot_target_ms = 5 has no meaning with deterministic = True"),
    ],
)
def test_what_the_load_would_decide_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(flags={"deterministic": True, **settings})
    load_config(flags=settings | ({"start_shed": True} if "shed_head" in settings else {}))


def test_nested_weights_stay_at_one_level() -> None:
    config = load_config(flags={"deterministic": True})
    assert precision_settings(config).policy is Policy.FP16
    assert not config.sheds("cuda")
    given = load_config(flags={"deterministic": True, "precision": "fp16", "shed": False})
    assert precision_settings(given).policy is Policy.FP16
    upper = load_config(flags={"deterministic": True, "start_shed": True, "precision": "fp8"})
    assert precision_settings(upper).policy is Policy.FP8


def test_it_is_off_unless_asked_for() -> None:
    assert not load_config().deterministic
    assert precision_settings(load_config()).policy is Policy.SLO
