"""A byte budget: what is used never exceeds what there is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """Counts payload bytes (keys, values and scales), reserved up front and given back."""

    bytes_max: int
    used: int = 0

    def fits(self, count: int) -> bool:
        """Whether ``count`` more bytes may be used."""
        return self.used + count <= self.bytes_max

    def take(self, count: int) -> None:
        """Use ``count`` bytes; the caller has asked ``fits``."""
        assert count >= 0, count
        assert self.fits(count), (count, self)
        self.used += count

    def give_back(self, count: int) -> None:
        """Stop using ``count`` bytes."""
        assert 0 <= count <= self.used, (count, self)
        self.used -= count

    def check(self) -> None:
        """Restate the invariant."""
        assert 0 <= self.used <= self.bytes_max, self
