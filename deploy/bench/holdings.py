"""What a cluster says that it holds: read from its status document."""

from __future__ import annotations

from typing import Any


def held(status: dict[str, Any]) -> list[str]:
    """What is still held, in words; empty if every block is free and nobody knows a request.

    Of a worker that is gone nothing is: its successor begins with a pool of its own.
    """
    found = []
    for name, worker in sorted(status["workers"].items()):
        if worker["state"] == "gone":
            continue
        if worker["blocks_free"] != worker["blocks_total"] or worker["residents"]:
            used = worker["blocks_total"] - worker["blocks_free"]
            found.append(f"{name}: {used} blocks, {worker['residents']} requests")
    for name, store in sorted(status["stores"].items()):
        if store["used_bytes"] or store["tickets"]:
            found.append(f"{name}: {store['used_bytes']} bytes, {store['tickets']} tickets")
    if status["sequences"]:
        found.append(f"controller: {len(status['sequences'])} sequences")
    gateway = status["gateway"]
    return found + [
        f"{gateway['name']}: {key} = {gateway[key]}"
        for key in ("live_requests", "streams")
        if gateway[key]
    ]


def counts(status: dict[str, Any]) -> dict[str, float]:
    """The numbers of what is held and known, by owner."""
    workers, stores = status["workers"].values(), status["stores"].values()
    return {
        "blocks_used": sum(w["blocks_total"] - w["blocks_free"] for w in workers),
        "store_bytes": sum(s["used_bytes"] for s in stores),
        "store_tickets": sum(s["tickets"] for s in stores),
        "controller_sequences": len(status["sequences"]),
        "gateway_live": status["gateway"]["live_requests"],
        "gateway_kept": status["gateway"]["kept_requests"],
        "gateway_streams": status["gateway"]["streams"],
    }


def lives(status: dict[str, Any]) -> dict[str, int]:
    """Which life of each process the status shows."""
    found = {"controller": int(status["epoch"])}
    for kind in ("workers", "stores", "gateways"):
        found |= {name: int(peer["incarnation"]) for name, peer in status[kind].items()}
    return found
