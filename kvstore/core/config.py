"""What a store is allowed to hold and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, fields


class StoreConfigError(ValueError):
    """A store setting that cannot work: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"store.{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Bounds and patience of one store. Checked on construction; times are in milliseconds."""

    tickets_max: int = 4096
    """Tickets (reserved or committed) at once."""
    sealed_max: int = 4096
    """Tickets remembered as never to be committed, about 0.6 KB each; the oldest goes first."""
    writers_max: int = 4096
    """Workers whose latest departed life is remembered; the oldest is forgotten first."""
    reservation_ms: int = 30_000
    """A reservation without progress is dropped after this long."""
    dma_grace_ms: int = 1_000
    """Pages of a writer whose process is gone are used again only after this long: a device may
    still be writing into them."""
    report_interval_ms: int = 100
    """A report goes out at least this often, changes or none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int:
                raise StoreConfigError(field.name, value, "an integer")
        for name in ("tickets_max", "sealed_max", "writers_max"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise StoreConfigError(name, getattr(self, name), "between 1 and 1,000,000")
        for name in ("reservation_ms", "report_interval_ms"):
            if getattr(self, name) < 1:
                raise StoreConfigError(name, getattr(self, name), "1 or more")
        if self.dma_grace_ms < 0:
            raise StoreConfigError("dma_grace_ms", self.dma_grace_ms, "0 or more")
