"""Settings of nested weights: what is passed on, and what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.deploy.config import ConfigError, load_config
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.deploy.precision import check_precision, precision_settings
from deepinfer.kvstore.core.precision import Policy, PrecisionSettings
from support.nested_models import LLAMA, half_model, write_nested_folder
from support.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nested_folder(half_model(LLAMA), tmp_path_factory.mktemp("models") / "nested")


def test_flags_become_the_controllers_settings() -> None:
    config = load_config(
        flags={
            "precision": "slo",
            "ttft_target_ms": 500.0,
            "tpot_target_ms": 12.5,
            "precision_dwell_ms": 50,
            "precision_levels": 4,
        }
    )
    assert precision_settings(config) == PrecisionSettings(
        policy=Policy.SLO,
        level_max=3,
        ttft_target_ms=500.0,
        tpot_target_ms=12.5,
        dwell_ms=50,
    )
    config = load_config(flags={"precision": "threshold", "precision_threshold_tokens": 64})
    assert precision_settings(config).policy is Policy.THRESHOLD
    assert precision_settings(config).threshold_tokens == 64
    assert precision_settings(load_config()) == PrecisionSettings(level_max=1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"precision": "best"}, r"precision = 'best': input should be 'fp16', 'fp8', 'thresh"),
        ({"weights": "int8"}, r"weights = 'int8': input should be 'auto' or 'nested'"),
        ({"ttft_target_ms": 0.0}, r"ttft_target_ms = 0.0: input should be greater than 0"),
        ({"tpot_target_ms": -5.0}, r"tpot_target_ms = -5.0: input should be greater than 0"),
        ({"precision_levels": 1}, r"precision_levels = 1: input should be greater than or equal"),
        ({"precision_levels": 7}, r"precision_levels = 7: input should be less than or equal to 6"),
        ({"precision_dwell_ms": -1}, r"precision_dwell_ms = -1: input should be greater"),
        (
            {"precision_threshold_tokens": 9},
            r"precision_threshold_tokens = 9 has no meaning with precision = 'slo'",
        ),
        (
            {"precision": "fp8", "tpot_target_ms": 9.0},
            r"tpot_target_ms = 9 has no meaning with precision = 'fp8'",
        ),
        (
            {"precision": "fp16", "precision_levels": 3},
            r"precision_levels = 3 has no meaning with precision = 'fp16'",
        ),
        (
            {"precision": "fp16", "fp8_products": "w8a8"},
            r"fp8_products = 'w8a8' has no meaning with precision = 'fp16'",
        ),
    ],
)
def test_what_cannot_be_is_named(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(flags=flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"precision": "slo"},
        {"ttft_target_ms": 100.0},
        {"tpot_target_ms": 100.0},
        {"precision_levels": 2},
        {"precision_dwell_ms": 1},
        {"precision": "threshold", "precision_threshold_tokens": 9},
    ],
)
def test_they_have_no_meaning_for_a_plain_model(
    flags: dict[str, Any], plain: Path, nested: Path
) -> None:
    name = next(iter(flags))
    config = load_config(flags={"model": "mine", **flags})
    with pytest.raises(ConfigError) as caught:
        check_precision(config, plain)
    said = str(caught.value)
    assert said.startswith(f"{name} = {flags[name]!r} has no meaning for mine: its weights are not")
    assert "--weights nested" in said
    check_precision(config, nested)
    check_precision(load_config(flags={"weights": "nested", **flags}), plain)


def test_without_them_any_model_will_do(plain: Path, tmp_path: Path) -> None:
    check_precision(load_config(), plain)
    check_precision(load_config(), tmp_path / "it is not even looked at")


def test_weights_that_cannot_be_nested_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"model '.*gone': .*does not exist"):
        check_precision(load_config(flags={"weights": "nested"}), tmp_path / "gone")
