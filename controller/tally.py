"""What workers, stores and gateways have counted, by the names it is exported under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepinfer.controller.catalogue import family_of
from deepinfer.controller.core.events import Peer, PeerKind


class Tally:
    """The newest samples of every peer, and the sums of the lives before.

    A sample's name is ``name`` or ``name{label="value"}``. A report names those that have changed:
    others are as they were.
    """

    def __init__(self) -> None:
        self._peers: dict[tuple[PeerKind, str], tuple[Peer, dict[str, float]]] = {}
        self._retired: dict[str, float] = {}

    def take(self, peer: Peer, samples: Mapping[str, float]) -> bool:
        """Take in what a report brings; return whether it is of the peer's newest life."""
        key = (peer.kind, peer.id)
        before = self._peers.get(key)
        if before is not None and before[0].incarnation == peer.incarnation:
            before[1].update(samples)
            return True
        if before is not None:
            if before[0].incarnation > peer.incarnation:
                return False
            _add(self._retired, before[1])
        self._peers[key] = (peer, dict(samples))
        return True

    def peers(self) -> Iterator[tuple[Peer, Mapping[str, float]]]:
        """Each peer's newest life, whether or not it has ended, and its samples."""
        yield from self._peers.values()

    def totals(self) -> dict[str, float]:
        """Totals over all peers and lives that this controller has heard of; without buckets."""
        found = dict(self._retired)
        for _, samples in self._peers.values():
            _add(found, samples)
        return found


def _add(sums: dict[str, float], samples: Mapping[str, float]) -> None:
    for sample, value in samples.items():
        name = sample.partition("{")[0]
        family = family_of(name)
        if name.endswith("_bucket") or (family is not None and family.kind == "gauge"):
            continue
        sums[sample] = sums.get(sample, 0.0) + value
