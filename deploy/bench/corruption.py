"""`deepinfer bench corruption`: damaged, foreign and stale payloads, and whether any is ever used.

A worker's swapper on a real store, over shared memory and over gRPC, with a corruptor in between
(``corruptor``). A payload counts as refused if it is never committed, or if its fetch ends with
anything but OK: then the worker computes the KV anew. Between them payloads that nobody touched
must arrive, bit for bit. Afterwards the same in clusters: what was swapped out is damaged in the
store's memory from outside, and the answer must be the right one all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from deepinfer.deploy.bench import corruptor as by
from deepinfer.deploy.bench import damages
from deepinfer.deploy.bench.corruption_cluster import run_clusters
from deepinfer.deploy.bench.corruptor import Armed, Bench, Placed
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.generate import get_model
from deepinfer.kvstore.client import Path as StorePath
from deepinfer.kvstore.core.ids import Run, Ticket
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.swap import KvIdentity

SHORT: Final = KvLayout(resolve_kv_dtype("fp8"), 2, 2, 8, 4)
SHORT_BLOCKS: Final = 4
LONG: Final = KvLayout(resolve_kv_dtype("fp8"), 8, 4, 128, 16)
"""128 KiB a block: a payload of them is several hash groups, and several messages over gRPC."""
LONG_BLOCKS: Final = 20
LONG_EVERY: Final = 200
"""One long payload for so many trials."""
CONTROL_EVERY: Final = 20
"""And one that nobody touches."""
TRIALS_A_TASK: Final = 2000
USED_MAX: Final = 20
"""So many that were used are kept in words; all are counted."""
PATHS: Final[tuple[StorePath, StorePath]] = ("memfd", "grpc")


class Kind(NamedTuple):
    """A way to damage a payload."""

    name: str
    arm: Callable[[World, Random], Armed]
    paths: tuple[StorePath, ...] = PATHS
    put: bool = False
    """On its way into the store."""


@dataclass(slots=True)
class Tally:
    """What trials came to."""

    refused: Counter[str] = field(default_factory=Counter)
    """By kind and path."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why, as workers count it (``workers.core.events.REFUSALS``); puts by their commit."""
    controls: int = 0
    """Payloads that nobody touched, and that arrived as they were written."""
    untouched: int = 0
    """Trials whose damage changed nothing, which do not count."""
    used: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Controls that did not arrive."""
    payload_bytes: int = 0

    def add(self, other: Tally) -> None:
        """Take another's trials."""
        self.refused += other.refused
        self.reasons += other.reasons
        self.controls += other.controls
        self.untouched += other.untouched
        self.used += other.used
        self.lost += other.lost
        self.payload_bytes += other.payload_bytes


@dataclass(slots=True)
class World:
    """A bench and the payloads that lie in its store."""

    bench: Bench
    target: Placed
    other: Placed
    """Another request's."""
    older: Placed
    """The same request's, of the run before."""
    foreign: dict[str, Placed]
    """Under the target's run, but of another model, layout, dtype, or with K scaled otherwise."""

    @classmethod
    async def make(cls, bench: Bench) -> World:
        """Put them all."""
        older = await bench.place(bench.ticket())
        other = await bench.place(bench.ticket())
        later = bench.ticket()
        target = await bench.place(Ticket(older.ticket.seq, later.run, later.order))
        layout = bench.layout
        bits = (layout.kv_heads // 2, 2 * layout.layers)
        pools = {
            "model": (KvIdentity(model="another model"), layout),
            "key_scales": (KvIdentity(model=by.MODEL, key_scales="0f0f"), layout),
            "layout": (
                KvIdentity(model=by.MODEL),
                KvLayout(layout.dtype, bits[1], bits[0], layout.head_dim, layout.block_size),
            ),
            "dtype": (
                KvIdentity(model=by.MODEL),
                KvLayout(
                    resolve_kv_dtype("fp8_e5m2"),
                    layout.layers,
                    layout.kv_heads,
                    layout.head_dim,
                    layout.block_size,
                ),
            ),
        }
        foreign = {}
        for name, (identity, its_layout) in pools.items():
            pool = PagedPool(its_layout, 2 * bench.blocks)
            swapper = by.swapper_of(bench, pool, identity)
            foreign[name] = await bench.place(bench.ticket(target.ticket.run), swapper=swapper)
            await swapper.close()
        return cls(bench, target, other, older, foreign)

    async def trial(self, kind: Kind, path: StorePath, tally: Tally) -> None:
        """One payload, damaged."""
        bench = self.bench
        armed = kind.arm(self, bench.chance)
        ticket = bench.ticket() if kind.put else self.target.ticket
        if kind.put:
            bench.fill()
        bench.runtime.armed = armed
        status = StoreStatus.OK
        if kind.put:
            put, status = await bench.put(path, ticket)
            bench.runtime.armed = None
            if put.ok != (status is StoreStatus.OK):
                tally.used.append(f"{kind.name} over {path}: put {put}, commit {status}")
        done = await bench.fetch(path, ticket)
        bench.runtime.armed = None
        touched = armed.done
        if armed.at_rest is not None:
            touched = bench.runtime.bytes_of(ticket) != self.target.pages
            bench.runtime.restore(ticket, self.target.pages)
        if kind.put:
            bench.release(ticket)
        if not touched:
            tally.untouched += 1
        elif done.status is StoreStatus.OK:
            tally.used.append(f"{kind.name} over {path}")
        else:
            tally.refused[f"{kind.name}, {path}"] += 1
            tally.payload_bytes += bench.blocks * bench.layout.block_bytes
            reason = done.refused or done.status.value
            tally.reasons[f"put: {status.value}" if kind.put else reason] += 1

    async def control(self, path: StorePath, tally: Tally) -> None:
        """One payload that nobody touches."""
        done = await self.bench.fetch(path, self.target.ticket)
        if done.status is StoreStatus.OK and self.bench.arrived(self.target, done):
            tally.controls += 1
        else:
            tally.lost.append(f"{path}: {done.status.value} {done.detail}")


def _at_rest(damage: damages.Damage) -> Callable[[World, Random], Armed]:
    return lambda _, chance: Armed(chance, at_rest=damage)


def _on_write(damage: damages.Damage) -> Callable[[World, Random], Armed]:
    return lambda _, chance: Armed(chance, on_write=damage)


def _given(misgive: damages.Misgive) -> Callable[[World, Random], Armed]:
    return lambda _, chance: Armed(chance, on_grant=misgive)


def _whole(which: Callable[[World], Placed]) -> Callable[[World, Random], Armed]:
    def arm(world: World, chance: Random) -> Armed:
        ticket = which(world).ticket
        give = damages.other_payload(lambda: world.bench.runtime.grant_of(ticket))
        return Armed(chance, on_grant=give)

    return arm


def _pages(which: Callable[[World], Placed]) -> Callable[[World, Random], Armed]:
    def arm(world: World, chance: Random) -> Armed:
        ticket = which(world).ticket
        give = damages.other_pages(lambda: world.bench.runtime.grant_of(ticket))
        return Armed(chance, on_grant=give)

    return arm


def _bytes_of(which: Callable[[World], Placed], *, put: bool) -> Callable[[World, Random], Armed]:
    def arm(world: World, chance: Random) -> Armed:
        damage = damages.replaced_by(lambda: which(world).pages)
        return Armed(chance, on_write=damage) if put else Armed(chance, at_rest=damage)

    return arm


def _read(message: damages.Message) -> Callable[[World, Random], Armed]:
    return lambda _, chance: Armed(chance, on_message=message)


def _write(message: damages.Message) -> Callable[[World, Random], Armed]:
    return lambda _, chance: Armed(chance, on_request=message)


def _target(world: World) -> Placed:
    return world.target


def _other(world: World) -> Placed:
    return world.other


def _older(world: World) -> Placed:
    return world.older


_MEMFD: Final[tuple[StorePath, ...]] = ("memfd",)
_GRPC: Final[tuple[StorePath, ...]] = ("grpc",)
KINDS: Final = (
    Kind("on its way in: a bit", _on_write(damages.flip_bit), _MEMFD, put=True),
    Kind("on its way in: bits", _on_write(damages.flip_bits), _MEMFD, put=True),
    Kind("on its way in: cut", _on_write(damages.cut), _MEMFD, put=True),
    Kind("on its way in: blocks exchanged", _on_write(damages.exchange_blocks), _MEMFD, put=True),
    Kind("on its way in: another's bytes", _bytes_of(_other, put=True), _MEMFD, put=True),
    Kind("on its way in: a bit of a message", _write(damages.flip_chunk), _GRPC, put=True),
    Kind("on its way in: a message cut", _write(damages.cut_chunk), _GRPC, put=True),
    Kind("on its way in: a message lost", _write(damages.lose_chunk), _GRPC, put=True),
    Kind("on its way in: a bit of the manifest", _write(damages.flip_put_header), _GRPC, put=True),
    Kind("in the store: a bit", _at_rest(damages.flip_bit)),
    Kind("in the store: bits", _at_rest(damages.flip_bits)),
    Kind("in the store: cut", _at_rest(damages.cut)),
    Kind("in the store: blocks exchanged", _at_rest(damages.exchange_blocks)),
    Kind("in the store: a block shifted", _at_rest(damages.shift)),
    Kind("in the store: another's bytes", _bytes_of(_other, put=False)),
    Kind("in the store: bytes of the run before", _bytes_of(_older, put=False)),
    Kind("given: another's pages", _pages(_other)),
    Kind("given: pages of the run before", _pages(_older)),
    Kind("given: too few pages", _given(damages.fewer_pages)),
    Kind("given: another's payload", _whole(_other)),
    Kind("given: the payload of the run before", _whole(_older)),
    Kind("given: a bit of the manifest", _given(damages.flip_manifest)),
    Kind("given: another run's manifest", _given(damages.other_field("run", Run(7, 7)))),
    Kind("given: an unknown precision", _given(damages.other_field("precision", "fp4"))),
    Kind("of another model", _whole(lambda world: world.foreign["model"])),
    Kind("of another layout", _whole(lambda world: world.foreign["layout"])),
    Kind("of another dtype", _whole(lambda world: world.foreign["dtype"])),
    Kind("with K scaled otherwise", _whole(lambda world: world.foreign["key_scales"])),
    Kind("on its way out: a bit of a message", _read(damages.flip_chunk), _GRPC),
    Kind("on its way out: a message cut", _read(damages.cut_chunk), _GRPC),
    Kind("on its way out: a message lost", _read(damages.lose_chunk), _GRPC),
    Kind("on its way out: bytes twice", _read(damages.double_chunk), _GRPC),
    Kind(
        "on its way out: messages exchanged",
        lambda _, chance: Armed(chance, on_message=damages.swap_chunks()),
        _GRPC,
    ),
    Kind("on its way out: a bit of the manifest", _read(damages.flip_header), _GRPC),
)


async def _trials(seed: int, count: int) -> Tally:
    tally = Tally()
    chance = Random(seed)
    # The last is always in between: its payload is the longest there is.
    longs = count // LONG_EVERY
    for layout, blocks, trials in (
        (SHORT, SHORT_BLOCKS, count - longs),
        (LONG, LONG_BLOCKS, longs),
    ):
        if not trials:
            continue
        async with by.running(layout, blocks, 12, chance.randrange(1 << 30)) as bench:
            world = await World.make(bench)
            done = 0
            while done < trials:
                kind = chance.choice(KINDS)
                path = chance.choice(kind.paths)
                before = tally.untouched
                await world.trial(kind, path, tally)
                done += tally.untouched == before
                if done % CONTROL_EVERY == 0:
                    await world.control(path, tally)
    return tally


def run_trials(seed: int, count: int) -> Tally:
    """So many damaged payloads, in this process."""
    # Each refusal is said by both sides, as it should be: here it would be all that they do.
    logging.getLogger("deepinfer").setLevel(logging.CRITICAL)
    return asyncio.run(_trials(seed, count))


def run_corruption(
    *,
    payloads: int,
    processes: int,
    seed: int,
    model: str,
    rounds: int,
    budget_s: float | None,
    output: Path,
    console: Console,
) -> bool:
    """Damage ``payloads``, and those of ``rounds`` swaps in a cluster that serves ``model``.

    Writes ``corruption.json``; True if none was used, and every control arrived. No task of some
    hundred payloads begins after ``budget_s``.

    Raises:
        LaunchError, ModelUnavailableError: the cluster does not come up.
    """
    began = time.monotonic()
    tally, clusters = Tally(), None
    sizes = [TRIALS_A_TASK] * (payloads // TRIALS_A_TASK)
    if payloads % TRIALS_A_TASK:
        sizes.append(payloads % TRIALS_A_TASK)
    seconds = 0.0
    with counted(console, payloads) as steps, contextlib.ExitStack() as stack:
        steps.tell(f"{payloads} payloads")
        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=spawn))
        left = list(enumerate(sizes))
        running: dict[Future[Tally], int] = {}
        while left or running:
            late = budget_s is not None and time.monotonic() - began > budget_s
            while left and len(running) < processes and not late:
                nth, size = left.pop(0)
                running[pool.submit(run_trials, seed * 1_000_000 + nth, size)] = size
            if not running:
                break
            ended = next(iter(running))
            tally.add(ended.result())
            steps.advance(running.pop(ended))
        seconds = time.monotonic() - began
    if rounds:
        clusters = run_clusters(get_model(model, console=console), rounds, console)
    figures = _figures(tally, seconds, clusters)
    budget = "" if budget_s is None else f" --budget {budget_s:g}"
    write_result(
        output / "corruption.json",
        f"deepinfer bench corruption --payloads {payloads} --processes {processes} --seed {seed} "
        f"--model {model} --rounds {rounds}{budget}",
        figures,
    )
    console.print(_table(figures))
    console.print(
        f"{figures['refused']:,} of {figures['payloads']:,} damaged payloads refused, "
        f"{figures['used']} used; {figures['controls']:,} untouched ones arrived, "
        f"{figures['controls_lost']} did not; {figures['payloads_per_second']:,.0f} a second",
        highlight=False,
    )
    if clusters is not None:
        console.print(
            f"in a cluster: {clusters['damaged']} swapped-out payloads damaged "
            f"({clusters['too_late']} too late), {clusters['recomputed']} computed anew, "
            f"{clusters['right']} of {clusters['answers']} answers right",
            highlight=False,
        )
    return bool(figures["as_it_should_be"])


def _figures(tally: Tally, seconds: float, clusters: dict[str, Any] | None) -> dict[str, Any]:
    refused, used = tally.refused.total(), len(tally.used)
    figures: dict[str, Any] = {
        "payloads": refused + used,
        "refused": refused,
        "used": used,
        "bound_95": 3 / refused if refused and not used else None,
        "controls": tally.controls,
        "controls_lost": len(tally.lost),
        "seconds": round(seconds, 1),
        "payloads_per_second": round((refused + used) / seconds, 1) if seconds else 0.0,
        "payload_bytes": tally.payload_bytes,
        "block_bytes": [SHORT.block_bytes, LONG.block_bytes],
        "blocks": [SHORT_BLOCKS, LONG_BLOCKS],
        "refused_by_kind": dict(sorted(tally.refused.items())),
        "refused_by_reason": dict(sorted(tally.reasons.items())),
        "first_used": tally.used[:USED_MAX],
        "first_controls_lost": tally.lost[:USED_MAX],
        "cluster": clusters,
    }
    good = refused > 0 and not used and not tally.lost and tally.controls > 0
    figures["as_it_should_be"] = good and (clusters is None or bool(clusters["as_it_should_be"]))
    return figures


def _table(figures: dict[str, Any]) -> Table:
    table = Table("what was damaged", "memfd", "grpc")
    found: dict[str, dict[str, int]] = {}
    for name, count in figures["refused_by_kind"].items():
        kind, _, path = name.rpartition(", ")
        found.setdefault(kind, {})[path] = count
    for kind in (each.name for each in KINDS):
        counts = found.get(kind, {})
        table.add_row(kind, *(f"{counts[path]:,}" if path in counts else "" for path in PATHS))
    return table
