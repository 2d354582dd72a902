"""When the controller has lower planes leave: the two costs that it weighs."""

from __future__ import annotations

import pytest

from deepinfer.controller.core.planes import Planes, horizon_ms, worthwhile
from deepinfer.kvstore.core.shed import ShedLevel, ShedState

LEVEL = ShedLevel(ShedState.HELD, ordinary_blocks=1000, tail_blocks=500, return_ms=200)


def test_costs_are_weighed_over_ten_returns_at_least() -> None:
    assert horizon_ms(LEVEL, 1000) == 2000
    assert horizon_ms(LEVEL, 5000) == 5000


@pytest.mark.parametrize(
    ("crossed", "waited_ms", "loss", "sheds"),
    [
        (500, 0, 0.0, False),  # as many blocks as the planes are: their copy back costs the same
        (501, 0, 0.0, True),
        (0, 200, 0.0, False),
        (0, 201, 0.0, True),
        (250, 101, 0.0, True),
        (501, 0, 0.02, False),  # FP8 for two seconds is given the price of 40 ms
        (601, 0, 0.02, True),
        (0, 0, 0.0, False),
    ],
)
def test_shedding_pays_when_going_on_costs_more(
    crossed: float, waited_ms: float, loss: float, sheds: bool
) -> None:
    assert worthwhile(crossed, waited_ms, LEVEL, 2000, loss) is sheds


def test_pressure_fades() -> None:
    planes = Planes(LEVEL, 0)
    planes.crossed_blocks = 1000.0
    planes.weigh(True, 1000, 100)
    assert planes.crossed_blocks == pytest.approx(904.8, abs=0.1)
    assert planes.waited_ms == 100
    planes.weigh(False, 1000, 1100)
    assert planes.crossed_blocks == pytest.approx(332.9, abs=0.1)
    assert planes.waited_ms == pytest.approx(36.8, abs=0.1)
    planes.weigh(True, 1000, 100_000)
    assert planes.waited_ms == pytest.approx(1000), "what is longer ago does not count"


def test_what_another_controller_began_goes_on() -> None:
    assert not Planes(LEVEL, 0).wanted
    away = LEVEL._replace(state=ShedState.OPEN)
    assert Planes(away, 0).wanted
    planes = Planes(LEVEL, 0)
    planes.lose()
    assert planes.learn(away, 5), "its word counts anew after it was taken for dead"
    assert planes.wanted
    assert not planes.learn(away, 9)
    assert planes.since_ms == 5
