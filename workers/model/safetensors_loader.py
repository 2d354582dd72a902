"""Hugging Face folders: ``config.json`` beside ``*.safetensors``, one file or an indexed set."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig, config_json
from deepinfer.workers.model.weights import CheckpointError, Progress

HEADER_BYTES_MAX: Final = 100_000_000
"""The format's own cap on a header."""

CONFIG_BYTES_MAX: Final = 1_000_000
INDEX_BYTES_MAX: Final = 50_000_000

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: a byte range of a mapped file."""

    file: SafetensorsFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file with a checked header: little-endian length, JSON, then the tensors.

    Raises CheckpointError for a truncated file, an oversized or malformed header, an unknown
    dtype, or a byte range that does not fit the shape or the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size < _LENGTH_BYTES:
            raise CheckpointError(f"{path.name}: {size} bytes are too few for a safetensors file")
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if header_bytes > HEADER_BYTES_MAX:
                raise CheckpointError(
                    f"{path.name}: header claims {header_bytes} bytes, the limit is "
                    f"{HEADER_BYTES_MAX}; not a safetensors file?"
                )
            if header_bytes > size - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{path.name}: truncated: header claims {header_bytes} bytes, the file has "
                    f"{size}"
                )
            header = _parse_object(file.read(header_bytes), f"{path.name}: header")
            # A private mapping: torch wants writable memory, and nothing ever writes to it.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = _LENGTH_BYTES + header_bytes
        header.pop("__metadata__", None)
        self.entries = {name: self._entry(name, entry, data) for name, entry in header.items()}

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """The stored bytes of a tensor."""
        return memoryview(self._map)[entry.begin : entry.end]

    def _entry(self, name: str, entry: Any, data: int) -> TensorEntry:
        where = f"{self.path.name}: tensor {name}"
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where}: entry is not an object")
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise CheckpointError(
                f"{where}: dtype {entry.get('dtype')!r} is not supported, only {', '.join(_DTYPES)}"
            )
        shape = _naturals(entry.get("shape"))
        offsets = _naturals(entry.get("data_offsets"))
        if shape is None or offsets is None or len(offsets) != 2:
            raise CheckpointError(f"{where}: shape and data_offsets must be lists of naturals")
        begin, end = data + offsets[0], data + offsets[1]
        if end > len(self._map):
            raise CheckpointError(
                f"{where}: truncated: ends at byte {end}, the file has {len(self._map)}"
            )
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{where}: {end - begin} bytes do not hold {dtype} {shape}")
        return TensorEntry(self, dtype, tuple(shape), begin, end)


class SafetensorsWeights:
    """``WeightSource`` over the files of one checkpoint."""

    def __init__(self, files: list[SafetensorsFile], progress: Progress | None) -> None:
        self._entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in file.entries.items():
                if name in self._entries:
                    raise CheckpointError(
                        f"tensor {name} is in {self._entries[name].file.path.name} "
                        f"and in {file.path.name}"
                    )
                self._entries[name] = entry
        self._progress = progress
        self._bytes_read = 0
        self._bytes_total = sum(entry.end - entry.begin for entry in self._entries.values())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, a view of the mapped file in its stored dtype."""
        entry = self._entry(name)
        flat = torch.frombuffer(self.raw(name), dtype=entry.dtype)
        self._bytes_read += entry.end - entry.begin
        if self._progress is not None:
            self._progress(min(self._bytes_read, self._bytes_total), self._bytes_total)
        return flat.view(entry.shape)

    def raw(self, name: str) -> memoryview:
        """The stored bytes of one tensor."""
        entry = self._entry(name)
        return entry.file.bytes_of(entry)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"tensor {name} is missing")
        return entry


def load_folder(
    folder: Path, *, progress: Progress | None = None
) -> tuple[ModelConfig, SafetensorsWeights]:
    """Open a Hugging Face folder.

    Raises CheckpointError or UnsupportedModelError, naming the file at fault.
    """
    config = config_json(_read_text(folder / "config.json", CONFIG_BYTES_MAX))
    return config, SafetensorsWeights(
        [SafetensorsFile(path) for path in _weight_files(folder)], progress
    )


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise CheckpointError(
            f"{folder.name} holds neither model.safetensors nor model.safetensors.index.json"
        )
    weight_map = _parse_object(_read_text(index, INDEX_BYTES_MAX), index.name).get("weight_map")
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


def _parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} must be an object, got {type(parsed).__name__}")
    return parsed


def _naturals(value: Any) -> list[int] | None:
    """``value`` if it is a list of non-negative integers."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return value
    return None
