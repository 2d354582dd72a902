"""safetensors files: headers that are checked, tensors that are views of the mapped file."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.workers.model.weights import CheckpointError, RowLookup, row_lookup

HEADER_BYTES_MAX: Final = 100_000_000
"""The format's own cap on a header."""

FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What the tensors of a plain checkpoint may be."""

INTEGERS: Final = {"I32": torch.int32, "I64": torch.int64}
"""What those of 4-bit weights may be besides."""

PLANES: Final = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32}
"""What those of nested weights may be besides."""

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

    Tensors are of ``dtypes``.

    Raises CheckpointError for a truncated file, an oversized or malformed header, an unknown
    dtype, a byte range that does not fit the shape or the file, and ranges that overlap or leave
    bytes out.
    """

    def __init__(self, path: Path, dtypes: Mapping[str, torch.dtype] = FLOATS) -> None:
        self.path = path
        self._dtypes = dtypes
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
            header = parse_object(file.read(header_bytes), f"{path.name}: header")
            # A private mapping: torch wants writable memory, and nothing ever writes to it.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = _LENGTH_BYTES + header_bytes
        header.pop("__metadata__", None)
        self.entries = {name: self._entry(name, entry, data) for name, entry in header.items()}
        self._check_ranges(data)

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """The stored bytes of a tensor."""
        return memoryview(self._map)[entry.begin : entry.end]

    def release(self) -> None:
        """Unload the pages that were read; they come back from the file when needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _check_ranges(self, data: int) -> None:
        """The format wants every byte behind the header to belong to exactly one tensor."""
        at, before = data, "the header"
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[0])):
            if entry.begin != at:
                fault = "overlaps" if entry.begin < at else f"begins {entry.begin - at} bytes after"
                raise CheckpointError(f"{self.path.name}: tensor {name} {fault} {before}")
            at, before = entry.end, f"tensor {name}"
        if at != len(self._map):
            raise CheckpointError(
                f"{self.path.name}: {len(self._map) - at} bytes after {before} belong to no tensor"
            )

    def _entry(self, name: str, entry: Any, data: int) -> TensorEntry:
        where = f"{self.path.name}: tensor {name}"
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where}: entry is not an object")
        dtype = self._dtypes.get(str(entry.get("dtype")))
        if dtype is None:
            hint = " (integers only where config.json has a quantization_config)"
            raise CheckpointError(
                f"{where}: dtype {entry.get('dtype')!r} is not supported, only "
                f"{', '.join(self._dtypes)}{hint if self._dtypes is FLOATS else ''}"
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

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self._files = files
        self._entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in file.entries.items():
                if name in self._entries:
                    raise CheckpointError(
                        f"tensor {name} is in {self._entries[name].file.path.name} "
                        f"and in {file.path.name}"
                    )
                self._entries[name] = entry

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, a view of the mapped file in its stored dtype."""
        entry = self._entry(name)
        if not (stored := entry.file.bytes_of(entry)):
            return torch.empty(entry.shape, dtype=entry.dtype)  # frombuffer takes no empty buffer
        return torch.frombuffer(stored, dtype=entry.dtype).view(entry.shape)

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is packed here."""

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested here."""

    def dtype(self, name: str) -> torch.dtype:
        """What a tensor is stored as."""
        return self._entry(name).dtype

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor."""
        entry = self._entry(name)
        return (entry.file.bytes_of(entry),)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32."""
        return row_lookup(self.read(name))

    def release(self) -> None:
        """Unload the pages that were read."""
        for file in self._files:
            file.release()

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"tensor {name} is missing")
        return entry


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """A JSON object; raises CheckpointError for anything else, and for keys that appear twice."""
    try:
        parsed = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} must be an object, got {type(parsed).__name__}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a key is in it twice: two readers could take different ones."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r} appears twice")
    return unique


def _naturals(value: Any) -> list[int] | None:
    """``value`` if it is a list of non-negative integers."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return value
    return None
