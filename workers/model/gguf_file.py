"""A GGUF file's scalar metadata and its directory of tensors, read with every length checked.

The ``gguf`` package's reader takes seconds for a real vocabulary and trusts the lengths in the
file; of that package only the dequantisers are used (``gguf_loader``). Strings and arrays of the
tokenizer are skipped here; ``text`` reads them.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from deepinfer.workers.model.weights import CheckpointError

Scalar = int | float | bool | str

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_KINDS: Final = frozenset(int(kind) for kind in GGML_QUANT_SIZES)
_PAIRS_MAX: Final = 1 << 16
_TENSORS_MAX: Final = 1 << 16
_DIMENSIONS_MAX: Final = 4
_ALIGNMENT_DEFAULT: Final = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` row-major ``[out, in]``, bytes ``begin .. end`` of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """A mapped GGUF file.

    ``metadata`` holds the scalars and strings, ``array_lengths`` the length of every array.
    Raises CheckpointError for a file that is not GGUF, is truncated, or lies about its lengths.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Scalar] = {}
        self.array_lengths: dict[str, int] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path.name}: too short for a GGUF file")
            # A private mapping: numpy and torch want writable memory; nothing writes to it.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise CheckpointError(f"{path.name}: not a readable GGUF file: {error}") from error

    def bytes_of(self, tensor: GgufTensor) -> memoryview:
        """The stored (quantised) bytes of a tensor."""
        return memoryview(self._map)[tensor.begin : tensor.end]

    def release(self) -> None:
        """Unload the pages that were read; they come back from the file when needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _parse(self) -> None:
        if self._map[:4] != MAGIC:
            raise ValueError(f"it begins with {self._map[:4]!r}, not {MAGIC!r}")
        self._at = 4
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} (or big-endian); known: 2, 3")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        if tensors > _TENSORS_MAX or pairs > _PAIRS_MAX:
            raise ValueError(f"{tensors} tensors and {pairs} metadata entries are too many")
        for _ in range(pairs):
            key = self._string()
            self._value(key, self._number("<I"))
        directory = [self._tensor_entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment!r} is not a power of two")
        data = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in directory:
            if name in self.tensors:
                raise ValueError(f"tensor {name} appears twice")
            begin = data + offset
            end = begin + _stored_bytes(name, kind, shape)
            if end > len(self._map):
                raise ValueError(
                    f"truncated: tensor {name} ends at byte {end}, the file has {len(self._map)}"
                )
            self.tensors[name] = GgufTensor(kind, shape, begin, end)
        self._check_ranges()

    def _check_ranges(self) -> None:
        at, before = 0, ""
        for name, tensor in sorted(
            self.tensors.items(), key=lambda item: (item[1].begin, item[1].end, item[0])
        ):
            if tensor.begin < at:
                raise ValueError(f"tensor {name} overlaps tensor {before}")
            at, before = tensor.end, name

    def _tensor_entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        number = self._number("<I")
        if number not in _KINDS:
            raise ValueError(f"tensor {name} is of type {number}, which is unknown")
        return name, GGMLQuantizationType(number), shape, self._number("<Q")

    def _value(self, key: str, kind: int) -> None:
        if key in self.metadata or key in self.array_lengths:
            raise ValueError(f"metadata key {key} appears twice")
        if kind == _STRING:
            self.metadata[key] = self._string()
        elif kind == _ARRAY:
            self.array_lengths[key] = self._skip_array(self._number("<I"))
        else:
            (self.metadata[key],) = self._unpack(_format(kind))

    def _skip_array(self, kind: int) -> int:
        length = self._number("<Q")
        element = 8 if kind == _STRING else struct.calcsize(_format(kind))
        if length * element > len(self._map) - self._at:
            raise ValueError(f"an array of {length} elements at byte {self._at} exceeds the file")
        if kind != _STRING:
            self._at += length * element
            return length
        for _ in range(length):
            self._skip(self._number("<Q"))
        return length

    def _string(self) -> str:
        length = self._number("<Q")
        begin = self._at
        self._skip(length)
        return self._map[begin : self._at].decode("utf-8")

    def _skip(self, length: int) -> None:
        if length > len(self._map) - self._at:
            raise ValueError(f"truncated: {length} bytes at byte {self._at} exceed the file")
        self._at += length

    def _number(self, code: str) -> int:
        (value,) = self._unpack(code)
        return int(value)

    def _unpack(self, code: str) -> tuple[int | float | bool]:
        begin = self._at
        self._skip(struct.calcsize(code))
        value: tuple[int | float | bool] = struct.unpack_from(code, self._map, begin)
        return value


def _format(kind: int) -> str:
    code = _SCALARS.get(kind)
    if code is None:
        raise ValueError(f"metadata value type {kind} is unknown (nested arrays are not supported)")
    return code


def _stored_bytes(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} are not whole {kind.name} blocks")
    return math.prod(shape) // block * size
