"""A checkpoint's weights nested, as ``nested`` reads them back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.nested import W_MAX, NestedWeight, NestError, encode
from deepinfer.workers.model.convert import kept
from deepinfer.workers.model.finite import in_half, naming
from deepinfer.workers.model.heap import trim_heap
from deepinfer.workers.model.nested import PARTS, nestable_names
from deepinfer.workers.model.safetensors_writer import SafetensorsWriter
from deepinfer.workers.model.weights import LoadedModel, expected_shapes

_ELEMENTS_AT_ONCE: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class NestReport:
    """What became of one weight.

    ``rounded`` of its values are no halves and were rounded to the nearest. ``nested`` is False
    where it stayed as it was, by the published rule.
    """

    name: str
    rows: int
    weights: int
    nested: bool
    rows_shifted: int
    outliers: int
    w_max: float
    rounded: int
    nbytes: int

    @property
    def published(self) -> bool:
        """Whether the published rule nests it: the whole of it or nothing, without shifts."""
        return self.w_max <= W_MAX


def write_nested(model: LoadedModel, path: Path, *, row_scaling: bool) -> list[NestReport]:
    """Nest ``model`` into the safetensors file ``path``, which must not exist.

    ``row_scaling`` False: weights with a value above 1.75 stay as they are.

    Raises CheckpointError naming a tensor with NaN, infinities or, if it nests, values that float16
    cannot hold; OSError.
    """
    names = expected_shapes(model.config)
    nestable = frozenset(nestable_names(model.config))
    others = [name for name in names if name not in nestable]
    maybe = [n for name in nestable for n in (name, *(f"{name}.{part}" for part in PARTS))]
    reports: list[NestReport] = []
    with SafetensorsWriter(path, others, maybe) as writer:
        for name in names:
            tensor = model.weights.read(name)
            if name not in nestable:
                writer.write(name, kept(name, tensor))
            else:
                with naming(name):
                    reports.append(_write(writer, name, tensor, row_scaling))
            del tensor
            model.weights.release()
            if name.endswith("down_proj.weight"):
                trim_heap()
    return reports


def _write(writer: SafetensorsWriter, name: str, tensor: Tensor, row_scaling: bool) -> NestReport:
    halves = in_half(tensor)
    try:
        weight: NestedWeight | None = encode(halves, row_scaling)
    except NestError:
        weight = None
    if weight is None:
        parts = {name: kept(name, tensor)}
    else:
        parts = {f"{name}.{part}": stored for part, stored in weight.tensors().items()}
    # The widest elements first: each tensor then begins where its dtype may.
    for part, stored in sorted(parts.items(), key=lambda part: -part[1].element_size()):
        writer.write(part, stored)
    return NestReport(
        name=name,
        rows=tensor.shape[0],
        weights=tensor.numel(),
        nested=weight is not None,
        rows_shifted=0 if weight is None else _shifted(weight),
        outliers=0 if weight is None else weight.outliers,
        w_max=max(float(part.abs().amax()) for part, _ in _parts(halves, halves)),
        rounded=sum(int((a.float() != b.float()).sum()) for a, b in _parts(tensor, halves)),
        nbytes=sum(stored.nbytes for stored in parts.values()),
    )


def _shifted(weight: NestedWeight) -> int:
    return 0 if weight.row_shift is None else int(torch.count_nonzero(weight.row_shift))


def _parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of both at a time."""
    at_once = max(1, _ELEMENTS_AT_ONCE // a.shape[1])
    return zip(torch.split(a, at_once), torch.split(b, at_once), strict=True)
