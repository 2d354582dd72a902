"""`deepinfer bench precision`: what formats of weights and of KV change in what a model says.

The reference is the model with its FP16 weights and FP16 KV. Beside it, with every KV dtype:

* ``nested fp8``: the upper planes of all layers and of the head;
* ``nested mixed``: each step at a level drawn anew, as a server under changing load mixes them (KV
  that FP8 steps wrote is read by FP16 steps, and the other way round);
* ``w4a16``: 4 bits as `deepinfer convert` makes them, the head in 16;
* ``channel fp8``: E4M3 with a scale for each output row, of the layers and the head.

Two things are compared, as in `bench quality`: the same text (perplexity, KL divergence, the top
token at each position) and the model's own greedy answers through the worker's engine. Then each
layer of the nested model is tried in FP8 alone, and prefixes of the order that follows beside
prefixes of others.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.precision_report import plot, table
from deepinfer.deploy.bench.prompts import read_text
from deepinfer.deploy.bench.quality import (
    BLOCK_SIZE,
    SONNETS,
    Plan,
    common,
    compare,
    cut_windows,
    served_logits,
)
from deepinfer.deploy.bench.quality_report import Window, figures_of, spread
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.sensitivity import FixedLevel, divergences, measure_sensitivity
from deepinfer.deploy.bench.steps import Steps, counted
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.workers.model.levels import PrecisionLevels

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.workers.backends.cpu import CpuBackend
    from deepinfer.workers.model.decoder import Decoder
    from deepinfer.workers.model.runner import Levels
    from deepinfer.workers.model.weights import LoadedModel

WEIGHTS: Final = ("fp16", "nested fp8", "nested w8a8", "nested mixed", "w4a16", "channel fp8")
REFERENCE: Final = ("fp16", "fp16")
STEP_TOKENS: Final = 32
"""Tokens of the text that a step computes: short, so that mixed mode mixes within a window."""
PREFIXES: Final = 5
"""Parts into which the order of layers is cut to compare orders."""
ORDER_WINDOWS: Final = 2
ORDER_TOKENS: Final = 256
"""Of the text, windows and the tokens of each that layers are tried on."""


class MixedLevels:
    """``Levels`` of one level: each step is at one of the ``levels`` of a decoder, drawn anew."""

    count = 1

    def __init__(self, levels: Levels, seed: int) -> None:
        self._levels = levels
        self._random = random.Random(seed)
        self._drawn = 0

    def fp8_layers(self, level: int) -> tuple[bool, ...]:
        """Draw the next step's level: a runner asks this first, once a step."""
        self._drawn = self._random.randrange(self._levels.count)
        return self._levels.fp8_layers(self._drawn)

    def fp8_head(self, level: int) -> bool:
        """Whether the head of the step that was drawn last is in FP8."""
        return self._levels.fp8_head(self._drawn)

    def w8a8(self, level: int) -> bool:
        """No step's activations are in FP8."""
        return False


def run_precision(
    *, model: str, plan: Plan, seed: int, text: Path | None, output: Path, console: Console
) -> dict[str, Any]:
    """Measure all pairs; write ``precision.json`` and ``precision.png``; return the figures.

    Raises:
        ConfigError: the text is too short or not UTF-8, the windows are longer than the model's
            context, or what draws plots is not installed.
        ModelUnavailableError: no such model, one whose weights are in 4 bits already, or hold
            NaN or infinities.
    """
    from deepinfer.workers.model.weights import CheckpointError

    check_plots()
    words = read_text(text or SONNETS)
    path = get_model(model, console=console)
    with counted(console, 1, "loading") as steps:
        try:
            figures = _measure(path, plan, seed, words, steps)
        except CheckpointError as error:
            raise ModelUnavailableError(f"{path}: {error}") from error
    named = "" if text is None else f" --text {text}"
    dtypes = "".join(f" --kv-cache-dtype {dtype}" for dtype in plan.dtypes)
    command = (
        f"deepinfer bench precision --model {model}{dtypes} --windows {plan.windows} "
        f"--window-tokens {plan.window_tokens} --answers {plan.answers} --prompt-tokens "
        f"{plan.prompt_tokens} --answer-tokens {plan.answer_tokens} --threads {plan.threads} "
        f"--seed {seed}{named}"
    )
    source = {"name": (text or SONNETS).name, "sha256": hashlib.sha256(words.encode()).hexdigest()}
    figures = {"model": path.name, "text": source | figures.pop("text")} | figures
    write_result(output / "precision.json", command, figures)
    plot(figures, output / "precision.png")
    console.print(table(figures))
    return figures


@dataclass(slots=True)
class _Bench:
    """What all measurements share. ``expected``: the reference's logits of each window."""

    plan: Plan
    backend: CpuBackend
    windows: list[list[int]]
    steps: Steps
    expected: list[Tensor] = field(default_factory=list)
    right: list[Window] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def refer_to(self, decoder: Decoder, levels: Levels) -> None:
        """Compute what everything is compared with."""
        import torch

        kv_cache_dtype = REFERENCE[1]
        self.steps.tell("reference")
        for window in self.windows:
            logits = self._logits(decoder, levels, kv_cache_dtype, window)
            self.expected.append(logits)
            log_p = torch.log_softmax(logits.double(), dim=-1)
            self.right.append(compare(logits, torch.tensor(window[1:]), log_p))
        self.answers = self._answers(decoder, levels, kv_cache_dtype)
        self.steps.advance()

    def beside(
        self, name: str, decoder: Decoder, levels: Callable[[], Levels | None]
    ) -> dict[str, dict[str, Any]]:
        """Figures of one form of the weights with each KV dtype."""
        import torch

        found: dict[str, dict[str, Any]] = {}
        for dtype in self.plan.dtypes:
            self.steps.tell(f"{name}, {dtype} KV")
            drawn = levels()
            scored = []
            for window, right in zip(self.windows, self.expected, strict=True):
                logits = self._logits(decoder, drawn, dtype, window)
                log_p = torch.log_softmax(right.double(), dim=-1)
                scored.append(compare(logits, torch.tensor(window[1:]), log_p))
                self.steps.advance()
            answers = self._answers(decoder, drawn, dtype)
            alike = [common(a, b) for a, b in zip(answers, self.answers, strict=True)]
            self.steps.advance()
            found[dtype] = figures_of(scored, self.right, "reference") | {
                "greedy_tokens_alike": spread(alike).figures(),
                "greedy_answers_alike": sum(n == self.plan.answer_tokens for n in alike),
            }
        return found

    def _logits(
        self, decoder: Decoder, levels: Levels | None, kv_cache_dtype: str, window: list[int]
    ) -> Tensor:
        """Of every position that a token of the window follows."""
        from deepinfer.kvstore.core.layout import resolve_kv_dtype
        from deepinfer.workers.model.runner import ModelRunner
        from deepinfer.workers.pool import PagedPool

        layout = decoder.kv_layout(resolve_kv_dtype(kv_cache_dtype), BLOCK_SIZE)
        pool = PagedPool(layout, layout.blocks_for(len(window)))
        runner = ModelRunner(decoder, pool, self.backend, levels)
        return served_logits(runner, window, STEP_TOKENS)[:-1]

    def _answers(
        self, decoder: Decoder, levels: Levels | None, kv_cache_dtype: str
    ) -> list[list[int]]:
        from deepinfer.deploy.bench.peers import EnginePeer
        from deepinfer.kvstore.core.layout import resolve_kv_dtype

        plan = self.plan
        layout = decoder.kv_layout(resolve_kv_dtype(kv_cache_dtype), BLOCK_SIZE)
        prompts = [
            self.windows[index * plan.windows // plan.answers][: plan.prompt_tokens]
            for index in range(plan.answers)
        ]
        peer = EnginePeer(
            decoder,
            kv_cache_dtype=kv_cache_dtype,
            blocks=plan.answers * layout.blocks_for(plan.prompt_tokens + plan.answer_tokens),
            block_size=BLOCK_SIZE,
            prefill_chunk_tokens=STEP_TOKENS,
            levels=levels,
        )
        return [list(ids) for ids in peer.together(prompts, plan.answer_tokens).token_ids]


def _measure(path: Path, plan: Plan, seed: int, text: str, steps: Steps) -> dict[str, Any]:
    from deepinfer.deploy.bench.rounded_weights import channel_fp8, four_bits, rounded_model
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.backends.cpu import CpuBackend
    from deepinfer.workers.model.convert import linear_names
    from deepinfer.workers.model.decoder import Decoder
    from deepinfer.workers.model.heap import trim_heap
    from deepinfer.workers.model.nested import nestable_names

    model = _nested(path)
    longest = max(plan.window_tokens, plan.prompt_tokens + plan.answer_tokens)
    if longest > model.config.max_positions:
        raise ConfigError(
            f"window_tokens, prompt_tokens + answer_tokens: up to {longest}; the model has "
            f"{model.config.max_positions} positions"
        )
    windows, text_tokens = cut_windows(load_tokenizer(path), text, plan)
    short = [window[:ORDER_TOKENS] for window in windows[:ORDER_WINDOWS]]
    layers, group = model.config.layers, _group(model)
    forms = len(WEIGHTS) - (group is None)
    orders = (layers + 3 * PREFIXES + 1) * len(short)
    steps.expect(1 + forms * len(plan.dtypes) * (plan.windows + 1) + orders)
    bench = _Bench(plan, CpuBackend(threads=plan.threads), windows, steps)
    decoder = Decoder(model, bench.backend)
    levels = decoder.levels
    none = FixedLevel(layers, frozenset())
    whole = FixedLevel(layers, frozenset(range(layers)), head=True)
    w8a8 = replace(whole, activations=True)
    bench.refer_to(decoder, none)
    results = {
        "fp16": bench.beside("FP16", decoder, lambda: none),
        "nested fp8": bench.beside("nested FP8", decoder, lambda: whole),
        "nested w8a8": bench.beside("nested W8A8", decoder, lambda: w8a8),
        "nested mixed": bench.beside("nested mixed", decoder, lambda: MixedLevels(levels, seed)),
    }
    sensitivity = _sensitivity(decoder, bench, short)
    del decoder
    plain: dict[str, tuple[tuple[str, ...], Callable[[Tensor], Tensor]]] = {}
    if group is not None:
        plain["w4a16"] = (linear_names(model.config), four_bits(group))
    plain["channel fp8"] = (nestable_names(model.config), channel_fp8)
    for name, (names, rounded) in plain.items():
        trim_heap()
        steps.tell(f"loading {name}")
        rounded_decoder = Decoder(rounded_model(model, names, rounded), bench.backend)
        results[name] = bench.beside(name, rounded_decoder, lambda: None)
        del rounded_decoder
    return {
        "text": {"tokens": text_tokens},
        "reference": "FP16 weights and FP16 KV, computed in float32",
        "windows": plan.windows,
        "window_tokens": plan.window_tokens,
        "positions": sum(len(window) - 1 for window in windows),
        "step_tokens": STEP_TOKENS,
        "block_size": BLOCK_SIZE,
        "mixed_levels": levels.count,
        "seed": seed,
        "w4a16_group": group,
        "greedy": {
            "answers": plan.answers,
            "prompt_tokens": plan.prompt_tokens,
            "answer_tokens": plan.answer_tokens,
        },
        "results": results,
        "layers": sensitivity,
    }


def _nested(path: Path) -> LoadedModel:
    """The model, nested if it is not; refuses 4 bits."""
    from deepinfer.workers.model.config import UnsupportedModelError
    from deepinfer.workers.model.load import load_model

    try:
        return load_model(path, weights="nested")
    except UnsupportedModelError as error:
        raise ModelUnavailableError(str(error)) from error


def _group(model: LoadedModel) -> int | None:
    """Inputs a scale of the model in 4 bits; None: there could be no such model."""
    from deepinfer.workers.model.convert import GroupSizeError, group_size_for

    try:
        return group_size_for(model.config, None)
    except GroupSizeError:
        return None


def _sensitivity(decoder: Decoder, bench: _Bench, windows: list[list[int]]) -> dict[str, Any]:
    """Each layer alone in FP8, and the head; the first layers of three orders without the head."""
    layers = decoder.config.layers
    bench.steps.tell("each layer alone")
    found = measure_sensitivity(decoder, bench.backend, windows, bench.steps.advance)
    orders = {
        "measured": found.order,
        "middle outwards": PrecisionLevels(layers).order,
        "measured, worst first": found.order[::-1],
    }
    counts = [round(layers * part / PREFIXES) for part in range(1, PREFIXES + 1)]
    bench.steps.tell("prefixes of orders")
    fixed = [
        FixedLevel(layers, frozenset(order[:count]))
        for order in orders.values()
        for count in counts
    ]
    fixed.append(FixedLevel(layers, frozenset(), head=True))
    kl = divergences(decoder, bench.backend, windows, fixed, bench.steps.advance)
    return {
        "positions": found.positions,
        "kl_nats": [float(f"{value:.4g}") for value in found.kl_nats],
        "head_kl_nats": float(f"{kl[-1]:.4g}"),
        "order": list(found.order),
        "prefixes": {
            "layers": counts,
            "kl_nats": {
                name: [float(f"{kl[at * len(counts) + i]:.4g}") for i in range(len(counts))]
                for at, name in enumerate(orders)
            },
        },
    }
