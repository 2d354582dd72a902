"""Writes one safetensors file, tensor by tensor: a model need not be in memory to be written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

_NAMES: Final = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
}
_OFFSET_MAX: Final = 10**15
_SHAPE: Final = (10**9, 10**9)


class SafetensorsWriter:
    """A file that will hold the tensors called ``names``, each written once, in any order.

    Those called ``optional`` may be written too.
    Its header comes first and is known last, so that room is left for it, which spaces fill up.
    Closing without an error completes the file and sees it on the disk.
    """

    def __init__(self, path: Path, names: Iterable[str], optional: Iterable[str] = ()) -> None:
        self._missing = set(names)
        self._optional = set(optional)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        longest = {
            name: _entry("BF16", _SHAPE, _OFFSET_MAX, _OFFSET_MAX)
            for name in self._missing | self._optional
        }
        self._room = -(-len(json.dumps(self._header | longest).encode()) // 8) * 8
        self._at = 0
        self._file = path.open("xb")
        self._file.seek(8 + self._room)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is not None:
                return
            assert not self._missing, f"never written: {sorted(self._missing)}"
            header = json.dumps(self._header).encode()
            assert len(header) <= self._room
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, name: str, tensor: Tensor) -> None:
        """Append one tensor of up to two dimensions."""
        (self._optional if name in self._optional else self._missing).remove(name)
        begin, self._at = self._at, self._at + tensor.nbytes
        shape = tuple(tensor.shape)
        self._header[name] = _entry(_NAMES[tensor.dtype], shape, begin, self._at)
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
