"""Quantised checkpoints as a ``WeightSource``: three layouts of 4-bit weights, unpacked on read.

K = in_features, N = out_features, G = inputs a scale. Eight codes in an int32, ``nibble i`` being
bits 4 i to 4 i + 3. ``P`` is a module's name; ``P.weight`` is what the decoder asks for.

GPTQ (auto-gptq 0.7, GPTQModel):
    P.qweight  int32 [K / 8, N]   nibble i of word r: input 8 r + i
    P.qzeros   int32 [K / G, N / 8]   nibble i of word c: output 8 c + i; the first format: z - 1
    P.scales   float [K / G, N]
    P.g_idx    int32 [K]   group of each input: k // G, or the order is not the plain one
AWQ GEMM (autoawq 0.2):
    P.qweight  int32 [K, N / 8]   nibble i of word c: output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    P.qzeros   int32 [K / G, N / 8]   in the same order
    P.scales   float [K / G, N]
compressed-tensors, pack-quantized (0.20):
    P.weight_packed      int32 [N, K / 8]   nibble i of word c: input 8 c + i, plus 8
    P.weight_zero_point  int32 [N / 8, K / G]   nibble i of word r: output 8 r + i, plus 8
    P.weight_scale       float [N, K / G]
    P.weight_shape       int64 [2]   N, K
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.quantization import Packing, Quantization, Scheme
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.safetensors_loader import SafetensorsWeights
from deepinfer.workers.model.weights import (
    CheckpointError,
    RowLookup,
    expected_shapes,
    row_lookup,
)

ROW_GROUP_MAX: Final = 128
"""One scale a row is kept as equal scales of groups of up to so many inputs."""

_CODES: Final = {
    Packing.GPTQ: "qweight",
    Packing.AWQ: "qweight",
    Packing.COMPRESSED_TENSORS: "weight_packed",
}
_OTHERS: Final = {
    Packing.GPTQ: ("qzeros", "scales", "g_idx"),
    Packing.AWQ: ("qzeros", "scales"),
    Packing.COMPRESSED_TENSORS: ("weight_zero_point", "weight_scale", "weight_shape"),
}
_SCALES: Final = {
    Packing.GPTQ: "scales",
    Packing.AWQ: "scales",
    Packing.COMPRESSED_TENSORS: "weight_scale",
}
_AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds output 0, 1, ... of its eight."""

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Module:
    """One packed linear layer: ``shape`` is ``[N, K]``, ``stored`` its tensors' names by suffix."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    stored: Mapping[str, str]

    @property
    def group(self) -> int:
        """Inputs a stored scale."""
        return self.scheme.group or self.shape[1]


class PackedWeights:
    """``WeightSource`` over the files of a quantised checkpoint.

    The tensors tell what is packed: a linear layer whose weight lies there as floats is read as
    such. Biases of packed layers that the model does not have are left out if they are zero:
    some packers write them.

    Raises CheckpointError (tensors that do not fit each other or the configuration) or
    UnsupportedModelError (groups that cannot be computed with), naming the tensor.
    """

    def __init__(
        self, source: SafetensorsWeights, config: ModelConfig, quantization: Quantization
    ) -> None:
        self._source = source
        self._quantization = quantization
        self._packing = quantization.packing
        self._modules: dict[str, _Module] = {}
        stored = dict(source.shapes())
        suffix = f".{_CODES[self._packing]}"
        for name in [name for name in stored if name.endswith(suffix)]:
            module = self._module(name.removesuffix(suffix), stored)
            self._modules[f"{module.name}.weight"] = module
            for part in module.stored.values():
                del stored[part]
        if not self._modules:
            raise CheckpointError(
                f"{quantization.where} says {self._packing.value}, but no tensor is called "
                f"*{suffix}"
            )
        self._shapes: dict[str, tuple[int, ...]] = {
            **stored,
            **{name: module.shape for name, module in self._modules.items()},
        }
        expected = expected_shapes(config)
        for module in self._modules.values():
            bias = f"{module.name}.bias"
            if bias in stored and bias not in expected and not source.read(bias).any():
                del self._shapes[bias]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, packed ones as ``P.weight``."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """One tensor: dequantised to float32 if it is packed, else as stored."""
        packed = self.read_quantized(name)
        if packed is not None:
            return packed.dequantised()
        tensor = self._source.read(name)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}, which is no weight")
        return tensor

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        """One packed weight, unpacked on ``device`` (None: the CPU); None if it is not packed."""
        module = self._modules.get(name)
        if module is None:
            return None
        tensors = {
            suffix: self._source.read(stored).to(device) for suffix, stored in module.stored.items()
        }
        match self._packing:
            case Packing.GPTQ:
                codes, zeros = self._gptq(module, tensors)
            case Packing.AWQ:
                codes, zeros = _awq(module, tensors)
            case Packing.COMPRESSED_TENSORS:
                codes, zeros = _compressed_tensors(module, tensors)
        # A copy: where a tensor begins in a file suits no kernel.
        scales = tensors[_SCALES[self._packing]].to(torch.float16, copy=True)
        if self._packing is not Packing.COMPRESSED_TENSORS:
            scales = scales.t()
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"tensor {module.stored[_SCALES[self._packing]]} holds scales that float16 cannot "
                "(NaN, or beyond ±65504)"
            )
        weight = QuantizedTensor(
            codes.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous()
        )
        return weight.regrouped(_row_group(module)) if module.scheme.group is None else weight

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested."""

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor; of a packed one also what they mean."""
        module = self._modules.get(name)
        if module is None:
            return self._source.stored(name)
        meaning = (
            f"{self._packing.value} {self._quantization.zero_offset} {module.group} "
            f"{module.scheme.symmetric}"
        )
        parts = [self._source.stored(stored)[0] for stored in module.stored.values()]
        return memoryview(meaning.encode()), *parts

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32."""
        return self._source.rows(name) if name not in self._modules else row_lookup(self.read(name))

    def release(self) -> None:
        """Unload the pages that were read."""
        self._source.release()

    def _module(self, name: str, stored: Mapping[str, tuple[int, ...]]) -> _Module:
        rule = self._quantization.rule(name)
        if rule.scheme is None:
            raise CheckpointError(
                f"tensor {name}.{_CODES[self._packing]} is packed, but not by "
                f"{self._quantization.where}: {rule.because}"
            )
        if f"{name}.weight" in stored:
            raise CheckpointError(
                f"{name} has both a weight and a {_CODES[self._packing]}: which is meant?"
            )
        if f"{name}.weight_g_idx" in stored:
            raise UnsupportedModelError(
                f"{self._quantization.where}: actorder 'group' (tensor {name}.weight_g_idx) is "
                "not supported: only null, 'weight' and 'static'"
            )
        suffixes = (_CODES[self._packing], *_OTHERS[self._packing])
        found = {s: f"{name}.{s}" for s in suffixes if f"{name}.{s}" in stored}
        words = stored[found[_CODES[self._packing]]]
        if len(words) != 2:
            raise CheckpointError(f"tensor {name}.{_CODES[self._packing]} is no matrix")
        match self._packing:
            case Packing.GPTQ:
                shape = (words[1], 8 * words[0])
            case Packing.AWQ:
                shape = (8 * words[1], words[0])
            case Packing.COMPRESSED_TENSORS:
                shape = (words[0], 8 * words[1])
        module = _Module(name, shape, rule.scheme, found)
        self._check(module, stored)
        return module

    def _check(self, module: _Module, stored: Mapping[str, tuple[int, ...]]) -> None:
        rows, columns = module.shape
        if columns % module.group or _row_group(module) < 32:
            raise UnsupportedModelError(
                f"{self._quantization.where}: group_size {module.scheme.group or -1} does not fit "
                f"the {columns} inputs of {module.name}: it must divide them, and 32 must"
            )
        groups = columns // module.group
        eighths = -(-rows // 8)
        shapes = {
            "qzeros": (groups, eighths),
            "scales": (groups, rows),
            "g_idx": (columns,),
            "weight_zero_point": (eighths, groups),
            "weight_scale": (rows, groups),
            "weight_shape": (2,),
        }
        needed = {_SCALES[self._packing]}
        if not module.scheme.symmetric:
            needed |= {s for s in _OTHERS[self._packing] if "zero" in s}
        for suffix in _OTHERS[self._packing]:
            name = f"{module.name}.{suffix}"
            if suffix not in module.stored:
                if suffix in needed:
                    raise CheckpointError(f"missing tensors: {name}")
            elif stored[name] != shapes[suffix]:
                raise CheckpointError(
                    f"tensor {name} has shape {list(stored[name])}; with {rows} outputs and "
                    f"{columns} inputs in groups of {module.group} it would be "
                    f"{list(shapes[suffix])}"
                )
        for suffix, name in module.stored.items():
            kinds: tuple[torch.dtype, ...] = (torch.int32,)
            if suffix == _SCALES[self._packing]:
                kinds = _FLOATS
            elif suffix == "weight_shape":
                kinds = (torch.int64, torch.int32)
            if (dtype := self._source.dtype(name)) not in kinds:
                raise CheckpointError(f"tensor {name} is {dtype}, it must be {kinds[0]}")

    def _gptq(self, module: _Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        rows, columns = module.shape
        if "g_idx" in tensors:
            order = tensors["g_idx"]
            plain = torch.arange(columns, device=order.device) // module.group
            if not bool((order == plain).all()):
                raise UnsupportedModelError(
                    f"tensor {module.name}.g_idx is not in order: grouped desc_act is not supported"
                )
        codes = _nibbles(tensors["qweight"]).permute(1, 0, 2).reshape(rows, columns)
        if module.scheme.symmetric:
            self._check_symmetric(module, tensors)
            return codes, None
        zeros = _nibbles(tensors["qzeros"]).flatten(1)[:, :rows] + self._quantization.zero_offset
        return codes, zeros.t()

    def _check_symmetric(self, module: _Module, tensors: Mapping[str, Tensor]) -> None:
        """Files called v1 exist that store 8 as v2 does: both mean 8 where ``sym`` says so."""
        if "qzeros" not in tensors:
            return
        stored = _nibbles(tensors["qzeros"]).flatten(1)[:, : module.shape[0]]
        if not bool((stored == stored[0, 0]).all()) or int(stored[0, 0]) not in (7, 8):
            raise CheckpointError(
                f"{self._quantization.where}: sym is true, but tensor {module.name}.qzeros holds "
                "zero points other than 8"
            )


def _awq(module: _Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    unpacked = (_nibbles(tensors[part])[..., list(_AWQ_NIBBLES)] for part in ("qweight", "qzeros"))
    codes, zeros = (nibbles.flatten(1).t() for nibbles in unpacked)
    return codes, zeros


def _compressed_tensors(
    module: _Module, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    if (shape := tensors.get("weight_shape")) is not None and shape.tolist() != list(module.shape):
        raise CheckpointError(
            f"tensor {module.name}.weight_shape says {shape.tolist()}, the codes are "
            f"{list(module.shape)}"
        )
    codes = _nibbles(tensors["weight_packed"]).flatten(1)
    if module.scheme.symmetric:
        return codes, None
    zeros = _nibbles(tensors["weight_zero_point"]).permute(0, 2, 1).flatten(0, 1)
    return codes, zeros[: module.shape[0]]


def _nibbles(words: Tensor) -> Tensor:
    """int32 ``[...]`` to uint8 ``[..., 8]``, the lowest bits first."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def _row_group(module: _Module) -> int:
    """The largest power of two, up to ``ROW_GROUP_MAX``, that divides what a scale is for."""
    return min(module.group & -module.group, ROW_GROUP_MAX)
