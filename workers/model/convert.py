"""A checkpoint's weights to W4A16, written as compressed-tensors packs them (pack-quantized).

Linear layers of the decoder are rounded (``rounding``); embedding, head, norms and biases stay:
matrices in 16 bits, vectors in their own dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.finite import check_finite, in_half, naming
from deepinfer.workers.model.heap import trim_heap
from deepinfer.workers.model.rounding import round_to_nearest
from deepinfer.workers.model.safetensors_writer import SafetensorsWriter
from deepinfer.workers.model.weights import LoadedModel, expected_shapes

GROUP_SIZES: Final = (128, 64, 32)
"""Inputs a scale; the first that fits is the default."""

_PACKED: Final = ("weight_packed", "weight_scale", "weight_shape")


class GroupSizeError(ValueError):
    """Not a size of groups, or none that divides a linear layer's inputs; says which sizes do."""


def linear_names(config: ModelConfig) -> tuple[str, ...]:
    """The weights that are converted: all linear layers but the head."""
    return tuple(name for name in expected_shapes(config) if name.endswith("_proj.weight"))


def group_size_for(config: ModelConfig, wanted: int | None) -> int:
    """``wanted``, or the largest of ``GROUP_SIZES`` (None), if it divides every layer's inputs.

    Raises GroupSizeError if it does not.
    """
    if wanted is not None and wanted not in GROUP_SIZES:
        raise GroupSizeError(f"group_size = {wanted}: must be 32, 64 or 128")
    shapes = expected_shapes(config)
    widths = {name: shapes[name][1] for name in linear_names(config)}
    fitting = [size for size in GROUP_SIZES if not any(w % size for w in widths.values())]
    if wanted is None and fitting:
        return fitting[0]
    if wanted in fitting:
        return wanted
    smallest = min(GROUP_SIZES) if wanted is None else wanted
    name, width = next((n, w) for n, w in widths.items() if w % smallest)
    known = f"takes {', '.join(map(str, sorted(fitting)))}" if fitting else "takes none of them"
    raise GroupSizeError(
        f"group_size = {smallest} does not divide the {width} inputs of "
        f"{name.removesuffix('.weight')}: of 32, 64 and 128 this model {known}"
    )


def quantization_config(group: int) -> dict[str, Any]:
    """What ``config.json`` must say of weights that ``write_w4a16`` wrote."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "mse",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def write_w4a16(model: LoadedModel, path: Path, group: int) -> None:
    """Convert ``model`` into the safetensors file ``path``, which must not exist.

    Raises CheckpointError naming a tensor with values that float16 cannot hold, OSError.
    """
    linear = frozenset(linear_names(model.config))
    shapes = expected_shapes(model.config)
    names = [
        stored
        for name in shapes
        for stored in (
            [f"{name.removesuffix('.weight')}.{part}" for part in _PACKED]
            if name in linear
            else [name]
        )
    ]
    with SafetensorsWriter(path, names) as writer:
        for name in shapes:
            tensor = model.weights.read(name)
            if name not in linear:
                writer.write(name, kept(name, tensor))
            else:
                with naming(name):
                    in_half(tensor)  # only looked at: rounding starts from what there is
                packed = round_to_nearest(tensor, group)
                module = name.removesuffix(".weight")
                writer.write(f"{module}.weight_packed", pack_rows(packed.codes))
                writer.write(f"{module}.weight_scale", packed.scales)
                writer.write(f"{module}.weight_shape", torch.tensor(tensor.shape))
            del tensor
            model.weights.release()
            if name.endswith("down_proj.weight"):
                trim_heap()


def pack_rows(codes: Tensor) -> Tensor:
    """uint8 ``[N, K]`` to int32 ``[N, K / 8]``, the lowest bits first."""
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return pairs.contiguous().view(torch.int32)


def kept(name: str, tensor: Tensor) -> Tensor:
    """What a tensor that is not converted is written as: float32 matrices in float16.

    Raises CheckpointError naming it: NaN, infinities, a matrix that float16 cannot hold.
    """
    with naming(name):
        if tensor.ndim == 2 and tensor.dtype == torch.float32:
            return in_half(tensor)
        check_finite(tensor)
    return tensor
