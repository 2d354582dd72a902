"""`bench handoff`: its arithmetic, and what it says when Redis cannot be measured."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer.deploy.bench.handoff import SIZES_MB, Timings, required, summary
from deepinfer.deploy.bench.handoff_peers import find_redis, running_ray
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.interrupts import stop_signals


def test_a_rate_is_bytes_by_the_median_of_put_and_get_together() -> None:
    timings = {
        # The medians of put (0.2) and get (0.1) are of different rounds; that of both is 0.4.
        "grpc": Timings(put_s=[0.1, 0.2, 0.9], get_s=[0.3, 0.05, 0.1]),
        "memfd": Timings(put_s=[0.05] * 3, get_s=[0.03] * 3),
        "ray": Timings(put_s=[0.1] * 3, get_s=[0.1] * 3),
    }
    figures = summary(80_000_000, 217, timings, [0.004, 0.002, 0.003], [0.06, 0.01, 0.02])
    assert (figures["payload_bytes"], figures["blocks"]) == (80_000_000, 217)
    assert figures["hash_ms"] == 3.0
    grpc, memfd, ray = (figures["peers"][name] for name in ("grpc", "memfd", "ray"))
    assert grpc == {
        "gb_per_s": 0.2,
        "gb_per_s_slowest": 0.08,
        "gb_per_s_fastest": 0.32,
        "times_grpc": 1.0,
        "put_ms": 200.0,
        "get_ms": 100.0,
        "hash_passes": 4,
        "hash_share": 0.03,
    }
    assert (memfd["gb_per_s"], memfd["times_grpc"]) == (1.0, 5.0)
    assert memfd["hash_share"] == pytest.approx(3 * 0.003 / 0.08, rel=1e-3)
    assert (ray["times_grpc"], ray["get_without_the_copy_ms"]) == (2.0, 20.0)
    assert "hash_share" not in ray


def result(payload_bytes: int, grpc: float, memfd: float, times: float) -> dict[str, object]:
    return {
        "payload_bytes": payload_bytes,
        "peers": {
            "grpc": {"gb_per_s": grpc},
            "memfd": {"gb_per_s": memfd, "times_grpc": times},
        },
    }


def test_what_is_required_is_asked_of_every_payload_from_8_mb() -> None:
    found = required(
        [
            result(737_280, 0.1, 0.2, 2.0),
            result(8_110_080, 0.5, 2.5, 4.99),
            result(64 << 20, 0.49, 2.49, 5.0),
        ]
    )
    assert [(each["payload_bytes"], each["what"], each["holds"]) for each in found] == [
        (8_110_080, "grpc gb_per_s", True),
        (8_110_080, "memfd gb_per_s", True),
        (8_110_080, "memfd times_grpc", False),
        (64 << 20, "grpc gb_per_s", False),
        (64 << 20, "memfd gb_per_s", False),
        (64 << 20, "memfd times_grpc", True),
    ]
    assert [(each["measured"], each["at_least"]) for each in found[:3]] == [
        (0.5, 0.5),
        (2.5, 2.5),
        (4.99, 5.0),
    ]


def test_the_sizes_go_up_from_one_small_swap() -> None:
    assert list(SIZES_MB) == sorted(SIZES_MB)
    assert round(SIZES_MB[0] * 1e6 / 368_640) * 368_640 == 720 * 1024


def test_redis_is_found_on_the_path_or_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_redis(program) == program
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec("redis") is not None:
        assert find_redis(None) == program
        program.unlink()
        assert "no redis-server on PATH" in str(find_redis(None))
    with pytest.raises(ConfigError, match=r"redis_server = .*nowhere"):
        find_redis(tmp_path / "nowhere")


def test_ctrl_c_while_ray_starts_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, done = tmp_path / "session", []

    def init(**_: object) -> SimpleNamespace:
        session.mkdir()
        signal.raise_signal(signal.SIGINT)
        return SimpleNamespace(address_info={"session_dir": str(session)})

    fake = ModuleType("ray")
    fake.__dict__.update(
        init=init, is_initialized=lambda: False, shutdown=lambda: done.append("shutdown")
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name, value in (
        ("RAY_AUTH_MODE", "token"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
    ):
        monkeypatch.setenv(name, value)

    async def start() -> None:
        async with running_ray(1):
            done.append("ran")

    with stop_signals(), pytest.raises(KeyboardInterrupt):
        asyncio.run(start())
    assert done == ["shutdown"]
    assert not session.exists()
