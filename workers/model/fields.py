"""Fields of the JSON files of a checkpoint, read with type checks that name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepinfer.workers.model.config import UnsupportedModelError


class Fields:
    """Fields of a JSON object, with type checks that name them."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self._where = where

    def integer(self, name: str) -> int:
        value = self._present(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnsupportedModelError(
                f"{self._where}{name} must be a whole number, got {shown(value)}"
            )
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        value = self._present(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                if math.isfinite(number := float(value)):
                    return number
            except OverflowError:
                pass  # an integer beyond every float is as wrong as infinity
        raise UnsupportedModelError(
            f"{self._where}{name} must be a finite number, got {shown(value)}"
        )

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def positive(self, name: str) -> float:
        if (value := self.number(name)) <= 0:
            raise UnsupportedModelError(
                f"{self._where}{name} must be a positive number, got {shown(value)}"
            )
        return value

    def positives(self, name: str, count: int) -> tuple[float, ...]:
        value = self._present(name)
        if not isinstance(value, list) or len(value) != count:
            got = f"{len(value)} values" if isinstance(value, list) else shown(value)
            raise UnsupportedModelError(
                f"{self._where}{name} must be a list of {count} numbers, got {got}"
            )
        items = Fields({f"{name}[{at}]": item for at, item in enumerate(value)}, self._where)
        return tuple(items.positive(item) for item in items.values)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModelError(
                f"{self._where}{name} must be true or false, got {shown(value)}"
            )
        return bool(value)

    def one_of(self, name: str, *allowed: object, default: object = None) -> Any:
        """A value that must be one of ``allowed``; ``default`` where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            value = default
        if not any(type(value) is type(right) and value == right for right in allowed):
            words = " or ".join("null" if right is None else repr(right) for right in allowed)
            got = f"got {shown(value)}" if name in self.values else "it is missing"
            raise UnsupportedModelError(f"{self._where}{name} must be {words}, {got}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UnsupportedModelError(
                f"{self._where}{name} must be a list of strings, got {shown(value)}"
            )
        return tuple(value)

    def naturals(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0 up; empty where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            raise UnsupportedModelError(
                f"{self._where}{name} must be a list of whole numbers from 0 up, got {shown(value)}"
            )
        return tuple(value)

    def object(self, name: str) -> Mapping[str, Any]:
        """An object; empty where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"{self._where}{name} must be an object, got {shown(value)}"
            )
        return value

    def _present(self, name: str) -> Any:
        if name not in self.values:
            raise UnsupportedModelError(f"{self._where}{name} is missing")
        return self.values[name]


def shown(value: object) -> str:
    """``value`` for a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
