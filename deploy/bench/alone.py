"""What requests answer alone: one after another in a process with room, no prefix cache, no peer.

For ``bench deterministic``, which holds streams of a pressed cluster against it; and how fast a
worker is with and without the mode, in one process and by turns.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from deepinfer.deploy.errors import LaunchError

if TYPE_CHECKING:
    from deepinfer.deploy.config import Device
    from deepinfer.workers.assembly import Device as Opened
    from deepinfer.workers.core.config import WorkerConfig

BATCHES: Final = (1, 8, 32)
"""Sequences that decode together where speed is measured."""
SPEED_TOKENS: Final = 24
"""That each of them generates."""
PROMPT_TOKENS: Final = 192
"""Of the prompts where their speed is measured; four at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as token ids."""

    prompt_ids: tuple[int, ...]
    sampling: dict[str, Any]
    seed: int

    @property
    def tokens(self) -> int:
        """Of prompt and answer together."""
        return len(self.prompt_ids) + int(self.sampling["max_tokens"])


class Answered(NamedTuple):
    """What came of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Of each token and its runners-up, float32 as they travel, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What computes."""

    model: Path
    kv_cache_dtype: str
    block_size: int
    device: Device
    deterministic: bool


def answer_alone(machine: Machine, asked: Sequence[Asked], processes: int) -> list[Answered]:
    """Answer each request alone, in ``processes`` processes that share the list.

    Raises:
        LaunchError: a process has died.
        OSError, ValueError: the model cannot be opened, or a request not be computed.
    """
    count = max(1, min(processes, len(asked)))
    parts = [tuple(asked[first::count]) for first in range(count)]
    found: list[Answered] = [Answered(())] * len(asked)
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(count, mp_context=spawn) as pool:
            for first, part in enumerate(pool.map(_answer, [machine] * count, parts)):
                found[first::count] = part
    except BrokenProcessPool as error:
        raise LaunchError(
            "a process that computes the answers for comparison has died: is there enough memory?"
        ) from error
    return found


def measure_speed(machines: Sequence[Machine], rounds: int) -> list[dict[str, float]]:
    """Tokens a second of each machine, decoding in ``BATCHES`` and computing prompts.

    One process has them all open, and they take turns. Raises as ``answer_alone``.
    """
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(_speeds, tuple(machines), rounds).result()
    except BrokenProcessPool as error:
        raise LaunchError("the process that measures speed has died") from error


def _open(machine: Machine, tokens: int, sequences: int) -> tuple[Opened, WorkerConfig]:
    """The device, with room for so many sequences of so many tokens."""
    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.proto.failpoints import Failpoints
    from deepinfer.workers.actor import WorkerSettings
    from deepinfer.workers.assembly import open_device
    from deepinfer.workers.core.config import WorkerConfig
    from deepinfer.workers.gpu.settings import GpuSettings
    from deepinfer.workers.model.decoder import kv_layout
    from deepinfer.workers.model.load import load_model

    layout = kv_layout(
        load_model(machine.model).config,
        resolve_kv_dtype(machine.kv_cache_dtype),
        machine.block_size,
    )
    config = WorkerConfig(
        blocks_total=sequences * layout.blocks_for(tokens),
        block_size=machine.block_size,
        block_bytes=layout.block_bytes,
        prefix_cache=False,
    )
    gpu = GpuSettings(fill_card=False, probe=False, deterministic=machine.deterministic)
    settings = WorkerSettings(
        worker="alone",
        node="local",
        model_path=str(machine.model),
        kv_cache_dtype=machine.kv_cache_dtype,
        gpu=gpu if machine.device == "cuda" else None,
        deterministic=machine.deterministic,
        token="of nobody",
        config=config,
    )
    return open_device(settings, Failpoints()), config


def _answer(machine: Machine, asked: Sequence[Asked]) -> list[Answered]:
    from deepinfer.kvstore.core.requests import SamplingParams
    from deepinfer.workers.local import LocalEngine

    opened, config = _open(machine, max(each.tokens for each in asked), 1)
    found = []
    for each in asked:
        engine = LocalEngine(opened.engine, config)
        [done] = engine.generate([each.prompt_ids], SamplingParams(**each.sampling), seed=each.seed)
        numbers: list[float] = []
        for token in done.tokens:
            if token.logprob is not None:
                numbers += (token.logprob, *(logprob for _, logprob in token.top))
        found.append(Answered(tuple(done.token_ids), as_sent(numbers)))
    return found


def as_sent(numbers: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities as messages carry them."""
    return tuple(np.asarray(numbers, dtype=np.float32).tolist())


def _speeds(machines: Sequence[Machine], rounds: int) -> list[dict[str, float]]:
    from deepinfer.kvstore.core.requests import SamplingParams
    from deepinfer.workers.local import LocalEngine

    opened = [_open(machine, PROMPT_TOKENS + SPEED_TOKENS, max(BATCHES)) for machine in machines]
    greedy = SamplingParams(max_tokens=SPEED_TOKENS, temperature=0.0, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    seconds: list[dict[str, list[float]]] = [{} for _ in machines]
    tokens = {"prompts": 4 * PROMPT_TOKENS}
    tokens |= {f"decode_{batch}": batch * (SPEED_TOKENS - 1) for batch in BATCHES}
    for turn in range(rounds + 1):  # the first warms up
        for place, (device, config) in enumerate(opened):
            jobs = [("prompts", 4, PROMPT_TOKENS, one)]
            jobs += [(f"decode_{batch}", batch, 8, greedy) for batch in BATCHES]
            for name, count, length, sampling in jobs:
                prompts = [[(7 * i + at) % 200 for at in range(length)] for i in range(count)]
                engine = LocalEngine(device.engine, config)
                took = _time(engine, prompts, sampling)
                if turn:
                    seconds[place].setdefault(name, []).append(took)
    return [
        {name: round(tokens[name] / median(each[name]), 2) for name in tokens} for each in seconds
    ]


def _time(engine: Any, prompts: list[list[int]], sampling: Any) -> float:
    """Seconds to compute the prompts, if one token is asked for, or from then on."""
    done = [each for prompt in prompts for each in engine.add(prompt, sampling)]
    for each in done:
        engine.admit(each)
    began = time.perf_counter()
    while not all(each.tokens for each in done):
        engine.advance()
    if sampling.max_tokens > 1:
        began = time.perf_counter()
    while any(each.finish is None for each in done):
        engine.advance()
    took = time.perf_counter() - began
    engine.drain()
    return took
