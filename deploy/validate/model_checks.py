"""Checks of whole models: every kind of step, beside torch's own operators in float32 and FP16."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from deepinfer.deploy.bench.sdpa_model import SdpaModel
from deepinfer.deploy.validate.accuracy import (
    MODEL_RATIO_MAX,
    MODEL_RATIO_MAX_QUANTISED,
    Accuracy,
    Miss,
)
from deepinfer.deploy.validate.checks import Check
from deepinfer.kvstore.core.layout import KvDtype, KvLayout, resolve_kv_dtype
from deepinfer.workers.backends.cpu import quantise_int8
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.rounding import round_rows_to_e4m3
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.model.weights import LoadedModel

BLOCK_SIZE: Final = 16

Opener: TypeAlias = Callable[[LoadedModel, KvLayout], GpuRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model and the token ids that it is given.

    The first ``prompt`` of them are computed in chunks of ``chunk``, the others one a step; the
    last ``wide`` ones once more in one step, and ``mixed`` of those beside a prompt. All steps are
    at ``level`` of precision, whose values ``load_values`` gives (None: ``load``).
    """

    name: str
    load: Callable[[], LoadedModel]
    ids: tuple[int, ...]
    prompt: int
    chunk: int
    wide: int
    mixed: int
    level: int = 0
    load_values: Callable[[], LoadedModel] | None = None
    w8a8: bool = False
    """``level`` is W8A8: only steps with prompts are looked at, and ``chunk`` tokens must do."""

    @property
    def blocks(self) -> int:
        """What a pool needs: the ids once, and the mixed step's prompt."""
        return len(self.table) + len(self.other)

    @property
    def table(self) -> tuple[int, ...]:
        """The sequence's blocks, in no order."""
        count = -(-len(self.ids) // BLOCK_SIZE)
        random = torch.Generator().manual_seed(1)
        return tuple(torch.randperm(count, generator=random).tolist())

    @property
    def other(self) -> tuple[int, ...]:
        """Blocks of the prompt of the mixed step."""
        first = -(-len(self.ids) // BLOCK_SIZE)
        return tuple(range(first, first - (-self.chunk // BLOCK_SIZE)))


def model_checks(
    trial: Trial, kv_dtypes: Sequence[str], open_runner: Opener, device: torch.device
) -> Iterator[Check]:
    """One check for each KV dtype: logits of all steps, by the rule for whole models.

    The models beside it keep K and V in the same dtype, so that only arithmetic differs.
    """
    for dtype in kv_dtypes:

        def run(dtype: str = dtype) -> Iterator[Accuracy]:
            kv = resolve_kv_dtype(dtype)
            model = trial.load()
            runner = open_runner(model, kv_layout(model.config, kv, BLOCK_SIZE))
            try:
                native = _steps(runner, trial)
            finally:
                del runner
                _free()
            kept = None if dtype == "fp16" else _cache(kv)
            exact = _logits(trial, torch.float32, device, kept)
            own = _logits(trial, torch.float16, device, kept)
            for name, (rows, found) in native.items():
                what = f"{trial.name} {dtype} {name}"
                exactly = kept is None and not trial.w8a8
                yield beside(what, found, exact[rows], own[rows], exactly=exactly)

        yield Check("model", dtype, trial.name, run)


def beside(what: str, found: Tensor, exact: Tensor, own: Tensor, *, exactly: bool) -> Accuracy:
    """Root mean squares of the errors of ``found`` and ``own``, logits of the same rows.

    ``exactly``: K, V and activations are kept as they are.
    """
    if not bool(torch.isfinite(found).all()):
        raise Miss(f"{what}: logits are not finite")
    error, allowed = ((each - exact).double().square().mean().sqrt() for each in (found, own))
    ratio = MODEL_RATIO_MAX if exactly else MODEL_RATIO_MAX_QUANTISED
    return Accuracy(what, float(error), ratio * float(allowed))


def _steps(runner: GpuRunner, trial: Trial) -> dict[str, tuple[list[int], Tensor]]:
    """Logits by the kind of step that made them, and which rows they are of."""
    ids, table, last = trial.ids, trial.table, len(trial.ids)
    chunks: list[Tensor] = []
    for begin in range(0, trial.prompt, trial.chunk):
        end = min(begin + trial.chunk, trial.prompt)
        runner.forward_and_score(
            [SequenceSlice(ids[begin:end], begin, table, False)],
            [range(end - begin)],
            lambda _index, _first, logits: chunks.append(logits.clone()),
            trial.level,
        )

    def at(position: int) -> SequenceSlice:
        return SequenceSlice(ids[position : position + 1], position, table, True)

    def logits(slices: list[SequenceSlice]) -> Tensor:
        return runner.forward(slices, trial.level).clone()

    if trial.w8a8:
        return {"prompt in chunks": (list(range(trial.prompt)), torch.cat(chunks))}
    singles = [logits([at(place)]) for place in range(trial.prompt, last)]
    wide = logits([at(place) for place in range(last - trial.wide, last)])
    beside_prompt = [at(place) for place in range(last - trial.mixed, last)]
    prompt = SequenceSlice(ids[: trial.chunk], 0, trial.other, True)
    mixed = logits([*beside_prompt, prompt])
    return {
        "prompt in chunks": (list(range(trial.prompt)), torch.cat(chunks)),
        "one row a step": (list(range(trial.prompt, last)), torch.cat(singles)),
        f"{trial.wide} rows a step": (list(range(last - trial.wide, last)), wide),
        "rows beside a prompt": ([*range(last - trial.mixed, last), trial.chunk - 1], mixed),
    }


def _logits(
    trial: Trial,
    dtype: torch.dtype,
    device: torch.device,
    kept: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
) -> Tensor:
    rounded = round_rows_to_e4m3 if trial.w8a8 else None
    model = SdpaModel((trial.load_values or trial.load)(), dtype, device, kept, rounded)
    try:
        return model.logits(list(trial.ids))
    finally:
        del model
        _free()


def _cache(kv: KvDtype) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What a pool of this dtype makes of K and V."""

    def stored(values: Tensor, storage: str) -> Tensor:
        halves = values.half().float()
        if storage == "int8":
            codes, scales = quantise_int8(halves)
            return (codes.float() * scales.float()[..., None]).to(values.dtype)
        dtype: torch.dtype = getattr(torch, storage)
        limit = torch.finfo(dtype).max
        return halves.clamp(-limit, limit).to(dtype).to(values.dtype)

    return lambda k, v: (stored(k, kv.k_storage), stored(v, kv.v_storage))


def _free() -> None:
    gc.unfreeze()  # a runner keeps what it made at its start from the collector
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
