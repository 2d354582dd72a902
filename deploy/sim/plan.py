"""What one seed makes of the world: its processes, its clients, its weather and its faults.

Swarm style: each seed draws its own subset of faults and its own weights, so that rare ones are
not always drowned by frequent ones, and its own corner of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from deepinfer.deploy.sim.model import EOS, VOCABULARY, first_tokens

FINISH_MS = 60_000
"""How long after the last fault everything may take to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: its pool and its pace."""

    name: str
    node: str
    blocks: int
    prefill_chunk_tokens: int
    max_batch_tokens: int
    max_batch_seqs: int
    step_ms: int
    copy_ms: int
    """Longest time that the copy of one block takes, in either direction."""
    tail_blocks: int = 0
    """Blocks that it gains while the lower planes of its nested weights are away."""
    return_ms: int = 0
    """Least time of their copy back; twice that is the longest."""
    return_fails: float = 0.0
    """Share of copies back that fail, while faults last."""
    start_shed: bool = False
    """It never has lower planes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """One store: its budget, in blocks of payload."""

    name: str
    node: str
    budget_blocks: int
    tickets_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """One client and what it will do."""

    name: str
    arrival_ms: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    choices: int
    seed: int
    stop_ids: tuple[int, ...]
    stop_pair: tuple[int, int] | None
    min_tokens: int
    deadline_after_ms: int | None
    read_ms: int
    """How long it takes over each message."""
    abort_after_ms: int | None
    vanish_after_ms: int | None
    """When its process ends without a word."""
    cut_after_ms: tuple[int, ...]
    """When its stream breaks; it resumes, at the same or another gateway."""
    priority: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeatherPlan:
    """Delays and losses of messages while faults last."""

    jitter_ms: int
    late_share: float
    """Share of messages that are late by up to ``late_ms``."""
    late_ms: int
    loss_share: float
    """Share of calls, and of replies, that are lost."""
    double_share: float
    """Share of calls that are carried out twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault to come: a method of ``Havoc``, which decides the rest by ``chance``."""

    at_ms: int
    name: str
    chance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a seed decides before the first event."""

    seed: int
    block_size: int
    workers: tuple[WorkerPlan, ...]
    stores: tuple[StorePlan, ...]
    gateways: tuple[str, ...]
    clients: tuple[ClientPlan, ...]
    weather: WeatherPlan
    faults: tuple[str, ...]
    """Names of the faults that may happen."""
    strikes: tuple[Strike, ...]
    """Those that will."""
    fault_phase_ms: int
    patient: bool
    """Whether that lasts so long even when every client has its answer before."""
    tick_ms: int
    reserve_full: bool
    growth_reserve_blocks: int
    min_residency_tokens: int
    reserve_slack_tokens: int
    max_swapped_requests: int | None
    cpu_offload: bool
    prefetch_blocks: int
    """Longest payload that is fetched ahead; 0: none."""
    policy: str
    levels: int
    """Of the weights' precision; 1: they are not nested."""
    costs: bool
    """Whether the workers know what their steps take at each level."""
    precision: str
    """The policy that they follow."""
    level_max: int
    threshold_tokens: int
    ttft_target_ms: int
    tpot_target_ms: int
    dwell_ms: int
    prefix_cache: bool
    report_ms: int
    clock_skew_ms: int
    """How far a process's clock may be ahead."""
    tight: bool
    """Whether everything that remembers or queues does so for as few as it can."""
    late_start_ms: int
    """The longest that a worker, store or gateway may take to come up at first."""
    noisy: bool
    """Whether computing a token twice may give two different tokens."""
    shed_exact_wait_ms: int = 60_000
    """How long exact requests wait for lower planes to return."""
    w8a8_rows: int = 0
    """Steps of so many tokens at the highest level are W8A8; 0: none is."""
    check_always: bool
    """Whether every core's ``check()`` runs after each of its events."""


FAULTS = (
    "kill_worker",
    "kill_store",
    "kill_gateway",
    "kill_controller",
    "stop_worker",
    "stop_store",
    "stop_gateway",
    "stop_controller",
    "stop_worker_long",
    "stop_store_long",
    "stop_gateway_long",
    "kill_in_put",
    "stop_in_put",
    "kill_in_commit",
    "kill_in_fetch",
    "kill_store_in_put",
    "kill_node",
    "stuck_step",
    "shrink_worker",
    "shrink_store",
    "slow_store",
    "rival_controller",
    "false_alarm",
    "part_pair",
    "part_pair_one_way",
    "part_nodes",
    "part_nodes_one_way",
    "cut_report",
    "cut_link",
    "cut_client",
    "abort_client",
    "rot",
    "drain_worker",
    "drain_gateway",
    "rolling_restart",
    "fickle_controller",
)


def _share(rng: Random, most: float) -> float:
    return 0.0 if rng.random() < 0.5 else rng.random() * most


def draw(seed: int) -> Plan:
    """Draw the plan of a seed."""
    rng = Random(f"plan {seed}")
    shedding = Random(f"planes {seed}")
    nodes = ("n0", "n1")
    block_size = rng.choice((2, 2, 3, 4))
    prefixes = [tuple(rng.randrange(VOCABULARY - 1) for _ in range(12)) for _ in range(2)]
    workers = tuple(
        WorkerPlan(
            name=f"w{i}",
            node=rng.choice(nodes),
            blocks=rng.choice((3, 4, 5, 6, 8, 12)),
            prefill_chunk_tokens=rng.choice((2, 3, 8, 64)),
            max_batch_tokens=rng.choice((4, 8, 64)),
            max_batch_seqs=rng.choice((1, 2, 8, 8)),
            step_ms=rng.choice((3, 10, 30)),
            copy_ms=rng.choice((2, 20, 100)),
        )
        for i in range(rng.choice((1, 2, 2, 3)))
    )
    precision = _precision(Random(f"precision {seed}"))
    if precision["levels"] > 1:
        workers = tuple(_nested(worker, shedding) for worker in workers)
    largest = max(worker.blocks + worker.tail_blocks for worker in workers)
    if any(worker.tail_blocks for worker in workers):
        largest = max(2, largest // shedding.choice((1, 1, 2, 3)))
    stores = tuple(
        StorePlan(
            name=f"s{i}",
            node=nodes[i],
            budget_blocks=rng.choice((0, 4, 12, 64, 64, 64, 64)),
            tickets_max=rng.choice((1, 3, 64, 64, 64, 64)),
        )
        for i in range(rng.choice((1, 1, 1, 2, 2, 0)))
    )
    crowded = rng.random() < 0.4
    if crowded:  # all come at once, to little room, and there is a place to swap to
        workers = tuple(
            replace(w, blocks=rng.choice((4, 6, 8)), node="n0" if rng.random() < 0.7 else w.node)
            for w in workers[:2]
        )
        largest = max(worker.blocks for worker in workers)
        spare = rng.choice((1, 1, 8))
        stores = tuple(
            replace(s, budget_blocks=largest * spare, tickets_max=64) for s in stores[:1]
        ) or (StorePlan(name="s0", node="n0", budget_blocks=64, tickets_max=64),)
    busy_ms = rng.choice((1, 100) if crowded else (1, 100, 500, 1500))
    clients = tuple(
        _client(rng, i, prefixes, block_size, largest, busy_ms, crowded=crowded)
        for i in range(rng.randrange(3, 7))
    )
    if shedding.random() < 0.5:  # otherwise few of them meet planes that are away
        clients = tuple(replace(c, exact=shedding.random() < 0.5) for c in clients)
    calm = rng.random() < 0.1
    # Half of the seeds have few kinds of faults, so that each of them meets itself.
    share = rng.choice((0.1, 0.1, 0.4) if crowded else (0.1, 0.4))
    weights = {} if calm else {n: 0.2 + rng.random() for n in FAULTS if rng.random() < share}
    if crowded and not calm and rng.random() < 0.7:
        within = [name for name in FAULTS if "_in_" in name]
        if rng.random() < 0.5:  # one of them again and again
            within = [rng.choice(within)]
            weights = dict(list(weights.items())[:1])
        weights |= dict.fromkeys(within, 1.0)
    if any(worker.tail_blocks for worker in workers) and shedding.random() < 0.3:
        # Else loads seldom last till a return.
        weights = {**dict(list(weights.items())[:1]), "fickle_controller": 1.0}
    fault_phase_ms = rng.choice((700, 1500, 2500))
    return Plan(
        seed=seed,
        block_size=block_size,
        workers=workers,
        stores=stores,
        gateways=tuple(f"g{i}" for i in range(rng.choice((1, 2)))),
        clients=clients,
        weather=WeatherPlan(
            jitter_ms=rng.choice((2, 5, 30)),
            late_share=0.0 if calm else _share(rng, 0.1),
            late_ms=rng.choice((100, 600, 3000)),
            loss_share=0.0 if calm else _share(rng, 0.5 if crowded else 0.3),
            double_share=0.0 if calm else _share(rng, 0.5 if crowded else 0.3),
        ),
        faults=tuple(weights),
        strikes=_strikes(Random(f"strikes {seed}"), weights, fault_phase_ms),
        fault_phase_ms=fault_phase_ms,
        patient=rng.random() < 0.1,
        tick_ms=rng.choice((50, 100, 100, 100)),
        reserve_full=rng.random() < 0.2,
        growth_reserve_blocks=rng.choice((0, 1, 1, 2)),
        min_residency_tokens=rng.choice((0, 1, 4, 16)),
        reserve_slack_tokens=rng.choice((0, 2, 8)),
        max_swapped_requests=None if crowded else rng.choice((0, 1, 2, *(None,) * 7)),
        cpu_offload=crowded or rng.random() < 0.95,
        prefetch_blocks=Random(f"prefetch {seed}").choice((0, 2, 64, 64, 64)),
        policy=rng.choice(("lru", "lru", "youngest", "cost")),
        **precision,
        prefix_cache=rng.random() < 0.7,
        clock_skew_ms=rng.choice((0, 0, 50, 1000)),
        report_ms=rng.choice((50, 100, 200, 200)),
        tight=rng.random() < 0.25,
        late_start_ms=rng.choice((0, 0, 0, 1500)),
        noisy=rng.random() < 0.5,
        shed_exact_wait_ms=shedding.choice((1500, 60_000, 60_000, 60_000)),
        w8a8_rows=Random(f"w8a8 {seed}").choice((0, 0, 2, 6)) if precision["levels"] > 1 else 0,
        check_always=seed % 8 == 0,
    )


def _strikes(rng: Random, weights: dict[str, float], end_ms: int) -> tuple[Strike, ...]:
    if not weights:
        return ()
    names, each = list(weights), list(weights.values())
    every_ms = rng.choice((40, 120, 300))
    strikes: list[Strike] = []
    at_ms = 0
    while (at_ms := at_ms + 1 + int(rng.expovariate(1.0 / every_ms))) < end_ms:
        name = rng.choices(names, each)[0]
        strikes.append(Strike(at_ms=at_ms, name=name, chance=rng.getrandbits(32)))
    return tuple(strikes)


def _precision(rng: Random) -> dict[str, Any]:
    """What concerns the weights' precision."""
    return {
        "levels": rng.choice((1, 2, 2, 3, 4)),
        "costs": rng.random() < 0.9,
        "precision": rng.choice(("fp16", "fp8", "threshold", "slo", "slo", "slo")),
        "level_max": rng.choice((1, 1, 5)),
        "threshold_tokens": rng.choice((0, 1, 3, 8)),
        "ttft_target_ms": rng.choice((10, 100, 1000)),
        "tpot_target_ms": rng.choice((2, 8, 20, 50)),
        "dwell_ms": rng.choice((0, 20, 200)),
    }


def _nested(worker: WorkerPlan, rng: Random) -> WorkerPlan:
    """Three of four can shed."""
    chance = rng.random()
    if chance < 0.25:
        return replace(worker, start_shed=chance < 0.05)
    return replace(
        worker,
        tail_blocks=rng.choice((1, 2, 4, 8)),
        return_ms=rng.choice((5, 30, 100, 300)),
        return_fails=rng.choice((0.0, 0.0, 0.3, 0.9)),
    )


def _client(
    rng: Random,
    number: int,
    prefixes: list[tuple[int, ...]],
    block_size: int,
    largest_pool: int,
    busy_ms: int,
    *,
    crowded: bool,
) -> ClientPlan:
    room = largest_pool * block_size
    # Mostly a good part of what the largest pool can hold, now and then more.
    total = rng.randrange(room // 2, room + 1) if rng.random() < 0.95 else room + 1
    max_tokens = rng.randrange(min(total, 33) // 2 if crowded else 1, min(total, 33))
    length = total - max_tokens
    shared = rng.choice(prefixes) if rng.random() < 0.6 else ()
    own = tuple(rng.randrange(VOCABULARY - 1) for _ in range(length))
    prompt = (shared[: rng.randrange(0, 13)] + own)[:length]
    own_seed = rng.randrange(1 << 40)
    fate = rng.random()
    when = rng.randrange(1, 600)
    return ClientPlan(
        name=f"c{number}",
        arrival_ms=rng.randrange(busy_ms),
        prompt_ids=prompt,
        max_tokens=max_tokens,
        choices=2 if rng.random() < 0.1 else 1,
        seed=own_seed,
        stop_ids=(EOS,) if rng.random() < 0.4 else (),
        stop_pair=_stop_pair(rng, prompt, own_seed, max_tokens) if rng.random() < 0.15 else None,
        min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.2 else 0,
        deadline_after_ms=rng.randrange(20, 3000) if rng.random() < 0.1 else None,
        read_ms=3000 if rng.random() < 0.03 else rng.choice((0, 0, 0, 3, 40)),
        abort_after_ms=when if fate < 0.08 else None,
        vanish_after_ms=when if 0.08 <= fate < 0.14 else None,
        cut_after_ms=tuple(rng.randrange(1, 800) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
        priority=rng.choice((0, 0, 0, 1)),
        exact=rng.random() < 0.2,
    )


def _stop_pair(
    rng: Random, prompt: tuple[int, ...], seed: int, max_tokens: int
) -> tuple[int, int] | None:
    """Two tokens in a row that the first choice comes to if nothing disturbs it."""
    if max_tokens < 2:
        return None
    answer = first_tokens(prompt, seed, max_tokens)
    place = rng.randrange(max_tokens - 1)
    return answer[place], answer[place + 1]
