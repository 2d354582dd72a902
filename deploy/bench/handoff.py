"""`deepinfer bench handoff`: how fast a payload of KV passes from its writer to its reader.

A hand-off is a put and a get, one after the other, and its rate the payload's bytes by the seconds
of both. Our store's two paths are measured beside a plain copy, Ray's object store and Redis: the
same payloads in one run, the peers taking turns round by round, and what arrived is compared with
what was sent every time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from deepinfer.deploy.bench.handoff_peers import (
    REDIS_VALUE_BYTES_MAX,
    MemcpyPeer,
    Payload,
    Peer,
    RayPeer,
    find_redis,
    running_ray,
    running_redis,
    running_store,
)
from deepinfer.deploy.bench.plots import axes_in_a_row, check_plots, write_plot
from deepinfer.deploy.bench.results import write_result
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.manifest import GROUP_BYTES

LAYOUT: Final = KvLayout(
    dtype=resolve_kv_dtype("fp16"), layers=30, kv_heads=3, head_dim=64, block_size=16
)
"""The demo model's (SmolLM2-135M): 360 KiB a block of 16 tokens."""
SIZES_MB: Final = (0.737, 8.0, 64.0, 256.0)
"""The first is 720 KiB, what `bench offload` swaps."""
GRPC_GB_PER_S_REQUIRED: Final = 0.5
MEMFD_TIMES_REQUIRED: Final = 5.0
"""Of what is required of gRPC, and of what it was measured to be: a gRPC path that becomes faster
makes the second harder, and a plain memcpy is the end of it."""
REQUIRED_FROM_BYTES: Final = 8_000_000
"""Below, a hand-off is messages rather than bytes."""
HASH_PASSES: Final = {"grpc": 4, "memfd": 3}
"""Writer, store on arrival, store on departure (gRPC only), reader."""
NAMES: Final = {
    "memcpy": "plain memcpy: into a buffer of the same process and out again",
    "memfd": "our store, same-node path: shared memory, hashed by writer, store and reader",
    "grpc": "our store over gRPC on loopback: chunks, hashed at each end of each transfer",
    "ray": "ray.put, ray.get and a copy out of the object store; nothing is hashed",
    "redis": "SET, GET over loopback TCP and a copy out of the reply; nothing is hashed",
}


@dataclass(slots=True)
class Timings:
    """Seconds of one peer's rounds with one payload."""

    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)

    @property
    def both_s(self) -> list[float]:
        """Put and get of each round."""
        return [put + get for put, get in zip(self.put_s, self.get_s, strict=True)]


def run_handoff(
    *,
    sizes_mb: tuple[float, ...],
    rounds: int,
    redis_server: Path | None,
    output: Path,
    console: Console,
) -> dict[str, Any]:
    """Measure every size (in 10^6 bytes); write ``handoff.json`` and ``.png``.

    Returns:
        what the JSON holds, its provenance left out.

    Raises:
        ConfigError: ``redis_server`` is no program or does not start; no matplotlib.
    """
    check_plots()
    redis = find_redis(redis_server)
    blocks = sorted({max(1, round(mb * 1e6 / LAYOUT.block_bytes)) for mb in sizes_mb})
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        auto_refresh=False,  # a thread that draws would draw in the middle of what is timed
    ) as progress:
        task = progress.add_task("starting Redis, Ray, store", total=len(blocks) * (rounds + 1))
        progress.refresh()

        def advance(doing: str) -> None:
            progress.update(task, description=doing, advance=1, refresh=True)

        figures = asyncio.run(_measure(blocks, rounds, redis, advance))
    sizes = " ".join(f"--mb {mb:g}" for mb in sizes_mb)
    named = "" if redis_server is None else f" --redis-server {redis_server}"
    command = f"deepinfer bench handoff {sizes} --rounds {rounds}{named}"
    write_result(output / "handoff.json", command, figures)
    plot(figures, output / "handoff.png")
    console.print(_table(figures))
    for line in _verdicts(figures["required"]):
        console.print(line, highlight=False)
    return figures


async def _measure(
    sizes: list[int], rounds: int, redis: Path | str, advance: Callable[[str], None]
) -> dict[str, Any]:
    bytes_max = sizes[-1] * LAYOUT.block_bytes
    async with AsyncExitStack() as stack:
        # Those that fork come first: gRPC does not like it once it runs.
        others: dict[str, Peer] = {}
        skipped, versions = {}, {}
        if isinstance(redis, str):
            skipped["redis"] = redis
        else:
            peer = await stack.enter_async_context(running_redis(redis))
            others["redis"], versions["redis_version"] = peer, peer.version()
            if bytes_max > REDIS_VALUE_BYTES_MAX:
                skipped["redis"] = f"above {REDIS_VALUE_BYTES_MAX:,} bytes: its values are shorter"
        ray = await stack.enter_async_context(running_ray(bytes_max))
        others["ray"] = ray
        grpc, memfd = await stack.enter_async_context(running_store(LAYOUT, 2 * bytes_max))
        peers: dict[str, Peer] = {"memcpy": MemcpyPeer(), "memfd": memfd, "grpc": grpc, **others}
        results = []
        for blocks in sizes:
            payload = Payload.make(LAYOUT, blocks)
            able = {
                name: peer
                for name, peer in peers.items()
                if name != "redis" or payload.source.nbytes <= REDIS_VALUE_BYTES_MAX
            }
            results.append(await _measure_size(payload, able, ray, rounds, advance))
    return {
        "rate": "payload_bytes / (put + get); medians over rounds in which the peers take turns",
        "peers": NAMES,
        "skipped": skipped,
        **versions,
        "block_bytes": LAYOUT.block_bytes,
        "rounds": rounds,
        "results": results,
        "required": required(results),
    }


async def _measure_size(
    payload: Payload,
    peers: Mapping[str, Peer],
    ray: RayPeer,
    rounds: int,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    timings = {name: Timings() for name in peers}
    hashing_s: list[float] = []
    shown = f"{payload.source.nbytes / 1e6:.3g} MB"
    for number in range(rounds + 1):
        advance(shown)
        if number == 1:  # the round before has grown every memory and opened every connection
            timings = {name: Timings() for name in peers}
            ray.views_s.clear()
            hashing_s.clear()
        hashing_s.append(_hash_s(payload))
        for name, peer in peers.items():
            await hand_over(payload, name, peer, timings[name])
    return summary(payload.source.nbytes, payload.blocks, timings, hashing_s, ray.views_s)


async def hand_over(payload: Payload, name: str, peer: Peer, timings: Timings) -> None:
    """One round of one peer. Raises RuntimeError when other bytes come back than went in."""
    payload.target.fill(0)
    await peer.ready(payload)
    begun = time.perf_counter()
    await peer.put(payload)
    put = time.perf_counter()
    await peer.get(payload)
    got = time.perf_counter()
    timings.put_s.append(put - begun)
    timings.get_s.append(got - put)
    if not np.array_equal(payload.target, payload.source):
        raise RuntimeError(f"{name}: what arrived is not what was sent")
    await peer.free()


def _hash_s(payload: Payload) -> float:
    """Seconds of one hash over the payload, group by group as a manifest has them."""
    view = payload.source.data
    begun = time.perf_counter()
    for begin in range(0, len(view), GROUP_BYTES):
        xxhash.xxh3_64_intdigest(view[begin : begin + GROUP_BYTES])
    return time.perf_counter() - begun


def summary(
    payload_bytes: int,
    blocks: int,
    timings: Mapping[str, Timings],
    hashing_s: list[float],
    ray_views_s: list[float],
) -> dict[str, Any]:
    """The figures of one size."""
    hash_s = median(hashing_s)
    grpc_s = median(timings["grpc"].both_s)
    peers: dict[str, Any] = {}
    for name, timed in timings.items():
        both_s = median(timed.both_s)
        peers[name] = {
            "gb_per_s": _figure(payload_bytes / both_s / 1e9),
            "gb_per_s_slowest": _figure(payload_bytes / max(timed.both_s) / 1e9),
            "gb_per_s_fastest": _figure(payload_bytes / min(timed.both_s) / 1e9),
            "times_grpc": _figure(grpc_s / both_s),
            "put_ms": _figure(median(timed.put_s) * 1e3),
            "get_ms": _figure(median(timed.get_s) * 1e3),
        }
        if name in HASH_PASSES:
            peers[name]["hash_passes"] = HASH_PASSES[name]
            peers[name]["hash_share"] = _figure(HASH_PASSES[name] * hash_s / both_s)
    if ray_views_s:
        peers["ray"]["get_without_the_copy_ms"] = _figure(median(ray_views_s) * 1e3)
    return {
        "payload_bytes": payload_bytes,
        "blocks": blocks,
        "hash_ms": _figure(hash_s * 1e3),
        "peers": peers,
    }


def required(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, for every size from ``REQUIRED_FROM_BYTES``."""
    found = []
    for result in results:
        if result["payload_bytes"] < REQUIRED_FROM_BYTES:
            continue
        grpc, memfd = result["peers"]["grpc"], result["peers"]["memfd"]
        for what, measured, least in (
            ("grpc gb_per_s", grpc["gb_per_s"], GRPC_GB_PER_S_REQUIRED),
            ("memfd gb_per_s", memfd["gb_per_s"], MEMFD_TIMES_REQUIRED * GRPC_GB_PER_S_REQUIRED),
            ("memfd times_grpc", memfd["times_grpc"], MEMFD_TIMES_REQUIRED),
        ):
            found.append(
                {
                    "payload_bytes": result["payload_bytes"],
                    "what": what,
                    "measured": measured,
                    "at_least": least,
                    "holds": measured >= least,
                }
            )
    return found


def _figure(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title="hand-off: GB/s of put and get together; times in ms")
    for name in ("payload", "peer", "GB/s", "x gRPC", "put", "get", "hashing"):
        left = name in ("payload", "peer")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for result in figures["results"]:
        shown = f"{result['payload_bytes'] / 1e6:.3g} MB"
        fastest = sorted(result["peers"].items(), key=lambda item: -item[1]["gb_per_s"])
        for name, peer in fastest:
            table.add_row(
                shown,
                name,
                f"{peer['gb_per_s']:.2f}",
                f"{peer['times_grpc']:.1f}",
                f"{peer['put_ms']:.2f}",
                f"{peer['get_ms']:.2f}",
                f"{peer['hash_share']:.0%}" if "hash_share" in peer else "none",
            )
            shown = ""
        table.add_section()
    return table


def _verdicts(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['payload_bytes'] / 1e6:.3g} MB: {each['what']} {each['measured']:.2f} "
        f"(required {each['at_least']:g}): {'holds' if each['holds'] else 'does not hold'}"
        for each in found
    ]


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the rates over the payload's size, and put and get of the largest one."""
    results = figures["results"]
    names = [name for name in NAMES if any(name in result["peers"] for result in results)]
    figure, (rates, parts) = axes_in_a_row(2, (11, 4))
    for name in names:
        points = [
            (result["payload_bytes"] / 1e6, result["peers"][name]["gb_per_s"])
            for result in results
            if name in result["peers"]
        ]
        rates.plot(*zip(*points, strict=True), marker="o", label=name)
    rates.axhline(GRPC_GB_PER_S_REQUIRED, color="grey", lw=0.8, ls="--")
    rates.annotate(
        f"required of gRPC: {GRPC_GB_PER_S_REQUIRED:g}",
        (results[-1]["payload_bytes"] / 1e6, GRPC_GB_PER_S_REQUIRED),
        fontsize=8,
        ha="right",
        va="top",
    )
    rates.set_xscale("log")
    rates.set_yscale("log")
    rates.set_xlabel("payload, MB")
    rates.set_ylabel("GB/s, put and get together")
    rates.set_title("hand-off rate")
    rates.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.85))
    largest = results[-1]
    shown = [name for name in names if name in largest["peers"]]
    puts = [largest["peers"][name]["put_ms"] for name in shown]
    gets = [largest["peers"][name]["get_ms"] for name in shown]
    parts.bar(shown, puts, label="put")
    parts.bar(shown, gets, bottom=puts, label="get")
    parts.set_ylabel("ms")
    parts.set_title(f"{largest['payload_bytes'] / 1e6:.3g} MB")
    parts.legend(fontsize=8)
    for axis in (rates, parts):
        axis.grid(alpha=0.3)
    write_plot(figure, path)
