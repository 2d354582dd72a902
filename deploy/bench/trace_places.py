"""Where a trace is replayed by the bench itself: in simulated time, or on the card of this machine.

Both run the production cores of a controller and of workers (``trace_drive``). On a card it is one
worker in this process and thread, with the model, KV pool and graphs that a worker's process has.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final, Protocol

from deepinfer.deploy.bench.trace_costs import Costs, facts_of
from deepinfer.deploy.bench.trace_drive import (
    EngineStepper,
    Replayed,
    SimulatedClock,
    SimulatedStepper,
    Stepper,
    WallClock,
    replay,
)
from deepinfer.deploy.bench.trace_load import Ask, Words
from deepinfer.kvstore.core.precision import PrecisionSettings, StepCost
from deepinfer.workers.core.config import WorkerConfig

BLOCK_SIZE: Final = 16
BLOCKS: Final = 8192
"""KV blocks of a worker: what so many seats need of prompts and answers as long as Azure's."""
BLOCK_BYTES: Final = 589_824
"""Of Qwen2.5-3B's FP16 KV."""
CARD_PATIENCE_US: Final = 15_000_000


class Place(Protocol):
    """Serves requests with workers that follow a policy."""

    @property
    def workers(self) -> int: ...

    @property
    def limits(self) -> WorkerConfig | None:
        """Of each worker, if it is known here what steps cost."""

    def words(self, text: str) -> Words:
        """Prompts of a text."""

    def serve(self, asks: Sequence[Ask], settings: PrecisionSettings, seed: int) -> Replayed:
        """Replay requests; caches are empty at the beginning, or hold nothing of theirs."""

    def facts(self) -> dict[str, Any]:
        """What a result's JSON says of the place."""

    def close(self) -> None:
        """Give everything back."""


class Simulated:
    """Workers whose steps take what ``costs`` says."""

    def __init__(self, costs: Costs, workers: int, blocks: int = BLOCKS) -> None:
        self._costs = costs
        self.workers = workers
        self.limits: WorkerConfig | None = worker_config(costs.levels, blocks, BLOCK_BYTES)

    def words(self, text: str) -> Words:
        """Nobody reads them: a byte is a token."""
        return Words(text.encode())

    def serve(self, asks: Sequence[Ask], settings: PrecisionSettings, seed: int) -> Replayed:
        """In simulated time."""
        assert self.limits is not None
        rng = Random(seed)
        steppers: list[Stepper] = [
            SimulatedStepper(self._costs.levels, Random(rng.random())) for _ in range(self.workers)
        ]
        return replay(asks, [self.limits] * self.workers, steppers, settings, SimulatedClock())

    def facts(self) -> dict[str, Any]:
        """The costs and the workers' limits."""
        assert self.limits is not None
        return {"workers": self.workers, "limits": limits_of(self.limits), **self._costs.facts()}

    def close(self) -> None:
        """There is nothing to give back."""


class OnEngine:
    """One worker's core and an engine, in this thread and in real time."""

    def __init__(self, engine: Any, config: WorkerConfig, facts: dict[str, Any]) -> None:
        self._engine = engine
        self._facts = facts
        self.workers = 1
        self.limits: WorkerConfig | None = config

    def words(self, text: str) -> Words:
        """Random weights have no tokenizer: a byte is a token."""
        return Words(text.encode())

    def serve(self, asks: Sequence[Ask], settings: PrecisionSettings, seed: int) -> Replayed:
        """In real time. The core is new, and with it the prefix cache."""
        assert self.limits is not None
        gc.collect()
        clock = WallClock()
        return replay(
            asks,
            [self.limits],
            [EngineStepper(self._engine, clock)],
            settings,
            clock,
            patience_us=CARD_PATIENCE_US,
        )

    def facts(self) -> dict[str, Any]:
        """The card, the model and the worker's limits."""
        assert self.limits is not None
        costs = [facts_of(cost) for cost in self.limits.costs]
        return {
            "workers": 1,
            "limits": limits_of(self.limits),
            "source": "measured at the start",
            "costs": costs,
            **self._facts,
        }

    def close(self) -> None:
        """The process ends with the bench, and the card's memory with it."""


def on_card(shape: str, max_context: int, blocks: int = BLOCKS) -> OnEngine:
    """A model of a known ``shape`` with nested random weights on this machine's card.

    Raises:
        ConfigError: kernels cannot run here, or the shape is unknown.
        GpuMemoryError: the card is too small.
    """
    from deepinfer.deploy.bench.card_facts import card_facts
    from deepinfer.deploy.bench.random_weights import SHAPES, random_model
    from deepinfer.deploy.config import ConfigError
    from deepinfer.deploy.validate.run import usable_card
    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.workers.engine import Engine
    from deepinfer.workers.gpu.opening import StepSizes, open_gpu
    from deepinfer.workers.gpu.settings import GpuSettings, NestedSettings
    from deepinfer.workers.model.decoder import kv_layout
    from deepinfer.workers.model.nested import nest

    if shape not in SHAPES:
        raise ConfigError(f"shape = {shape!r}: must be one of {', '.join(SHAPES)}")
    card, _ = usable_card()
    config = replace(SHAPES[shape], max_positions=max_context)
    layout = kv_layout(config, resolve_kv_dtype("fp16"), BLOCK_SIZE)
    limits = worker_config((), blocks, layout.block_bytes)
    opened = open_gpu(
        card,
        nest(random_model(config, device="cuda")),
        layout,
        GpuSettings(fill_card=False, probe=False),
        StepSizes(rows=limits.max_batch_tokens, sequences=limits.max_batch_seqs),
        blocks,
        nested=NestedSettings(),
    )
    runner = opened.runner
    limits = replace(limits, blocks_total=opened.blocks, levels=runner.levels, costs=runner.costs)
    facts = {"shape": shape, "card": card_facts(card), "notes": list(opened.notes)}
    return OnEngine(Engine(runner), limits, facts)


def worker_config(costs: tuple[StepCost, ...], blocks: int, block_bytes: int) -> WorkerConfig:
    """A worker with the limits that it has by default, prefix caching on."""
    return WorkerConfig(
        blocks_total=blocks,
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes,
        levels=max(1, len(costs)),
        costs=costs,
    )


def limits_of(config: WorkerConfig) -> dict[str, Any]:
    """For a result's JSON."""
    return {
        "blocks_total": config.blocks_total,
        "block_size": config.block_size,
        "max_batch_tokens": config.max_batch_tokens,
        "max_batch_seqs": config.max_batch_seqs,
        "prefill_chunk_tokens": config.prefill_chunk_tokens,
        "levels": config.levels,
    }
