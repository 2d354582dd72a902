"""Reads a checkpoint's tensors onto a card, fused: in half precision, 4 bits, or nested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.linear import F16Weight, W4Weight, Weight, interleave_gate_up, pack_w4
from deepinfer.kernels.nested import NestedWeight, encode, interleave, pad, stack
from deepinfer.workers.model import quantized
from deepinfer.workers.model.finite import in_half, naming
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.weights import WeightSource

PLANE_ALIGNMENT: Final = 128
"""Planes begin at multiples of so many bytes: whole cache lines."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How much of a nested model is kept on the card."""

    upper_only: bool = False
    """The layers' lower planes stay away: FP8 is all that there is."""
    upper_head: bool = False
    """So do those of the LM head and of the embedding."""


class PlaneArena:
    """Room for the planes of one layer, or of the head: ``size`` bytes of either, two allocations.

    Made before anything else of the layer is read, so that what is only needed on the way leaves
    no holes between what stays. Without ``lower`` there is no room for lower planes.
    """

    def __init__(self, size: int, device: torch.device, *, lower: bool) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._upper = torch.empty(size, dtype=torch.uint8, device=device)
        self._lower = torch.empty_like(self._upper) if lower else None
        self._at = 0

    def place(self, weight: NestedWeight) -> NestedWeight:
        """The same weight with its planes in here; itself, if there is no room left."""
        size = weight.upper.numel()
        at = self._at
        if at + size > self._upper.numel() or (weight.lower is None) != (self._lower is None):
            return weight
        self._at = aligned(at + size)

        def moved(room: Tensor, plane: Tensor) -> Tensor:
            return room[at : at + size].view(plane.shape).copy_(plane)

        lower = None
        if self._lower is not None and weight.lower is not None:
            lower = moved(self._lower, weight.lower)
        return replace(weight, upper=moved(self._upper, weight.upper), lower=lower)


def aligned(size: int) -> int:
    """Where the next plane may begin."""
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


class TensorReader:
    """Reads a checkpoint's tensors onto a device, one at a time."""

    def __init__(self, source: WeightSource, device: torch.device, form: WeightForm) -> None:
        self._source = source
        self._device = device
        self._form = form

    def half(self, name: str) -> Tensor:
        """One tensor in float16, converted on the card.

        Raises CheckpointError naming tensor, place and value of what float16 cannot hold.
        """
        # Stored dtype over the bus: half as much for BF16 as for float32.
        stored = self._source.read(name).to(self._device)
        with naming(name):
            return in_half(stored).contiguous()

    def rows(self, names: Sequence[str]) -> Tensor:
        """Matrices (or biases) one below the other."""
        parts = [self.half(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def arena(self, size: int) -> PlaneArena:
        """Room for the planes of a layer."""
        return PlaneArena(size, self._device, lower=not self._form.upper_only)

    def linear(
        self,
        names: Sequence[str],
        bias: Tensor | None,
        columns: int,
        arena: PlaneArena | None = None,
    ) -> Weight:
        """Layers one below the other, with zeros up to ``columns`` inputs.

        They are kept in 4 bits if the checkpoint has all of them so. They are nested if it has any
        of them nested; their planes are in ``arena`` then.
        """
        packed = self.packed(names)
        if packed is not None:
            # Groups of a power of two from 32 up: nothing is missing.
            return _w4(packed, bias)
        parts = self.nested(names, whole=not self._form.upper_only)
        if parts is not None:
            missing = columns - parts[0].columns
            whole = parts[0] if len(parts) == 1 else stack(parts)
            return _placed(pad(whole, columns=missing) if missing else whole, bias, arena)
        weight = self.rows(names)
        missing = columns - weight.shape[1]
        return F16Weight(F.pad(weight, (0, missing)) if missing else weight, bias)

    def gate_up(
        self,
        names: Sequence[str],
        bias: Tensor | None,
        padding: int,
        arena: PlaneArena | None = None,
    ) -> Weight:
        """Gate and up (or one layer that is both), ``padding`` rows added to each, interleaved."""
        packed = self.packed(names)
        if packed is not None:
            return _w4(_interleaved(packed, padding), bias)
        parts = self.nested(names, whole=not self._form.upper_only)
        if parts is not None:
            if len(parts) == 1:
                (both,) = parts
                width = both.rows // 2
                parts = [both.row_range(start, start + width) for start in (0, width)]
            gate, up = (pad(part, rows=padding) if padding else part for part in parts)
            return _placed(interleave(gate, up), bias, arena)
        gate_half, up_half = self.rows(names).chunk(2)
        if padding:
            gate_half, up_half = (F.pad(part, (0, 0, 0, padding)) for part in (gate_half, up_half))
        return F16Weight(interleave_gate_up(gate_half, up_half), bias)

    def head(self, name: str, *, nested: bool = False) -> F16Weight | NestedWeight:
        """The LM head; ``nested``: of a model that is."""
        whole = not self._form.upper_head
        arena = None
        if nested:
            size = math.prod(self._source.shapes()[name])
            arena = PlaneArena(aligned(size), self._device, lower=whole)
        parts = self.nested([name], whole=whole)
        if parts is None:
            return F16Weight(self.half(name))
        return parts[0] if arena is None else arena.place(parts[0])

    def packed(self, names: Sequence[str]) -> QuantizedTensor | None:
        """4-bit matrices one below the other, if the checkpoint has all of them so."""
        parts: list[QuantizedTensor] = []
        for name in names:
            part = self._source.read_quantized(name, self._device)
            if part is None:
                return None
            parts.append(part)
        return quantized.stack(parts)

    def nested(self, names: Sequence[str], *, whole: bool) -> list[NestedWeight] | None:
        """Matrices of which the checkpoint has some nested, all so; None: it has none.

        Without ``whole``, their upper planes: the lower ones never get to the card.
        """
        place = self._device if whole else torch.device("cpu")
        stored = [self._source.read_nested(name, place) for name in names]
        if all(part is None for part in stored):
            return None
        found = []
        for name, part in zip(names, stored, strict=True):
            if part is None:
                part = encode(self.half(name).to(place))
            found.append((part if whole else replace(part, lower=None)).to(self._device))
        return found


def _placed(weight: NestedWeight, bias: Tensor | None, arena: PlaneArena | None) -> NestedWeight:
    weight = replace(weight, bias=bias)
    return weight if arena is None else arena.place(weight)


def _w4(weight: QuantizedTensor, bias: Tensor | None) -> W4Weight:
    return pack_w4(weight.codes, weight.scales, weight.zeros, bias=bias)


def _interleaved(packed: QuantizedTensor, padding: int) -> QuantizedTensor:
    """Gate above up, ``padding`` rows added to each, interleaved."""
    width = packed.codes.shape[0] // 2
    parts = [packed.rows(start, start + width).padded(padding) for start in (0, width)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantizedTensor(
        interleave_gate_up(*(part.codes for part in parts)),
        interleave_gate_up(*(part.scales for part in parts)),
        interleave_gate_up(*zeros) if zeros else None,
    )
