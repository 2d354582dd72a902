"""The key/value part of a GGUF file, read without its tensors.

The ``gguf`` package makes an array object of every string, seconds for a real vocabulary, and
trusts the lengths in the file. This reads the same in a tenth of a second, and nothing in a file
can make it read outside of the file or allocate more than a small multiple of its size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TypeAlias

from deepinfer.text.errors import TokenizerError

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[Scalar]

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Value type -> struct format; 8 is a string, 9 an array.
_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_MAX_PAIRS = 1 << 16
_MAX_ELEMENTS = 1 << 22  # the largest vocabularies have 2**18 tokens


def read_gguf_metadata(path: Path, *, prefixes: tuple[str, ...] = ("",)) -> dict[str, Value]:
    """Return the metadata whose keys begin with any of ``prefixes``.

    Raises :class:`TokenizerError` for a file that is not GGUF, is cut short, or lies about its
    lengths; OSError if it cannot be opened.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise TokenizerError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(data, prefixes)
            except (struct.error, UnicodeDecodeError, _BadFileError) as error:
                raise TokenizerError(f"{path}: not a readable GGUF file: {error}") from error


class _BadFileError(Exception):
    pass


def _read(data: mmap.mmap, prefixes: tuple[str, ...]) -> dict[str, Value]:
    if data[:4] != MAGIC:
        raise _BadFileError(f"it begins with {data[:4]!r}, not {MAGIC!r}")
    version, _tensors, pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise _BadFileError(f"version {version} (big-endian or unknown); 2 and 3 are supported")
    if pairs > _MAX_PAIRS:
        raise _BadFileError(f"{pairs} metadata entries; at most {_MAX_PAIRS} are read")
    at = 24
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        value, at = _value(data, at + 4, kind)
        if key.startswith(prefixes):
            metadata[key] = value
    return metadata


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        code = _code(kind)
        return struct.unpack_from("<" + code, data, at)[0], at + struct.calcsize("<" + code)
    kind, length = struct.unpack_from("<IQ", data, at)
    at += 12
    # The shortest element is a byte, and the shortest string its 8-byte length.
    if length * (8 if kind == _STRING else 1) > len(data) - at:
        raise _BadFileError(f"an array of {length} elements at byte {at} exceeds the file")
    if length > _MAX_ELEMENTS:
        raise _BadFileError(f"an array of {length} elements; at most {_MAX_ELEMENTS} are read")
    if kind == _STRING:
        strings: list[Scalar] = []
        for _ in range(length):
            string, at = _string(data, at)
            strings.append(string)
        return strings, at
    code = f"<{length}{_code(kind)}"
    return list(struct.unpack_from(code, data, at)), at + struct.calcsize(code)


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    at += 8
    if length > len(data) - at:
        raise _BadFileError(f"a string of {length} bytes at byte {at} exceeds the file")
    return data[at : at + length].decode(), at + length


def _code(kind: int) -> str:
    if kind not in _FORMATS:
        raise _BadFileError(f"value type {kind} is not a number, string or array of them")
    return _FORMATS[kind]
