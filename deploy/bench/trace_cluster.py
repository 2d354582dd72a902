"""Where a trace is replayed through a whole cluster on this machine's CPU.

A cluster is started for each policy, for its settings are read at the start. Requests go through
the SDK, and their times are those that a client sees. FP8 mode is no faster on a CPU, so ``slo``
stays in FP16 there: the worker says so, and with it the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from deepinfer.client import AsyncClient, Completion, DeepInferError
from deepinfer.deploy.bench.trace_drive import Replayed, Served
from deepinfer.deploy.bench.trace_load import Ask, Words
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.generate import get_model
from deepinfer.kvstore.core.precision import Policy, Precision, PrecisionSettings
from deepinfer.kvstore.core.requests import FinishReason
from deepinfer.workers.core.config import WorkerConfig

POOL_TOKENS = 16_384


class OnCluster:
    """A cluster of one worker, with nested weights."""

    def __init__(self, model: str, console: Console) -> None:
        self._path = get_model(model, console=console)
        self._settings: PrecisionSettings | None = None
        self._cluster: Cluster | None = None
        self._remark = ""
        self.workers = 1
        self.limits: WorkerConfig | None = None

    def words(self, text: str) -> Words:
        """The text as the model's tokens."""
        from deepinfer.text.load import load_tokenizer

        tokenizer = load_tokenizer(self._path)
        return Words(tokenizer.encode(text, add_special_tokens=False))

    def serve(self, asks: Sequence[Ask], settings: PrecisionSettings, seed: int) -> Replayed:
        """In real time; a cluster with other settings is stopped, and one with these started."""
        cluster = self._running(settings)
        return asyncio.run(self._replay(cluster, asks))

    def facts(self) -> dict[str, Any]:
        """The model, and what the worker says of its policy."""
        return {
            "workers": 1,
            "model": self._path.name,
            "source": "a cluster on the CPU; an FP8 step costs what an FP16 step does",
            "slo": self._remark,
        }

    def close(self) -> None:
        """Stop the cluster."""
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
            self._cluster = self._settings = None

    def _running(self, settings: PrecisionSettings) -> Cluster:
        if self._cluster is not None and settings == self._settings:
            return self._cluster
        self.close()
        chosen: dict[str, Any] = {"precision": settings.policy.value}
        if settings.policy is Policy.SLO:
            chosen["ttft_target_ms"] = settings.ttft_target_ms
            chosen["tpot_target_ms"] = settings.tpot_target_ms
        config = ClusterConfig(
            model=str(self._path),
            workers=1,
            device="cpu",
            weights="nested",
            kv_quality="off",  # the pool is FP16
            max_cache=f"{POOL_TOKENS // 16} blocks",
            block_size=16,
            threads=1,
            port=0,
            **chosen,
        )
        cluster = Cluster(config)
        cluster.__enter__()
        self._cluster, self._settings = cluster, settings
        return cluster

    async def _replay(self, cluster: Cluster, asks: Sequence[Ask]) -> Replayed:
        async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
            before = await self._of_worker(client)
            began_s = time.perf_counter()
            results = await asyncio.gather(*(self._ask(client, ask, began_s) for ask in asks))
            end_us = round(1e6 * (time.perf_counter() - began_s))
            after = await self._of_worker(client)
        self._remark = after["remark"] or self._remark
        replayed = Replayed([served for served, _ in results], [], dict.fromkeys(Precision, 0))
        for place, precision in enumerate(Precision):
            replayed.tokens[precision] = after["tokens"][place] - before["tokens"][place]
        # In the order of levels, FP16 first: two of them.
        spent = [1000 * (b - a) for a, b in zip(before["ms"], after["ms"], strict=True)]
        replayed.step_us = [spent[0], spent[2]]
        replayed.switches = after["switches"] - before["switches"]
        replayed.swaps = sum(done.swaps.swaps for _, done in results if done is not None)
        replayed.cached_tokens = sum(
            done.usage.cached_tokens for _, done in results if done is not None
        )
        replayed.end_us = end_us
        return replayed

    async def _ask(
        self, client: AsyncClient, ask: Ask, began_s: float
    ) -> tuple[Served, Completion | None]:
        """Send one request when it is due, and wait for its end."""
        served = Served(ask.at_us)
        await asyncio.sleep(max(0.0, ask.at_us / 1e6 - (time.perf_counter() - began_s)))
        try:
            done = await client.generate(
                ask.prompt_ids, max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True
            )
        except DeepInferError:
            served.finish = FinishReason.ERROR
            return served, None
        assert done.timings.ttft_s is not None
        served.first_us = ask.at_us + round(1e6 * done.timings.ttft_s)
        served.last_us = served.first_us + round(1e6 * sum(done.timings.intervals_s))
        served.tokens = len(done.token_ids)
        served.finish = FinishReason(done.finish_reason)
        return served, done

    async def _of_worker(self, client: AsyncClient) -> dict[str, Any]:
        """What the worker has reported of its levels."""
        await asyncio.sleep(0.3)  # until it has reported
        status = await client.status()
        (worker,) = status["workers"].values()
        said: dict[str, Any] = worker["precision"]
        return said
