"""Who can be killed, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from deepinfer.deploy.errors import ConfigError
from deepinfer.proto.failpoints import (
    CONTROLLER_PLACES,
    GATEWAY_PLACES,
    STORE_PLACES,
    WORKER_PLACES,
    Place,
)

Target: TypeAlias = Literal["worker", "store", "controller", "gateway", "node"]
TARGETS: tuple[Target, ...] = get_args(Target)
EVERY = "any"
"""The name for all points of a target, in turn."""
SWAPPING = tuple(place for place in WORKER_PLACES if place != "mid_return")
"""Where a worker comes that swaps; planes return only where weights are nested and shed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of process: which points it has, and how its actors are named."""

    places: tuple[Place, ...]
    prefix: str


KINDS: dict[Target, Kind] = {
    "worker": Kind(SWAPPING, "worker-"),
    "store": Kind(STORE_PLACES, "store-"),
    "controller": Kind(CONTROLLER_PLACES, "controller"),
    "gateway": Kind(GATEWAY_PLACES, "gateway-"),
    # Its worker parks, and everything on that machine dies with it.
    "node": Kind(SWAPPING, "worker-"),
}
OPENED: tuple[Place, ...] = ("mid_recovery", "mid_resume")
"""Places that a process comes to because another, or its last life, was killed just before."""


def points_of(target: Target, point: str) -> tuple[Place, ...]:
    """The places that a campaign takes in turn.

    Raises:
        ConfigError: the target has no such point.
    """
    places = KINDS[target].places
    if point == EVERY:
        return places
    for place in places:
        if place == point:
            return (place,)
    raise ConfigError(f"point = {point!r}: of a {target} must be any, {', '.join(places)}")
