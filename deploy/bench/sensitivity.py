"""How much each decoder layer of a nested model suffers from FP8, and the order that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from deepinfer.workers.backends.base import Backend
    from deepinfer.workers.model.decoder import Decoder
    from deepinfer.workers.model.runner import Levels

TOKENS: Final = 256
"""Of the built-in text: as much as the start measures KV dtypes on."""


@dataclass(frozen=True, slots=True)
class FixedLevel:
    """``Levels`` of one level, at which the layers ``fp8`` are in FP8."""

    layers: int
    fp8: frozenset[int]
    head: bool = False
    activations: bool = False
    count: int = 1

    def fp8_layers(self, level: int) -> tuple[bool, ...]:
        """The same at every level."""
        return tuple(layer in self.fp8 for layer in range(self.layers))

    def fp8_head(self, level: int) -> bool:
        """Whether the head is in FP8 too."""
        return self.head

    def w8a8(self, level: int) -> bool:
        """Whether activations are in FP8 too."""
        return self.activations


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """``kl_nats[i]``: mean KL(FP16 || layer i alone in FP8) over ``positions``.

    ``order`` names the layers, the one with the least first.
    """

    kl_nats: tuple[float, ...]
    positions: int

    @property
    def order(self) -> tuple[int, ...]:
        """Ties go to the lower number."""
        return tuple(sorted(range(len(self.kl_nats)), key=lambda i: (self.kl_nats[i], i)))


def measured_order(folder: Path, *, threads: int, advance: Callable[[], None]) -> Sensitivity:
    """Measure a nested model on the built-in text; ``advance`` after each layer."""
    from deepinfer.text.load import load_tokenizer
    from deepinfer.text.probe_text import PROBE_TEXT
    from deepinfer.workers.backends.cpu import CpuBackend
    from deepinfer.workers.model.decoder import Decoder
    from deepinfer.workers.model.load import load_model

    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(PROBE_TEXT, add_special_tokens=False)]
    backend = CpuBackend(threads=threads)
    window = ids[: min(TOKENS, model.config.max_positions)]
    return measure_sensitivity(Decoder(model, backend), backend, [window], advance)


def measure_sensitivity(
    decoder: Decoder,
    backend: Backend,
    windows: Sequence[Sequence[int]],
    advance: Callable[[], None],
) -> Sensitivity:
    """Try each layer of a nested model alone; ``advance`` after each layer of each window."""
    layers = decoder.config.layers
    fixed = [FixedLevel(layers, frozenset({layer})) for layer in range(layers)]
    found = divergences(decoder, backend, windows, fixed, advance)
    return Sensitivity(tuple(found), sum(len(window) - 1 for window in windows))


def divergences(
    decoder: Decoder,
    backend: Backend,
    windows: Sequence[Sequence[int]],
    levels: Sequence[Levels],
    advance: Callable[[], None],
) -> list[float]:
    """Mean KL from FP16 of each of ``levels``, with FP16 KV, over the positions of all windows.

    ``advance`` is called after each of ``levels`` in each window.
    """
    import torch

    from deepinfer.deploy.bench.quality import BLOCK_SIZE, compare, served_logits
    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.workers.model.runner import ModelRunner
    from deepinfer.workers.pool import PagedPool

    layout = decoder.kv_layout(resolve_kv_dtype("fp16"), BLOCK_SIZE)
    pool = PagedPool(layout, layout.blocks_for(max(map(len, windows))))
    right = ModelRunner(decoder, pool, backend)
    runners = [ModelRunner(decoder, pool, backend, one) for one in levels]
    sums = [0.0] * len(levels)
    for window in windows:
        targets = torch.tensor(window[1:])
        expected = torch.log_softmax(served_logits(right, window)[:-1].double(), dim=-1)
        for index, runner in enumerate(runners):
            sums[index] += sum(compare(served_logits(runner, window)[:-1], targets, expected).kl)
            advance()
    return [total / sum(len(window) - 1 for window in windows) for total in sums]
