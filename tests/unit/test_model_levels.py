"""Levels of precision: which layers they are."""

from __future__ import annotations

import itertools

import pytest

from deepinfer.kvstore.core.precision import LEVELS_MAX
from deepinfer.workers.model.levels import PrecisionLevels


@pytest.mark.parametrize("layers", [1, 2, 5, 36])
@pytest.mark.parametrize("count", range(2, LEVELS_MAX + 1))
def test_levels_rise_from_none_to_all(layers: int, count: int) -> None:
    levels = PrecisionLevels(layers, count)
    found = [levels.fp8_layers(level) for level in range(count)]
    assert not any(found[0])
    assert all(found[-1])
    for less, more in itertools.pairwise(found):
        assert all(b or not a for a, b in zip(less, more, strict=True))
    # The head has a step of its own, after all layers.
    steps = max(1, count - 2)
    for level, each in enumerate(found):
        assert abs(sum(each) / layers - min(1, level / steps)) <= 0.5 / layers
    assert [levels.fp8_head(level) for level in range(count)] == [False] * (count - 1) + [True]


def test_a_given_order_says_who_is_first() -> None:
    assert PrecisionLevels(3, 5, (2, 0, 1)).fp8_layers(1) == (False, False, True)
    assert PrecisionLevels(5, 2).order == (2, 1, 3, 0, 4)


def test_w8a8_is_a_level_of_its_own_behind_the_last() -> None:
    levels = PrecisionLevels(3, 4, w8a8_rows=129)
    assert (levels.count, levels.last) == (4, 3)
    assert levels.fp8_layers(4) == levels.fp8_layers(3) == (True,) * 3
    assert levels.fp8_head(4)
    assert [levels.w8a8(level) for level in range(5)] == [False] * 4 + [True]
    with pytest.raises(ValueError, match=r"precision level 5: this model has 0\.\.4"):
        levels.fp8_layers(5)
    with pytest.raises(ValueError, match=r"precision level 4: this model has 0\.\.3"):
        PrecisionLevels(3, 4).w8a8(4)
    for wrong, count in ((-1, 2), (1, 1)):
        with pytest.raises(ValueError, match=f"w8a8_rows = {wrong}: must be 0 or more"):
            PrecisionLevels(3, count, w8a8_rows=wrong)


def test_a_plain_model_has_one_level() -> None:
    levels = PrecisionLevels(3)
    assert levels.fp8_layers(0) == (False,) * 3
    assert not levels.fp8_head(0)


@pytest.mark.parametrize("level", [-1, 3])
def test_an_unknown_level_is_named(level: int) -> None:
    with pytest.raises(ValueError, match=rf"precision level {level}: this model has 0\.\.2"):
        PrecisionLevels(4, 3).fp8_layers(level)


@pytest.mark.parametrize("count", [0, LEVELS_MAX + 1])
def test_too_many_levels_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"precision levels: {count}, must be 1 to 6"):
        PrecisionLevels(4, count)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3)])
def test_an_order_that_leaves_a_layer_out_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must name each of 0\.\.2 once"):
        PrecisionLevels(3, 2, order)
