"""The wait for running requests at a stop, and how long `down` lets them have."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest

from deepinfer.deploy import interrupts, running, stopping
from deepinfer.deploy.running import Running

Levels = list[tuple[str, bool, bool, int]] | None
HERE = Running(
    endpoints=("127.0.0.1:7470",),
    pid=1,
    started_ticks=1,
    token_file="token",
    model="demo",
    operator_token="a-secret",
    grace_s=20.0,
)


def busy(left: int) -> Levels:
    return [("gateway-0", False, left == 0, left), ("gateway-1", False, True, 0)]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Levels]:
    """What the controller answers, one after the other; the last one again and again."""
    script: list[Levels] = []

    def ask(controller: object, gateways: list[str]) -> Levels:
        assert controller == "handle"
        assert gateways == ["gateway-0", "gateway-1"]
        return script.pop(0) if len(script) > 1 else script[0]

    monkeypatch.setattr(stopping, "_ask", ask)
    monkeypatch.setattr(stopping, "POLL_S", 0.001)
    return script


def finish(grace_s: float, said: list[str]) -> int | None:
    actors = dict.fromkeys(("controller", "worker-0", "gateway-0", "gateway-1"), "handle")
    return stopping.finish_requests(actors, grace_s, said.append)


def test_it_ends_when_every_gateway_is_empty(answers: list[Levels]) -> None:
    answers += [busy(2), None, [("gateway-0", False, True, 0)], busy(1), busy(0)]
    said: list[str] = []
    assert finish(5.0, said) == 0
    assert said == ["2 requests are running: up to 5 s more for them"]
    assert len(answers) == 1


@pytest.mark.parametrize(("answer", "left"), [(busy(3), 3), (None, None)])
def test_it_ends_with_the_grace(answers: list[Levels], answer: Levels, left: int | None) -> None:
    answers.append(answer)
    assert finish(0.05, []) == left


def test_a_second_signal_cuts_it_short(
    answers: list[Levels], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.append(busy(1))
    monkeypatch.setattr(interrupts, "DEAF_S", 0.0)
    with interrupts.stop_signals():
        with pytest.raises(interrupts.Terminated):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(interrupts.Terminated):
            interrupts.check()
        interrupts.anew()
        interrupts.check()
        said: list[str] = []
        monkeypatch.setattr(stopping, "SAY_S", 0.0)

        def say(line: str) -> None:
            said.append(line)
            if len(said) == 2:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            stopping.finish_requests(
                dict.fromkeys(("controller", "gateway-0", "gateway-1"), "handle"), 60.0, say
            )


def test_down_tells_the_launcher_how_long_and_only_its_owner_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert running.wished_grace(HERE.name) is None
    running.remember(HERE)
    running.wish_grace(HERE.name, 3.5)
    assert running.wished_grace(HERE.name) == 3.5
    files = sorted((tmp_path / "deepinfer").iterdir())
    assert [file.name for file in files] == ["127.0.0.1_7470.grace", "127.0.0.1_7470.json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert "a-secret" not in repr(HERE)
    files[0].write_text("-1")
    assert running.wished_grace(HERE.name) is None
    running.forget(HERE.name)
    assert list((tmp_path / "deepinfer").iterdir()) == []
