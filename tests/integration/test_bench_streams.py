"""`bench streams` on a tiny model, without Ray: every phase is measured, and found right."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.deploy.bench import streams_report
from deepinfer.deploy.bench.streams import measure_phase
from deepinfer.deploy.bench.streams_report import BLOCK_SIZE, PHASES, Load, Phase
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ConfigError
from support.local_cluster import TOKEN, local_cluster, run_on
from support.tiny_model import write_tiny_llama


@dataclass(frozen=True, slots=True)
class InProcess:
    """As much of a ``Cluster`` as a phase looks at."""

    endpoints: tuple[str, ...]
    token: str = TOKEN

    def pid(self, _: str) -> int:
        return os.getpid()


def test_every_phase_is_measured_and_as_it_should_be(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", layers=4)
    load = Load(streams=40, processes=2, tokens=300, rounds=1)
    done: list[Phase] = []

    async def test() -> None:
        async with local_cluster(
            model,
            blocks=load.blocks,
            block_size=BLOCK_SIZE,
            controller=ControllerConfig(cpu_offload=False, reserve="full"),
        ) as cluster:
            here = InProcess(tuple(cluster.addresses.values()))
            done.extend([await measure_phase(cast(Cluster, here), load, name) for name in PHASES])
            with pytest.raises(ConfigError, match="tokens = 17: they came before 40 streams"):
                await measure_phase(cast(Cluster, here), replace(load, tokens=17), "crowd")
            await cluster.until_free()

    with asyncio.Runner() as runner:
        run_on(runner, test)
    figures: dict[str, Any] = streams_report.summary(load, done)
    assert figures["as_it_should_be"], figures
    assert figures["ends_of_the_crowd"] == [{"length": 40}] * 2
    slow = figures["slow_reader"]
    assert slow["messages_when_read_late"][0] < slow["tokens"] / 2 < slow["tokens"]
    assert min(slow["messages_when_read_at_once"]) > slow["tokens"] / 2
    for name in PHASES:
        assert figures["phases"][name]["p50_ms"] > 0
    streams_report.plot(figures, done, tmp_path / "streams.png")
    assert (tmp_path / "streams.png").stat().st_size > 10_000
    assert streams_report.table(figures).row_count == len(PHASES)
    broken = streams_report.summary(load, [*done[:-1], replace(done[-1], token_ids=(1,))])
    assert not broken["as_it_should_be"]
