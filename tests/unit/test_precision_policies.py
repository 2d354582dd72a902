"""Who decides the level of a step: policies, costs, and what keeps them from flapping."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from deepinfer.kvstore.core.policies import StepLoad, Valve, choose, decode_ratio, not_worth
from deepinfer.kvstore.core.precision import (
    Policy,
    Precision,
    PrecisionError,
    PrecisionSettings,
    StepCost,
    packed,
    precision_of,
    resolve_policy,
    unpacked,
)

SLOW = StepCost((1, 16, 1024), (1000.0, 1000.0, 40_000.0), 1.0)
FAST = StepCost((1, 16, 1024), (600.0, 600.0, 39_000.0), 1.0)
COSTS = (SLOW, FAST)


def load(rows: int = 8, **changes: Any) -> StepLoad:
    return replace(StepLoad(rows=rows, decodes=rows, context_tokens=0), **changes)


def slo(ttft_ms: float = 1000.0, tpot_ms: float = 1.0, dwell_ms: int = 100) -> PrecisionSettings:
    return PrecisionSettings(ttft_target_ms=ttft_ms, tpot_target_ms=tpot_ms, dwell_ms=dwell_ms)


def run(
    settings: PrecisionSettings,
    *loads: StepLoad,
    costs: tuple[StepCost, ...] = COSTS,
    valve: Valve | None = None,
    every_ms: float = 10,
) -> list[int]:
    """The level of each step, ``every_ms`` apart."""
    valve, levels = valve or Valve(), []
    for number, one in enumerate(loads):
        valve = choose(settings, costs, len(costs) or 2, one, valve, int(number * every_ms))
        levels.append(valve.level)
    return levels


# ---- tags ----------------------------------------------------------------------------------


def test_tags_are_ordered_by_how_much_gave_way() -> None:
    assert [tag.value for tag in sorted(Precision)] == ["fp16", "mixed", "fp8", "w8a8"]
    assert max(Precision.MIXED, Precision.FP16) is Precision.MIXED
    assert not Precision.FP16 < Precision.FP16 <= Precision.FP16
    assert Precision.FP8 > Precision.MIXED >= Precision.MIXED
    tags = [precision_of(level, 4).value for level in range(5)]
    assert tags == ["fp16", "mixed", "mixed", "fp8", "w8a8"]
    assert precision_of(0, 1) is Precision.FP16
    assert precision_of(1, 2) is Precision.FP8


def test_tags_travel_as_a_byte_a_token_or_as_nothing() -> None:
    tags = (Precision.FP16, Precision.FP8, Precision.MIXED)
    assert packed(tags) == b"\0\2\1"
    assert unpacked(packed(tags), 3) == tags
    assert packed(tags[:1] * 5) == packed(()) == b""
    assert unpacked(b"", 2) == (Precision.FP16, Precision.FP16)
    for ranks, count in ((b"\0\0\1", 2), (b"\4", 1)):
        with pytest.raises(ValueError, match=f"must be empty, or {count} bytes"):
            unpacked(ranks, count)


# ---- costs ---------------------------------------------------------------------------------


def test_a_cost_is_linear_between_what_was_measured_and_beyond() -> None:
    cost = StepCost((2, 4, 8), (100.0, 120.0, 200.0), 0.5)
    at = [cost.predict(rows, 0) for rows in (1, 2, 3, 4, 6, 8, 10)]
    assert at == [100, 100, 110, 120, 160, 200, 240]
    assert cost.predict(3, 10) == 115
    assert StepCost((2, 4), (100.0, 90.0)).predict(10, 0) == 90, "noise is no bargain"
    assert StepCost((4,), (100.0,)).predict(8, 0) == 200
    assert StepCost((4,), (100.0,)).predict(1, 0) == 100


@pytest.mark.parametrize(
    ("rows", "us", "context", "name"),
    [
        ((), (), 0.0, "rows"),
        ((4, 2), (1.0, 1.0), 0.0, "rows"),
        ((0, 2), (1.0, 1.0), 0.0, "rows"),
        ((1, 2), (1.0,), 0.0, "us"),
        ((1,), (0.0,), 0.0, "us"),
        ((1,), (math.nan,), 0.0, "us"),
        ((1,), (1.0,), -1.0, "us_per_context_token"),
    ],
)
def test_an_impossible_cost_is_named(
    rows: tuple[int, ...], us: tuple[float, ...], context: float, name: str
) -> None:
    with pytest.raises(PrecisionError, match=f"^{name} = .*: must be"):
        StepCost(rows, us, context)


def test_why_it_may_not_be_worth_it() -> None:
    assert not_worth(COSTS, 2) == ""
    assert not_worth((), 1) == "the model's weights are not nested"
    assert "not measured" in not_worth((), 2)
    assert "no faster" in not_worth((SLOW, SLOW), 2)
    assert "1.00 at 8 rows" in not_worth((SLOW, SLOW), 2)
    assert decode_ratio(COSTS) == pytest.approx(0.6)
    assert decode_ratio(()) == 0


# ---- policies ------------------------------------------------------------------------------


def test_static_policies_and_the_published_one() -> None:
    settings = PrecisionSettings(policy=Policy.FP16)
    assert run(settings, load(2000)) == [0]
    settings = PrecisionSettings(policy=Policy.FP8)
    assert run(settings, load(1), costs=()) == [1]
    assert run(replace(settings, level_max=0), load(1)) == [0]
    settings = PrecisionSettings(policy=Policy.THRESHOLD, threshold_tokens=1024)
    assert run(settings, load(1024), load(1025), load(1), costs=()) == [0, 1, 0]


def test_slo_keeps_fp16_while_both_targets_hold() -> None:
    assert run(slo(tpot_ms=1.2), *[load()] * 50) == [0] * 50


def test_slo_gives_way_where_a_token_would_take_too_long_and_comes_back() -> None:
    # 8 rows and 200 tokens of context: 1.2 ms in FP16, 0.8 in FP8, and 0.9 of the target is 0.9.
    heavy, light = load(context_tokens=200), load(context_tokens=0)
    settings = slo(tpot_ms=1.0, dwell_ms=100)
    assert run(settings, heavy) == [1]
    # Below 0.7 of the target it comes back, after the dwell; FP16 takes 1.0 of it.
    assert set(run(settings, heavy, *[light] * 60)) == {1}
    settings = slo(tpot_ms=1.5, dwell_ms=100)
    heavy = load(context_tokens=500)
    levels = run(settings, heavy, *[light] * 200)
    assert levels[:10] == [1] * 10, "the dwell"
    back = levels.index(0)
    assert 130 < back < 170, "and until the mean of steps has come down"
    assert set(levels[back:]) == {0}
    assert run(settings, heavy, *[load(decodes=0)] * 20).index(0) == 10, (
        "no decode: the dwell alone"
    )


def test_slo_does_not_flap_between_the_two_thresholds() -> None:
    # FP16 at 0.75 of the target: too little to go up, too much to come down.
    settings = slo(tpot_ms=1.0 / 0.75, dwell_ms=0)
    assert set(run(settings, *[load()] * 100)) == {0}
    assert set(run(settings, *[load()] * 100, valve=Valve(1, 0))) == {1}


def test_one_long_step_among_short_ones_changes_nothing() -> None:
    long = load(rows=200, decodes=8)
    assert SLOW.predict(200, 0) > 7000
    steps = [*[load()] * 40, long, *[load()] * 40]
    assert set(run(slo(tpot_ms=1.3, dwell_ms=0), *steps)) == {0}
    assert 1 in run(slo(tpot_ms=2.5, dwell_ms=0), *[load(), load(), long] * 60)


def test_slo_counts_what_waits_for_its_first_token() -> None:
    settings = slo(ttft_ms=100.0, tpot_ms=50.0)
    fast = (SLOW, StepCost((1, 16, 1024), (600.0, 600.0, 20_000.0), 1.0))
    waits = load(backlog_tokens=5000, step_tokens_max=1024)
    assert run(settings, load(backlog_tokens=500), costs=fast) == [0]
    assert run(settings, waits, costs=fast) == [1], "5 steps of 40 ms do not hold 100 ms"
    assert run(settings, waits) == [0], "5 of 39 ms are no gain"
    assert run(settings, load(backlog_tokens=1, backlog_ms=95)) == [1], "it has waited already"
    assert run(settings, load(backlog_ms=95)) == [0], "nobody waits"


def test_a_step_with_prompts_is_lent_a_level_where_that_costs_nothing() -> None:
    costs = (SLOW, StepCost((1, 16, 1024), (600.0, 600.0, 37_500.0), 1.0))
    settings = slo(ttft_ms=200.0, tpot_ms=50.0, dwell_ms=100)
    prompts = load(1024, decodes=8, backlog_tokens=3000, step_tokens_max=1024)
    few = replace(prompts, backlog_tokens=1024)
    assert run(settings, prompts, load(), few, prompts, costs=costs) == [1, 0, 0, 1]
    late = replace(prompts, backlog_tokens=6000)
    assert run(settings, late, load(), costs=costs) == [1, 0], "lent, too, where it must be late"
    assert run(settings, load(backlog_tokens=3000), costs=costs) == [0], "none of them is in it"


def test_slo_goes_up_before_batches_are_full_and_stays_while_fp16_s_would_be() -> None:
    settings = slo(tpot_ms=50.0, dwell_ms=0)
    full = [load(14, seats=16)] * 200
    assert set(run(settings, *[load(4, seats=16)] * 100, every_ms=1)) == {0}
    levels = run(settings, *full, every_ms=1)
    assert 100 < levels.index(1) < 120, "from a tenth of a second one can tell"
    # In FP8 as many tokens come from smaller batches; 14 a step of 1 ms is what FP16 would need.
    fast = [load(8, seats=16), load(9, seats=16)] * 400
    levels = run(settings, *full, *fast, every_ms=0.6)
    assert set(levels[200:]) == {1}
    idle = run(settings, *full, *[load(2, seats=16)] * 3000, every_ms=1)
    assert 100 < idle[200:].index(0) < 500
    assert set(idle[1500:]) == {0}


def test_sequences_that_take_turns_wait_for_their_tokens() -> None:
    settings = slo(tpot_ms=2.0, dwell_ms=0)
    assert run(settings, load(8, seats=8, decoding=10)) == [0]
    assert run(settings, load(8, seats=8, decoding=20)) == [1], "2.5 steps for a token"
    settings = slo(tpot_ms=50.0, dwell_ms=0)
    assert run(settings, load(16, seats=64, decoding=31)) == [0]
    assert run(settings, load(16, seats=64, decoding=33)) == [1], "half of the seats are taken"
    assert run(settings, load(8, seats=8, decoding=8)) == [0], "eight are soon taken"
    assert run(settings, load(16, seats=64, decoding=20), valve=Valve(1, 0)) == [1], "33 in FP16"
    assert run(settings, load(16, seats=64, decoding=14), valve=Valve(1, 0)) == [0]


def test_the_smallest_level_that_suffices() -> None:
    costs = tuple(
        StepCost((1, 1024), (us, 100 * us)) for us in (1000.0, 900.0, 800.0, 700.0, 600.0)
    )
    for tpot_ms, level in ((1.2, 0), (1.05, 1), (0.95, 2), (0.8, 3), (0.68, 4), (0.5, 4)):
        assert run(slo(tpot_ms=tpot_ms), load(1), costs=costs) == [level], tpot_ms
    capped = replace(slo(tpot_ms=0.5), level_max=2)
    assert run(capped, load(1), costs=costs) == [2]
    assert run(capped, load(1), costs=costs, valve=Valve(4, 0)) == [2], "at once"


@pytest.mark.parametrize("costs", [(), (SLOW, SLOW), (SLOW, StepCost((1,), (1500.0,)))])
def test_where_fp8_is_not_predicted_faster_slo_stays(costs: tuple[StepCost, ...]) -> None:
    assert set(run(slo(tpot_ms=0.1), *[load()] * 20, costs=costs)) == {0}
    assert run(slo(tpot_ms=0.1), load(), costs=costs, valve=Valve(1, 0)) == [0]


# ---- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ttft_target_ms": 0.0}, "ttft_target_ms = 0.0: must be above 0"),
        ({"tpot_target_ms": -1.0}, "tpot_target_ms = -1.0: must be above 0"),
        ({"tpot_target_ms": math.inf}, "tpot_target_ms = inf: must be above 0 and finite"),
        ({"dwell_ms": -1}, "dwell_ms = -1: must be 0 or more"),
        ({"level_max": 6}, "level_max = 6: must be between 0 and 5"),
        ({"threshold_tokens": -1}, "threshold_tokens = -1: must be 0 or more"),
    ],
)
def test_impossible_settings_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PrecisionError, match=f"^{says}"):
        PrecisionSettings(**changes)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    says = "precision = 'best': must be one of fp16, fp8, threshold, slo"
    with pytest.raises(PrecisionError, match=f"^{says}$"):
        resolve_policy("best")
    assert resolve_policy("slo") is Policy.SLO
