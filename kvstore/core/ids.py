"""Names of things that cross processes, and the one order that decides who may speak.

All of them are tuples: they hash and compare in C, and they sort by their fields, so "the higher
run" and "ties by id" mean the same in every process.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
StoreId = NewType("StoreId", str)
GatewayId = NewType("GatewayId", str)
NodeId = NewType("NodeId", str)
StreamId = NewType("StreamId", int)
"""One client stream at one gateway; minted by the gateway's shell, never reused by it."""
Incarnation = NewType("Incarnation", int)
"""One life of a process. A restarted process has a higher one."""


class Seq(NamedTuple):
    """One choice of one request: the unit that is placed, swapped and recovered."""

    request: RequestId
    choice: int


class Run(NamedTuple):
    """A number minted by a controller: (its epoch, its counter). Of two, the higher one speaks.

    Placements (runs) and orders are numbered from the same counter, so any two are ordered.
    """

    epoch: int
    counter: int


class Ticket(NamedTuple):
    """A swapped payload's key: the sequence, the run that wrote it, and the order that asked.

    No two swaps share a ticket, within or across controller epochs.
    """

    seq: Seq
    run: Run
    order: Run


class WorkerRef(NamedTuple):
    """One life of one worker: the writer that a reservation belongs to."""

    worker: WorkerId
    incarnation: Incarnation
