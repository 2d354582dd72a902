"""`bench handoff` with small payloads: everyone takes part, and what arrives is compared."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from deepinfer.deploy.bench import handoff
from deepinfer.deploy.bench.handoff import LAYOUT, NAMES, Timings, run_handoff
from deepinfer.deploy.bench.handoff_peers import MemcpyPeer, Payload, Peer, running_redis
from deepinfer.deploy.config import ConfigError

pytest.importorskip("matplotlib")
ROUNDS = 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("handoff")
    figures = run_handoff(
        sizes_mb=(0.3, 9.0),
        rounds=ROUNDS,
        redis_server=None,
        output=output,
        console=Console(quiet=True),
    )
    assert json.loads((output / "handoff.json").read_text()).items() >= figures.items()
    return output


def test_every_peer_is_measured_with_the_same_payloads(written: Path) -> None:
    found: dict[str, Any] = json.loads((written / "handoff.json").read_text())
    assert found["command"] == "deepinfer bench handoff --mb 0.3 --mb 9 --rounds 2"
    assert found["peers"] == NAMES
    assert found["block_bytes"] == LAYOUT.block_bytes == 360 * 1024
    assert [(r["blocks"], r["payload_bytes"]) for r in found["results"]] == [
        (1, 368_640),
        (24, 24 * 368_640),
    ]
    for result in found["results"]:
        assert set(result["peers"]) == set(NAMES) - set(found["skipped"])
        grpc = result["peers"]["grpc"]
        assert grpc["times_grpc"] == 1
        for peer in result["peers"].values():
            assert peer["times_grpc"] == pytest.approx(
                peer["gb_per_s"] / grpc["gb_per_s"], rel=2e-3
            )
            assert 0 < peer["gb_per_s_slowest"] <= peer["gb_per_s"] <= peer["gb_per_s_fastest"]
            # Of two rounds the median is the mean, so put and get add up.
            both_s = (peer["put_ms"] + peer["get_ms"]) / 1e3
            assert peer["gb_per_s"] == pytest.approx(
                result["payload_bytes"] / both_s / 1e9, rel=2e-3
            )
        assert result["peers"]["ray"]["get_without_the_copy_ms"] > 0
        assert 0 < grpc["hash_share"] < 1
    assert [each["payload_bytes"] for each in found["required"]] == [24 * 368_640] * 3
    assert (written / "handoff.png").stat().st_size > 10_000


def test_redis_takes_part_where_it_is_installed(written: Path) -> None:
    found = json.loads((written / "handoff.json").read_text())
    if shutil.which("redis-server") is None:
        assert "redis-server" in found["skipped"]["redis"]
    else:
        assert found["skipped"] == {}


def test_a_redis_that_does_not_start_is_one_message(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho cannot bind\nexit 1\n")
    program.chmod(0o755)

    async def main() -> None:
        async with running_redis(program):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="does not start: cannot bind"):
        asyncio.run(main())


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_redis_is_gone_afterwards() -> None:
    pytest.importorskip("redis")
    seen: list[int] = []

    async def main() -> None:
        async with running_redis(Path(str(shutil.which("redis-server")))) as peer:
            payload = Payload.make(LAYOUT, 1)
            payload.target.fill(0)
            await peer.put(payload)
            await peer.get(payload)
            assert np.array_equal(payload.target, payload.source)
            seen.append(peer.port)
            socket.create_connection(("127.0.0.1", peer.port)).close()

    asyncio.run(main())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", seen[0]))


def test_a_peer_that_gives_back_other_bytes_ends_the_bench() -> None:
    class Forgetful(MemcpyPeer):
        async def get(self, payload: Payload) -> None:
            await super().get(payload)
            payload.target[-1] ^= 1

    peer: Peer = Forgetful()
    with pytest.raises(RuntimeError, match="forgetful: what arrived is not what was sent"):
        asyncio.run(handoff.hand_over(Payload.make(LAYOUT, 1), "forgetful", peer, Timings()))
