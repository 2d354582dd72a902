"""What workers compute on: decided once, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.deploy import interrupts
from deepinfer.deploy.config import ClusterConfig, Device
from deepinfer.deploy.errors import LaunchError

GPU = "GPU"
"""The resource by which Ray counts cards."""

SHARES = 10_000
"""Ray counts parts of a card in ten thousandths."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """How many workers of a node share one card."""

    workers: int

    @property
    def of_card(self) -> float:
        """Each one's part, as Ray counts it: never more than fit."""
        return SHARES // self.workers / SHARES


def share_cards(workers: int, cards: int) -> GpuShare:
    """Spread ``workers`` of a node over its ``cards``."""
    return GpuShare(-(-workers // cards))


def local_device(config: ClusterConfig, say: Callable[[str], None]) -> tuple[Device, int]:
    """What this machine's workers compute on, and how many cards there are for it.

    ``say`` is told why a card that is there cannot serve, if ``device`` is auto.

    Raises:
        LaunchError: ``device`` is cuda, and none can; says what to install or use instead.
    """
    if config.device == "cpu":
        return "cpu", 0
    with interrupts.held():
        from deepinfer.workers.gpu.card import GpuUnavailableError, count_cards, find_card
    cards = count_cards()
    if config.device == "auto" and not cards:
        return "cpu", 0
    try:
        for index in range(max(1, cards)):
            find_card(index)
    except GpuUnavailableError as error:
        if config.device == "cuda":
            raise LaunchError(f"device = 'cuda': {error}") from error
        say(f"workers compute on the CPU: {error}")
        return "cpu", 0
    return "cuda", cards


def ray_device(config: ClusterConfig, records: Sequence[Mapping[str, Any]]) -> Device:
    """What workers compute on in a Ray that runs already, by its ``ray.nodes()``.

    Each worker looks at its own card when it starts: this process may be on a node without one.
    """
    if config.device != "auto":
        return config.device
    return "cuda" if any(cards_of(record) for record in records if record["Alive"]) else "cpu"


def cards_of(record: Mapping[str, Any]) -> int:
    """Whole cards of one of Ray's nodes."""
    return int(record["Resources"].get(GPU, 0))
