"""Hugging Face folders: ``config.json`` beside ``*.safetensors``, one file or an indexed set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.hf_config import config_json
from deepinfer.workers.model.nested import NestedWeights
from deepinfer.workers.model.packed_weights import PackedWeights
from deepinfer.workers.model.quantization import (
    FALLBACK_FILES,
    NestedFormat,
    Quantization,
    parse_quantization,
    quantization_from_hf,
)
from deepinfer.workers.model.safetensors_loader import (
    FLOATS,
    INTEGERS,
    PLANES,
    SafetensorsFile,
    SafetensorsWeights,
    parse_object,
)
from deepinfer.workers.model.weights import CheckpointError, WeightSource

CONFIG_BYTES_MAX: Final = 1_000_000
INDEX_BYTES_MAX: Final = 50_000_000


def load_folder(folder: Path) -> tuple[ModelConfig, WeightSource]:
    """Open a Hugging Face folder.

    Raises CheckpointError or UnsupportedModelError, naming the file at fault.
    """
    text = _read_text(folder / "config.json", CONFIG_BYTES_MAX)
    try:
        config = config_json(text)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"config.json: {error}") from error
    quantization = _quantization(folder, text)
    match quantization:
        case None:
            return config, _weights(folder, FLOATS)
        case NestedFormat():
            return config, NestedWeights(_weights(folder, FLOATS | PLANES), config, quantization)
        case Quantization():
            packed = _weights(folder, FLOATS | INTEGERS)
            return config, PackedWeights(packed, config, quantization)


def _weights(folder: Path, dtypes: Mapping[str, torch.dtype]) -> SafetensorsWeights:
    return SafetensorsWeights([SafetensorsFile(path, dtypes) for path in _weight_files(folder)])


def _quantization(folder: Path, config: str) -> Quantization | NestedFormat | None:
    """How the weights are packed, by ``config.json`` or else by a file of their packer."""
    if (found := quantization_from_hf(json.loads(config))) is not None:
        return found
    for name, method in FALLBACK_FILES.items():
        if (folder / name).is_file():
            values = parse_object(_read_text(folder / name, CONFIG_BYTES_MAX), name)
            return parse_quantization(values, where=name, method_default=method)
    return None


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        pickled = sorted(folder.glob("pytorch_model*.bin"))
        hint = f" ({pickled[0].name} is not read: it is pickled; convert it)" if pickled else ""
        raise CheckpointError(
            f"{folder.name} holds neither model.safetensors nor model.safetensors.index.json{hint}"
        )
    weight_map = parse_object(_read_text(index, INDEX_BYTES_MAX), index.name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name}: weight_map must be an object naming files")
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        # A file name, not a path: an index must not reach outside its folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index.name}: {name!r} is not a file name")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index.name} names {name}, which is missing")
    return [folder / name for name in names]


def _read_text(path: Path, limit: int) -> str:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing in {path.parent.name}")
    if path.stat().st_size > limit:
        raise CheckpointError(f"{path.name} is larger than {limit} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8: {error}") from error
