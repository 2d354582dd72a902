"""A real cluster on a tiny model for integration tests, its oracle, and what must be left: nothing.

Ray, controller, store, gateways and workers are processes, started as ``deepinfer up`` does it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.client import AsyncClient
from deepinfer.deploy.access import CONTROLLER
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.text.load import load_tokenizer
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.engine import Engine
from deepinfer.workers.local import LocalEngine
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.pool import PagedPool
from support.tiny_model import write_tiny_llama

ORACLE_BLOCK_SIZE = 16


@contextmanager
def tiny_cluster(folder: Path, **settings: Any) -> Iterator[Cluster]:
    """A cluster on free ports; its model, token and state files lie in ``folder``.

    ``settings`` are those of ``ClusterConfig``. The model is made unless it is there; every
    rounding changes its answers, so that KV quality is not looked at.
    """
    settings = {"kv_quality": "off"} | settings
    config = ClusterConfig(model=str(tiny_model(folder)), port=0, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        with Cluster(config) as cluster:
            yield cluster


def tiny_model(folder: Path) -> Path:
    """The model of these tests: slow enough that requests meet each other while they run."""
    model = folder / "model"
    if not (model / "model.safetensors").exists():
        write_tiny_llama(model, layers=4)
    return model


class Oracle:
    """Answers alone, in this process, in a pool that is never short. Remembers its answers."""

    def __init__(self, model: Path, kv_cache_dtype: str) -> None:
        loaded = load_model(model)
        self._eos = tuple(load_tokenizer(model).eos_ids)
        layout = kv_layout(loaded.config, resolve_kv_dtype(kv_cache_dtype), ORACLE_BLOCK_SIZE)
        blocks = layout.blocks_for(loaded.config.max_positions)
        pool = PagedPool(layout, blocks, torch.device("cpu"))
        self._engine = Engine(ModelRunner(loaded, pool, CpuBackend()))
        self._config = WorkerConfig(
            blocks_total=blocks,
            block_size=ORACLE_BLOCK_SIZE,
            block_bytes=layout.block_bytes,
            prefix_cache=False,
        )
        self._known: dict[tuple[Any, ...], tuple[tuple[int, ...], ...]] = {}

    def choices(self, prompt: Sequence[int], **sampling: Any) -> tuple[tuple[int, ...], ...]:
        """The token ids of every choice."""
        key = (tuple(prompt), tuple(sorted(sampling.items())))
        if key not in self._known:
            engine = LocalEngine(self._engine, self._config)
            params = SamplingParams(**sampling)
            done = engine.generate([prompt], params, stop_token_ids=self._eos)
            self._known[key] = tuple(tuple(c.token_ids) for c in done)
        return self._known[key]

    def answer(self, prompt: Sequence[int], **sampling: Any) -> tuple[int, ...]:
        """The token ids of the only choice."""
        [only] = self.choices(prompt, **sampling)
        return only


async def counters(cluster: Cluster) -> dict[str, float]:
    """The controller's counters, and the sum over all workers of theirs."""
    found: dict[str, float] = dict((await controller_status(cluster))["counters"])
    for name in ("tokens_computed", "tokens_generated", "prefix_hit_tokens", "recomputed"):
        found[name] = sum([w[name] for w in (await worker_statuses(cluster)).values()])
    return found


async def controller_status(cluster: Cluster) -> dict[str, Any]:
    """The controller's own document."""
    document: dict[str, Any] = await cluster.actors[CONTROLLER].status.remote()
    return document


async def worker_statuses(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What every worker says of itself."""
    names = [name for name in cluster.actors if name.startswith("worker-")]
    return {name: await cluster.actors[name].status.remote() for name in names}


async def left_over(cluster: Cluster) -> list[str]:
    """Blocks, payloads and requests that are still held, in words; by all who could hold them."""
    found = []
    for name, worker in (await worker_statuses(cluster)).items():
        names = ("blocks_held", "blocks_quarantined", "blocks_promised", "blocks_short")
        found += [f"{name}: {key} = {worker[key]}" for key in names if worker[key]]
        if worker["blocks_free"] != worker["blocks_total"]:
            found.append(f"{name}: {worker['blocks_free']} of {worker['blocks_total']} blocks free")
        if worker["residents"]:
            found.append(f"{name}: residents {worker['residents']}")
    document = await controller_status(cluster)
    for name, worker in document["workers"].items():
        if worker["blocks_free"] != worker["blocks_total"]:
            free = f"{worker['blocks_free']} of {worker['blocks_total']}"
            found.append(f"controller: {free} blocks free on {name}")
    for name, store in document["stores"].items():
        if store["used_bytes"] or store["tickets"]:
            found.append(f"{name}: {store['used_bytes']} bytes, {store['tickets']} tickets")
    found += [f"controller: {sequence}" for sequence in document["sequences"]]
    for endpoint in cluster.endpoints:
        async with AsyncClient(endpoint, token=cluster.token) as client:
            gateway = (await client.status())["gateway"]
        if gateway["live_requests"] or gateway["streams"]:
            live, streams = gateway["live_requests"], gateway["streams"]
            found.append(f"{gateway['name']}: {live} live requests, {streams} streams")
    return found


async def assert_nothing_left(cluster: Cluster, patience_s: float = 20.0) -> None:
    """Wait until every block is free, the store is empty and no gateway has a live request.

    Raises:
        AssertionError: something is left after ``patience_s``; says all of it.
    """
    deadline = time.monotonic() + patience_s
    while found := await left_over(cluster):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {patience_s:g} s:\n  " + "\n  ".join(found))
        await asyncio.sleep(0.05)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Processes whose environment has ``variable=value``: pid to command line.

    An environment is inherited, so these are a process that was started with it and all that came
    of it, whoever their parent is now.
    """
    entry = f"{variable}={value}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found[int(folder.name)] = command
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found
