"""How inputs are changed: bytes, and the structures that most of them hold.

Each ``mutate`` makes one to a few changes. A change of structure (a field, a number, an element) is
twice as likely as one of bytes: decoders refuse most random bytes in their first line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from deepinfer.deploy.fuzz.target import Shape

NUMBERS: Final = (
    0, 1, 2, 3, 7, 8, 15, 16, 31, 63, 64, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 16,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, -1, -2, -(1 << 31), -(1 << 63),
)  # fmt: skip
FLOATS: Final = (
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-320, 1e38, 1e308, float("inf"), float("-inf"),
    float("nan"),
)  # fmt: skip
WORDS: Final = (
    "", " ", "a", "\0", "é", "漢", "🙂", "\ufffd", "\ufeff", "\ufdd0", "a" * 300, "../x",
    "/dev/zero", "<|im_end|>", "null", "true", "0", "-1", "1e999", "NaN", "%s", "{{x}}", "\n",
    "decode",
)  # fmt: skip
CHANGES: Final = (1, 1, 1, 2, 4)
"""How many an input gets: after several most make no sense any more."""


class Bytes:
    """No structure: flips, cuts, copies, numbers of all widths, and words."""

    def __init__(self, words: Sequence[bytes] = ()) -> None:
        self._words = words

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """One to a few changes."""
        out = bytearray(data)
        for _ in range(rng.choice(CHANGES)):
            self._change(out, rng, others)
        return bytes(out)

    def _change(self, out: bytearray, rng: Random, others: Sequence[bytes]) -> None:
        size = len(out)
        at = rng.randrange(size + 1)
        kind = rng.randrange(9)
        if kind == 0 and size:
            out[at % size] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            out[at % size] = rng.randrange(256)
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            del out[at : at + rng.randint(1, 16)]
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            end = at + rng.randint(1, 64)
            out[at:at] = out[at:end] * rng.randint(1, 3)
        elif kind == 6:
            width = rng.choice((1, 2, 4, 8))
            order = rng.choice(("little", "big"))
            number = rng.choice(NUMBERS) % (1 << 8 * width)
            out[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        elif kind == 7 and others:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            out[at:] = other[begin:]
        elif self._words:
            out[at:at] = rng.choice(self._words)


def mutated_value(value: Any, rng: Random, depth: int = 0) -> Any:
    """A JSON or msgpack value with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(12):
            case 0:
                del changed[name]
            case 1:
                changed[_word(rng)] = value[name]
            case 2:
                changed[name] = value[rng.choice(list(value))]
            case _:
                changed[name] = mutated_value(value[name], rng, depth + 1)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        items = list(value)
        match rng.randrange(10):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case 2:
                items *= rng.choice((0, 2, 3))
            case _:
                items[at] = mutated_value(items[at], rng, depth + 1)
        return items
    if isinstance(value, str) and rng.random() < 0.5:
        at = rng.randrange(len(value) + 1)
        return value[:at] + _word(rng) + value[at + rng.randrange(3) :]
    if isinstance(value, bytes) and rng.random() < 0.7:
        return Bytes().mutate(value, rng, ())
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((1, -1, 8, value, -value))
    return _value(rng)


def _value(rng: Random) -> Any:
    match rng.randrange(12):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2 | 3 | 4:
            return rng.choice(NUMBERS)
        case 5:
            return rng.choice(FLOATS)
        case 6 | 7:
            return _word(rng)
        case 8:
            return []
        case 9:
            return {}
        case 10:
            return [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]
        case _:
            return nested(rng.choice((5, 200)))


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    made: Any = 0
    for _ in range(depth):
        made = [made]
    return made


def _word(rng: Random) -> str:
    return rng.choice(WORDS)


class Json:
    """A JSON document."""

    def __init__(self, words: Sequence[bytes] = ()) -> None:
        self._bytes = Bytes(
            (*words, b"[" * 3000, b'{"a":' * 3000, b"1e400", b"\\ud800", b"1" * 5000)
        )

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """A change of the value or of the text."""
        if rng.random() < 0.7:
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                return self._bytes.mutate(data, rng, others)
            for _ in range(rng.choice(CHANGES)):
                value = mutated_value(value, rng)
            return json.dumps(value).encode(errors="replace")
        return self._bytes.mutate(data, rng, others)


class Msgpack:
    """A msgpack value."""

    def __init__(self) -> None:
        self._bytes = Bytes((b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 3000))

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """A change of the value or of the bytes."""
        if rng.random() < 0.7:
            try:
                value = msgpack.unpackb(data, raw=False, strict_map_key=False)
                for _ in range(rng.choice(CHANGES)):
                    value = mutated_value(value, rng)
                return bytes(msgpack.packb(value, use_bin_type=True))
            except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
                pass
        return self._bytes.mutate(data, rng, others)


class Proto:
    """A protobuf message of one type."""

    def __init__(self, message: type[Message]) -> None:
        self._message = message
        self._bytes = Bytes((b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 10))

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """A change of the fields or of the bytes."""
        if rng.random() < 0.8:
            try:
                message = self._message.FromString(data)
                for _ in range(rng.choice(CHANGES)):
                    mutate_message(message, rng)
                return bytes(message.SerializeToString())
            except (DecodeError, EncodeError):
                pass
        return self._bytes.mutate(data, rng, others)


def mutate_message(message: Message, rng: Random) -> None:
    """Change one field of it, or of a message in it."""
    if not message.DESCRIPTOR.fields:
        return
    field: FieldDescriptor = rng.choice(message.DESCRIPTOR.fields)  # type: ignore[assignment]
    if rng.random() < 0.1:
        message.ClearField(field.name)
        return
    holder: Any = getattr(message, field.name)
    if field.is_repeated:
        _mutate_repeated(field, holder, rng)
    elif field.message_type is not None:
        holder.SetInParent()
        mutate_message(holder, rng)
    else:
        setattr(message, field.name, _scalar(field, holder, rng))


def _mutate_repeated(field: FieldDescriptor, holder: Any, rng: Random) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        if value.message_type is None:
            keys = list(holder)
            name = rng.choice(keys) if keys and rng.random() < 0.7 else _scalar(key, None, rng)
            holder[name] = _scalar(value, holder.get(name), rng)
        return
    match rng.randrange(4 if len(holder) else 1):
        case 0:
            if kind is None:
                holder.append(_scalar(field, None, rng))
            else:
                holder.add()
        case 1:
            del holder[rng.randrange(len(holder))]
        case 2:
            holder.append(holder[rng.randrange(len(holder))])
        case _:
            at = rng.randrange(len(holder))
            if kind is None:
                holder[at] = _scalar(field, holder[at], rng)
            else:
                mutate_message(holder[at], rng)


_BITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}


def _scalar(field: FieldDescriptor, now: Any, rng: Random) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        bits, signed = _BITS[kind]
        number = (
            rng.choice(NUMBERS) if now is None or rng.random() < 0.6 else now + rng.choice((1, -1))
        )
        number %= 1 << bits
        return number - (1 << bits) if signed and number >> (bits - 1) else number
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not now
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return rng.choice([*field.enum_type.values_by_number, 99])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return Bytes().mutate(now or b"", rng, ())
    return str(mutated_value(now or "", rng))


class Records:
    """Calls: each one byte for the method, four of length, and a message of that method.

    Args:
        shapes: how a message of each method is changed, by the byte's value modulo their number.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """Change a message, or what is called in which order."""
        found = list(records(data))
        for _ in range(rng.choice(CHANGES)):
            if not found or rng.random() < 0.1:
                found += records(rng.choice(others)) if others else [(rng.randrange(256), b"")]
                continue
            at = rng.randrange(len(found))
            method, message = found[at]
            match rng.randrange(10):
                case 0:
                    del found[at]
                case 1:
                    found.insert(rng.randrange(len(found) + 1), found[at])
                case 2:
                    found[at] = (rng.randrange(256), message)
                case 3:
                    found.append(found.pop(at))
                case _:
                    shape = self._shapes[method % len(self._shapes)]
                    found[at] = (method, shape.mutate(message, rng, ()))
        return recorded(found[:CALLS_MAX])


CALLS_MAX: Final = 24


def recorded(calls: Sequence[tuple[int, bytes]]) -> bytes:
    """Write calls as an input."""
    return b"".join(
        bytes([method % 256]) + len(message).to_bytes(4, "little") + message
        for method, message in calls
    )


def records(data: bytes) -> list[tuple[int, bytes]]:
    """Read the calls of an input; the last one may be cut short."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + 5 <= len(data) and len(found) < CALLS_MAX:
        size = int.from_bytes(data[at + 1 : at + 5], "little")
        found.append((data[at], data[at + 5 : at + 5 + size]))
        at += 5 + size
    return found


class Led:
    """A header of known shape behind its length in 8 bytes, and something after it."""

    def __init__(self, header: Shape) -> None:
        self._header = header
        self._bytes = Bytes()

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """Change the header and keep its length right, or change anything."""
        size = int.from_bytes(data[:8], "little")
        if rng.random() < 0.3 or not 8 <= 8 + size <= len(data):
            return self._bytes.mutate(data, rng, others)
        header = self._header.mutate(data[8 : 8 + size], rng, ())
        return len(header).to_bytes(8, "little") + header + data[8 + size :]


class Either:
    """One of two ways to change an input."""

    def __init__(
        self, change: Callable[[bytes, Random], bytes], words: Sequence[bytes] = ()
    ) -> None:
        self._change = change
        self._bytes = Bytes(words)

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """The given change, or one of bytes."""
        if rng.random() < 0.7:
            return self._change(data, rng)
        return self._bytes.mutate(data, rng, others)
