"""Nested weights as a ``WeightSource``: read from a checkpoint that has them, or made on reading.

In the files, a weight called ``W`` is (N = out_features, K = in_features, n outliers):
    W.upper, W.lower     uint8 [N, K]
    W.row_shift          int8 [N]   not there: all 0
    W.outlier_starts     int32 [N + 1]
    W.outlier_columns    int32 [n]
    W.outlier_values     float16 [n]   these three not there: no outliers
``kernels.nested`` says what they mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.nested import NestedWeight, encode, take_rows
from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.finite import check_finite, in_half, naming
from deepinfer.workers.model.quantization import NestedFormat
from deepinfer.workers.model.safetensors_loader import SafetensorsWeights
from deepinfer.workers.model.weights import (
    CheckpointError,
    LoadedModel,
    RowLookup,
    WeightSource,
    expected_shapes,
)

PARTS: Final = tuple(part.name for part in fields(NestedWeight) if part.name != "bias")
"""Suffixes of the tensors of one weight."""

_DTYPES: Final = {
    "upper": torch.uint8,
    "lower": torch.uint8,
    "row_shift": torch.int8,
    "outlier_starts": torch.int32,
    "outlier_columns": torch.int32,
    "outlier_values": torch.float16,
}
_PLANES: Final = ("upper", "lower")
_OUTLIERS: Final = ("outlier_starts", "outlier_columns", "outlier_values")


def nestable_names(config: ModelConfig) -> tuple[str, ...]:
    """The weights that nest: all linear layers, and the head, which may be the embedding."""
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    names = expected_shapes(config)
    return tuple(name for name in names if name.endswith("_proj.weight") or name == head)


def nested_read(source: WeightSource, name: str) -> Tensor:
    """As ``source.read``, with the FP8 values of what is nested."""
    nested = source.read_nested(name)
    return source.read(name) if nested is None else nested.decode_fp8()


class NestedWeights:
    """``WeightSource`` over the files of a nested checkpoint.

    Raises CheckpointError, naming the tensor: parts that are missing or do not fit each other, a
    linear layer that is plain (or nested) and should not be by ``form``, integers elsewhere.
    """

    def __init__(self, source: SafetensorsWeights, config: ModelConfig, form: NestedFormat) -> None:
        self.format = form
        self._source = source
        stored = dict(source.shapes())
        self._parts: dict[str, tuple[str, ...]] = {}
        nestable = nestable_names(config)
        for name in nestable:
            if not any(f"{name}.{part}" in stored for part in PARTS):
                continue
            self._parts[name] = tuple(part for part in PARTS if f"{name}.{part}" in stored)
            shapes = {part: stored.pop(f"{name}.{part}") for part in self._parts[name]}
            _check_parts(source, name, shapes)
            if name in stored:
                raise CheckpointError(f"tensor {name} is there beside {name}.upper: which counts?")
            stored[name] = shapes["upper"]
        for name in nestable:
            listed = name.removesuffix(".weight") in form.plain
            if name in stored and listed == (name in self._parts):
                raise CheckpointError(
                    f"tensor {name} is {'nested' if listed else 'not nested'}, but "
                    f"{form.where}: modules_to_not_convert {'has' if listed else 'lacks'} it"
                )
        if form.layer_order and sorted(form.layer_order) != list(range(config.layers)):
            raise CheckpointError(
                f"{form.where}: layer_order must name each of 0..{config.layers - 1} once, got "
                f"{list(form.layer_order)}"
            )
        for name in stored:
            if name not in self._parts and not source.dtype(name).is_floating_point:
                raise CheckpointError(
                    f"tensor {name} is {source.dtype(name)}: what does not nest must be floats"
                )
        self._shapes: Mapping[str, tuple[int, ...]] = stored

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, nested ones as the weight that they are."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """One tensor: float16 if it is nested, else as stored.

        Raises CheckpointError for contents that no weight has, NaN and infinities.
        """
        nested = self.read_nested(name)
        if nested is not None:
            return nested.decode()
        tensor = self._source.read(name)
        with naming(name):
            check_finite(tensor)
        return tensor

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing has 4 bits."""

    def read_nested(self, name: str, device: torch.device | None = None) -> NestedWeight | None:
        """One nested weight; None if it is plain.

        Raises CheckpointError for contents that no weight has.
        """
        if name not in self._parts:
            return None
        weight = self._mapped(name)
        if device is not None:
            weight = weight.to(device)
        with naming(name):
            weight.check()
        return weight

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor; of a nested one also what they mean."""
        if name not in self._parts:
            return self._source.stored(name)
        meaning = f"nested {' '.join(self._parts[name])}".encode()
        parts = [self._source.stored(f"{name}.{part}")[0] for part in self._parts[name]]
        return memoryview(meaning), *parts

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32."""
        if name not in self._parts:
            return self._source.rows(name)
        weight = self._mapped(name)
        return lambda numbers: take_rows(weight, numbers).decode().float()

    def release(self) -> None:
        """Unload the pages that were read."""
        self._source.release()

    def _mapped(self, name: str) -> NestedWeight:
        """A weight whose tensors are views of the file."""
        parts = {part: self._source.read(f"{name}.{part}") for part in self._parts[name]}
        return NestedWeight(parts.pop("upper"), parts.pop("lower"), **parts)


class NestingWeights:
    """``WeightSource`` that nests the linear layers and the head of ``source`` as they are read.

    What is not float16 there is rounded to it.
    """

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self._source = source
        self._nested = frozenset(nestable_names(config))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._source.shapes()

    def read(self, name: str) -> Tensor:
        """One tensor: float16 if it nests, else as stored.

        Raises CheckpointError for NaN, infinities and, if it nests, what float16 cannot hold.
        """
        tensor = self._source.read(name)
        with naming(name):
            if name in self._nested:
                return in_half(tensor)
            check_finite(tensor)
        return tensor

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: what has 4 bits is not nested."""

    def read_nested(self, name: str, device: torch.device | None = None) -> NestedWeight | None:
        """One linear layer or the head; None for all others.

        Raises CheckpointError for a weight that float16 cannot hold.
        """
        if name not in self._nested:
            return None
        tensor = self._source.read(name).to(device or "cpu")
        with naming(name):
            return encode(in_half(tensor) if tensor.dtype == torch.float32 else tensor)

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor, as they are."""
        return self._source.stored(name)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32 (of float16 values if it nests)."""
        lookup = self._source.rows(name)
        if name not in self._nested:
            return lookup
        return lambda numbers: lookup(numbers).half().float()

    def release(self) -> None:
        """Give back what the source can."""
        self._source.release()


def nest(model: LoadedModel) -> LoadedModel:
    """The same model, nested as it is read.

    Its KV is of its own: even at FP16, bfloat16 weights below 2**-17 are rounded.

    Raises UnsupportedModelError naming a layer of 4 bits.
    """
    refuse_quantized(model)
    identity = hashlib.sha256(f"nested {model.fingerprint}".encode()).hexdigest()[:32]
    return replace(
        model,
        weights=NestingWeights(model.weights, model.config),
        fingerprint=identity,
        nested=True,
    )


def refuse_quantized(model: LoadedModel) -> None:
    """Raise UnsupportedModelError if a layer has 4 bits."""
    for name in nestable_names(model.config):
        if model.weights.read_quantized(name) is not None:
            raise UnsupportedModelError(
                f"{name} has 4 bits, which do not nest: take the model that it was made from"
            )


def _check_parts(
    source: SafetensorsWeights, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse parts of a weight that are missing or do not fit each other."""
    needed = {*_PLANES, *(_OUTLIERS if shapes.keys() & set(_OUTLIERS) else ())}
    missing = [f"{name}.{part}" for part in PARTS if part in needed and part not in shapes]
    if missing:
        raise CheckpointError(f"missing tensors: {', '.join(missing)}")
    upper = shapes["upper"]
    if len(upper) != 2:
        raise CheckpointError(f"tensor {name}.upper is no matrix")
    outliers = shapes.get("outlier_columns", ())[:1] or (0,)
    right = {
        "upper": upper,
        "lower": upper,
        "row_shift": upper[:1],
        "outlier_starts": (upper[0] + 1,),
        "outlier_columns": outliers,
        "outlier_values": outliers,
    }
    for part, shape in shapes.items():
        if shape != right[part]:
            raise CheckpointError(
                f"tensor {name}.{part} has shape {list(shape)}; beside an upper plane "
                f"{list(upper)} it would be {list(right[part])}"
            )
        if (dtype := source.dtype(f"{name}.{part}")) != _DTYPES[part]:
            raise CheckpointError(f"tensor {name}.{part} is {dtype}, it must be {_DTYPES[part]}")
