"""``deepinfer bench kernels``: the card's kernels and steps at a model's shape, beside others'.

Each part is measured by itself and writes ``kernels_<part>.json``, so that parts may be measured
at different times; each file says on what, with what and when.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from deepinfer.deploy.bench import kernel_plots
from deepinfer.deploy.bench.card_facts import card_facts
from deepinfer.deploy.bench.kernel_attention import (
    PREFILLS,
    AttentionShape,
    matrix_rate,
    time_decode,
    time_prefill,
)
from deepinfer.deploy.bench.kernel_attention_peers import (
    DECODE_MODES,
    PREFILL_MODES,
    Builds,
    flashinfer_version,
    time_flashinfer_decode,
    time_flashinfer_prefill,
    time_sdpa,
)
from deepinfer.deploy.bench.kernel_linears import time_linears
from deepinfer.deploy.bench.kernel_nested import time_nested
from deepinfer.deploy.bench.kernel_nested_model import time_nested_model
from deepinfer.deploy.bench.kernel_pointwise import time_pointwise
from deepinfer.deploy.bench.kernel_projection import projection
from deepinfer.deploy.bench.kernel_projection import table as projection_table
from deepinfer.deploy.bench.kernel_report import tables
from deepinfer.deploy.bench.kernel_steps import CHUNKS, MODELS, time_model
from deepinfer.deploy.bench.kernel_swap import time_swaps
from deepinfer.deploy.bench.kernel_timing import copy_rates
from deepinfer.deploy.bench.kernel_transformers import time_transformers
from deepinfer.deploy.bench.random_weights import SHAPES
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import Steps, counted
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.validate.run import usable_card
from deepinfer.deploy.validate.scope import KV_DTYPES

PARTS: Final = (
    "decode",
    "prefill",
    "linear",
    "nested",
    "pointwise",
    "model",
    "nested-model",
    "swap",
    "transformers",
    "projection",
)
CONTEXTS: Final = (512, 2048, 8192)
MODEL_CONTEXTS: Final = (512, 1024, 2048, 8192)
BATCHES: Final = (1, 4, 16, 64)

_PEER_CONTEXT: Final = 1024
_COMPILED_PARTS: Final = ("decode", "prefill")
"""Those with a peer that compiles first."""

Say = Callable[[str], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """

    shape: str
    parts: tuple[str, ...] = PARTS
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    weights: tuple[str, ...] = tuple(MODELS)
    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    model_contexts: tuple[int, ...] = MODEL_CONTEXTS
    peers: bool = True
    peer_seconds: float = 120.0
    """How long compilations of FlashInfer, and all of transformers, may take."""
    switches: int = 10_000
    """Of a nested model's level of precision."""

    def __post_init__(self) -> None:
        for name, values, known in (
            ("shape", (self.shape,), tuple(SHAPES)),
            ("part", self.parts, PARTS),
            ("kv-cache-dtype", self.kv_dtypes, KV_DTYPES),
            ("weights", self.weights, tuple(MODELS)),
        ):
            for value in values:
                if value not in known:
                    raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(known)}")
        for name, numbers, multiple in (
            ("batches", self.batches, 1),
            ("contexts", (*self.contexts, *self.model_contexts), 512),
        ):
            for number in numbers:
                if number < 1 or number % multiple:
                    raise ConfigError(f"{name}: {number} must be a positive multiple of {multiple}")

    @property
    def command(self) -> str:
        """What measures the same again, one part."""
        return f"deepinfer bench kernels --shape {self.shape}"


def run_kernels(plan: Plan, *, output: Path, console: Console) -> bool:
    """Measure the parts one after another; each file is written as soon as its part is done.

    A part that fails says so and does not keep the others from being measured; False then.

    Raises ConfigError where kernels cannot run.
    """
    on_card = [part for part in plan.parts if part != "projection"]
    failures = _measure(plan, on_card, output, console) if on_card else {}
    if "projection" in plan.parts:
        path = output / "kernels_model.json"
        measured = json.loads(path.read_text("utf-8"))["models"] if path.is_file() else ()
        found = projection(SHAPES[plan.shape], measured) | {"shape": plan.shape}
        write_result(output / "kernels_projection.json", f"{plan.command} --part projection", found)
        console.print(projection_table(found))
    for part in on_card:
        if part not in failures:
            path = _path(output, part)
            for shown in tables(part, json.loads(path.read_text("utf-8"))):
                console.print(shown)
    draw(output, console)
    for part, error in failures.items():
        text = f"{part} could not be measured: {type(error).__name__}: {error}"
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return not failures


def _measure(
    plan: Plan, parts: Sequence[str], output: Path, console: Console
) -> dict[str, Exception]:
    """Measure and write each part; what went wrong with which."""
    card, _ = usable_card()
    bench = _Bench(plan, AttentionShape(config=SHAPES[plan.shape], card=card))
    failures: dict[str, Exception] = {}
    with counted(console, len(parts)) as steps:
        steps.tell("copies within the card")
        rates = copy_rates()
        # Nothing is timed while FlashInfer compiles: that takes the host and the card.
        for part in sorted(parts, key=lambda part: part in _COMPILED_PARTS):
            if part in _COMPILED_PARTS:
                steps.tell("FlashInfer compiles")
                bench.build()
            try:
                found = bench.measure(part, steps) | {
                    "shape": plan.shape,
                    "gpu": card_facts(card),
                    "copy_bytes_per_s": rates,
                }
            except (RuntimeError, ValueError) as error:  # of the driver, torch or a kernel
                _log.exception("%s could not be measured", part)
                failures[part] = error
                continue
            if part == "model":
                _add_roofline(found["models"], max(rates.values()))
            write_result(_path(output, part), f"{plan.command} --part {part}", found)
            steps.advance()
    return failures


def _path(folder: Path, part: str) -> Path:
    return folder / f"kernels_{part.replace('-', '_')}.json"


def draw(folder: Path, console: Console) -> None:
    """Draw every part's picture from the JSON that is in ``folder``, where matplotlib is there."""
    if not kernel_plots.can_draw():
        console.print("matplotlib is not installed: draw later with bench kernels --redraw")
        return
    for part, plot in kernel_plots.PLOTS.items():
        path = folder / f"kernels_{part}.json"
        if path.is_file():
            plot(json.loads(path.read_text("utf-8")), path.with_suffix(".png"))


class _Bench:
    """Measures parts."""

    def __init__(self, plan: Plan, shape: AttentionShape) -> None:
        self._plan = plan
        self._shape = shape
        self._config = shape.config
        self._flashinfer = flashinfer_version() if plan.peers else None
        self._problems: dict[str, str | None] = {}

    @property
    def _cells(self) -> list[tuple[int, int]]:
        return [(b, c) for c in self._plan.contexts for b in self._plan.batches]

    def build(self) -> None:
        """Wait for FlashInfer's compilations that the parts need, if it is here; once."""
        if self._flashinfer is None or self._problems:
            return
        modes = [*DECODE_MODES] if "decode" in self._plan.parts else []
        modes += PREFILL_MODES if "prefill" in self._plan.parts else []
        builds = Builds(modes, self._plan.shape)
        try:
            until = time.monotonic() + self._plan.peer_seconds
            self._problems = {mode: builds.ready(mode, until) for mode in modes}
        finally:
            builds.close()

    def measure(self, part: str, steps: Steps) -> dict[str, Any]:
        """The figures of one part."""
        torch.cuda.empty_cache()

        def say(what: str) -> None:
            steps.tell(f"{part}: {what}")

        # transformers chooses by itself: its continuous batching changes tensors in place that
        # must not be inference tensors.
        with torch.inference_mode(part != "transformers"):
            return self._measure(part, say)

    def _measure(self, part: str, say: Say) -> dict[str, Any]:
        if part == "decode":
            return self._decode(say)
        if part == "prefill":
            return self._prefill(say)
        if part == "linear":
            say("qkv, o, gate_up, down and head")
            return {
                "linears": list(
                    time_linears(self._config, self._shape.card.device, peers=self._plan.peers)
                )
            }
        if part == "nested":
            say("both modes, plain FP16, cuBLAS")
            device = self._shape.card.device
            return {"nested": list(time_nested(self._config, device, peers=self._plan.peers))}
        if part == "pointwise":
            say("norms, swiglu, rope and copies")
            return {"kernels": list(time_pointwise(self._shape, peers=self._plan.peers))}
        if part == "model":
            return {"models": list(self._models(say))}
        if part == "nested-model":
            return time_nested_model(
                self._config,
                self._shape.card,
                say,
                batches=self._plan.batches,
                context=_PEER_CONTEXT,
                switches=self._plan.switches,
            )
        if part == "swap":
            say("1 GiB out and in, beside steps")
            return time_swaps(self._config, self._shape.card)
        say("padded batch, static and compiled, continuous")
        until = time.monotonic() + self._plan.peer_seconds
        ways = time_transformers(
            self._config, batches=self._plan.batches, context=_PEER_CONTEXT, until=until
        )
        return {"ways": list(ways)}

    def _decode(self, say: Say) -> dict[str, Any]:
        own = []
        for dtype in self._plan.kv_dtypes:
            say(dtype)
            own += list(time_decode(self._shape, dtype, self._cells))
            torch.cuda.empty_cache()
        peers: list[dict[str, Any]] = []
        for mode in DECODE_MODES if self._problems else ():
            say(f"FlashInfer, {mode}")
            times = time_flashinfer_decode(self._shape, mode, self._cells)
            peers += self._of_flashinfer(mode, times)
        return {"own": own, "flashinfer": self._flashinfer, "peers": peers}

    def _prefill(self, say: Say) -> dict[str, Any]:
        say("a large product of cuBLAS")
        rate = matrix_rate()
        own, peers = [], []
        for name in PREFILLS:
            for dtype in self._plan.kv_dtypes:
                say(f"{name}, {dtype}")
                own.append(time_prefill(self._shape, dtype, name))
                torch.cuda.empty_cache()
            if self._plan.peers:
                say(f"{name}, SDPA")
                peers += list(time_sdpa(self._shape, name))
        for mode in PREFILL_MODES if self._problems else ():
            say(f"FlashInfer, {mode}")
            times = (time_flashinfer_prefill(self._shape, mode, name) for name in PREFILLS)
            peers += self._of_flashinfer(mode, times)
        return {"flop_per_s": rate, "own": own, "flashinfer": self._flashinfer, "peers": peers}

    def _of_flashinfer(self, mode: str, times: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``times`` yields, which begins only when its mode is compiled."""
        problem = self._problems[mode]
        if problem is not None:
            return [{"mode": mode, "us": None, "error": problem}]
        found = list(times)
        torch.cuda.empty_cache()
        return found

    def _models(self, say: Say) -> Iterator[dict[str, Any]]:
        plan = self._plan
        for weights in plan.weights:
            for dtype in plan.kv_dtypes:
                say(f"{weights} weights, {dtype} KV")
                yield time_model(
                    self._config,
                    self._shape.card,
                    weights,
                    dtype,
                    batches=plan.batches,
                    contexts=plan.model_contexts,
                    chunks=CHUNKS if dtype == plan.kv_dtypes[0] else (),
                )


def _add_roofline(models: list[dict[str, Any]], rate: float) -> None:
    """To each cell: the time its bytes take at the card's copy rate, as a share of the step."""
    for model in models:
        for cell in model["decode"]:
            cached = cell["batch"] * cell["context"] * model["kv_bytes_a_token"]
            ideal = (model["weight_bytes"] + cached) / rate
            cell["roofline_share"] = ideal / (cell["step_ms"] / 1e3)
