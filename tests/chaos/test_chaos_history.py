"""The history checker finds every kind of fault that the kills look for."""

from __future__ import annotations

import pytest

from deepinfer.client import (
    Accepted,
    Choice,
    Delta,
    Event,
    Finished,
    Notice,
    SwapStats,
    Timings,
    Usage,
)
from deepinfer.deploy.chaos.history import Faults, History

EXPECTED = (5, 6, 7, 8)


def delta(position: int, *token_ids: int) -> Delta:
    return Delta(choice=0, position=position, token_ids=token_ids, text="", logprobs=())


def finished(*token_ids: int) -> Finished:
    choice = Choice(
        index=0,
        text="",
        token_ids=token_ids,
        finish_reason="length",
        message="",
        matched_stop=None,
        logprobs=(),
        usage=Usage(prompt_tokens=1, completion_tokens=len(token_ids)),
        swaps=SwapStats(),
        timings=Timings(
            ttft_s=None,
            intervals_s=(),
            total_s=0.0,
            reconnects=0,
            gateway_ttft_s=None,
            gateway_tpot_s=None,
        ),
    )
    return Finished(choice=choice, text="")


def notice(kind: str) -> Notice:
    return Notice(
        kind=kind, choice=0, worker="worker-0", store="", blocks=1, payload_bytes=0, copy_s=0.0
    )


def heard(*events: Event) -> History:
    history = History(EXPECTED)
    for event in events:
        history.hear(event)
    return history


@pytest.mark.parametrize(
    ("events", "faults"),
    [
        ([delta(0, 5, 6), delta(2, 7, 8), finished(*EXPECTED)], Faults()),
        ([delta(0, 5, 6), delta(3, 8), finished(5, 6, 8)], Faults(1, 0, 0, 1, 1)),
        ([delta(0, 5, 6), delta(1, 6, 7, 8), finished(*EXPECTED)], Faults(0, 1, 0, 1)),
        ([delta(0, 5, 9, 7, 8), finished(5, 9, 7, 8)], Faults(1, 0, 1, 0, 1)),
        ([delta(2, 7, 8), delta(0, 5, 6), finished(*EXPECTED)], Faults(0, 0, 0, 2)),
        ([delta(0, *EXPECTED, 9), finished(*EXPECTED, 9)], Faults(0, 0, 1, 0, 1)),
        ([delta(0, *EXPECTED)], Faults(unfinished=1)),
        ([], Faults(lost=4, unfinished=1)),
    ],
    ids=["right", "lost", "doubled", "changed", "reordered", "too-long", "endless", "silent"],
)
def test_faults_are_counted(events: list[Event], faults: Faults) -> None:
    assert heard(*events).faults() == faults


def test_recovery_ends_with_the_first_token_of_a_later_run() -> None:
    history = heard(
        Accepted(request_id="r", resume_key="k", prompt_tokens=1, gateway="gateway-0"),
        notice("placed"),
        delta(0, 5),
    )
    killed = history.events[-1][0] + 1e-9
    history.events.append((killed + 0.1, delta(1, 6)))  # was on its way
    history.events.append((killed + 0.5, notice("placed")))
    history.events.append((killed + 0.7, delta(2, 7)))
    assert history.request == "r"
    assert history.recovered_s(killed) == pytest.approx(0.7)
    assert history.recovered_s(killed + 0.6) is None
