"""The size of a KV pool, as ``max_cache`` says it."""

from __future__ import annotations

import re
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

from deepinfer.deploy.errors import ConfigError

AUTO_CPU_CACHE: Final = "512MiB"
"""What ``max_cache = auto`` is on a CPU: a card has a size, a host's memory is everybody's."""

_UNITS: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_SIZE: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*$")


class CacheSize(BaseModel):
    """The size of one worker's KV pool: either a number of blocks or a number of bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: int | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"512MiB"``, ``"1.5GiB"`` or ``"3 blocks"``.

        Raises:
            ValueError: neither form, or zero.
        """
        allowed = 'auto, a size such as "512MiB", or a number of blocks such as "3 blocks"'
        match = _SIZE.match(text)
        if match is None:
            raise ValueError(f"max_cache = {text!r}: must be {allowed}")
        number, unit = float(match[1]), match[2].lower()
        if number > 1 << 60:  # among them what a float takes for infinity
            raise ValueError(f"max_cache = {text[:40]!r}: must be at most 2**60 of anything")
        if unit in ("block", "blocks"):
            if number < 1 or number != int(number):
                raise ValueError(f"max_cache = {text!r}: must be a whole number of blocks from 1")
            return cls(blocks=int(number))
        if unit not in _UNITS:
            raise ValueError(f"max_cache = {text!r}: unit must be one of {', '.join(_UNITS)}")
        if (size := int(number * _UNITS[unit])) < 1:
            raise ValueError(f"max_cache = {text!r}: must be above 0")
        return cls(bytes=size)

    def blocks_of(self, block_bytes: int) -> int:
        """Blocks of ``block_bytes`` in the pool.

        Raises:
            ConfigError: not even one fits; says both numbers.
        """
        if self.blocks is not None:
            return self.blocks
        assert self.bytes is not None
        if self.bytes < block_bytes:
            raise ConfigError(
                f"max_cache = {self.bytes:,} bytes: must hold at least one KV block, which takes "
                f"{block_bytes:,} bytes for this model, dtype and block size"
            )
        return self.bytes // block_bytes
