"""The first part of a story: who is there, and how everything is set."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from deepinfer.deploy.sim.plan import ClientPlan, Plan, StorePlan, WeatherPlan, WorkerPlan


class StoryError(AssertionError):
    """A story did not go as told, or cannot be read."""


def plan_of(given: list[str]) -> Plan:
    """Read the lines of a story's part ``given``."""
    workers: list[WorkerPlan] = []
    stores: list[StorePlan] = []
    gateways: list[str] = []
    clients: list[ClientPlan] = []
    settings: dict[str, Any] = {}
    block_size = 2
    for line in given:
        words = shlex.split(line)
        match words[0]:
            case "block":
                block_size = int(words[2])
            case "worker":
                options = _options(words[2:])
                workers.append(
                    WorkerPlan(
                        name=words[1],
                        node=options.get("node", "n0"),
                        blocks=int(options["blocks"]),
                        prefill_chunk_tokens=int(options.get("chunk", "64")),
                        max_batch_tokens=int(options.get("batch", "64")),
                        max_batch_seqs=int(options.get("seqs", "8")),
                        step_ms=int(options.get("step", "5")),
                        copy_ms=int(options.get("copy", "3")),
                        tail_blocks=int(options.get("tail", "0")),
                        return_ms=int(options.get("return", "0")),
                        return_fails=float(options.get("fails", "0")),
                        start_shed="without" in options,
                    )
                )
            case "store":
                options = _options(words[2:])
                stores.append(
                    StorePlan(
                        name=words[1],
                        node=options.get("node", "n0"),
                        budget_blocks=int(options["budget"]),
                        tickets_max=int(options.get("tickets", "64")),
                    )
                )
            case "gateway":
                gateways += words[1:]
            case "client":
                clients.append(_client(words[1], len(clients), _options(words[2:])))
            case "set":
                settings[words[1]] = _value(words[2])
            case _:
                raise StoryError(f"given: {line}: block, worker, store, gateway, client or set")
    plan = Plan(
        seed=0,
        block_size=block_size,
        workers=tuple(workers),
        stores=tuple(stores),
        gateways=tuple(gateways),
        clients=tuple(clients),
        weather=WeatherPlan(
            jitter_ms=1, late_share=0.0, late_ms=1, loss_share=0.0, double_share=0.0
        ),
        faults=("scripted",),
        strikes=(),
        fault_phase_ms=0,
        patient=True,
        tick_ms=50,
        reserve_full=False,
        growth_reserve_blocks=0,
        min_residency_tokens=0,
        reserve_slack_tokens=2,
        max_swapped_requests=None,
        cpu_offload=True,
        prefetch_blocks=64,
        policy="lru",
        levels=1,
        costs=True,
        precision="slo",
        level_max=5,
        threshold_tokens=1024,
        ttft_target_ms=2000,
        tpot_target_ms=100,
        dwell_ms=0,
        prefix_cache=False,
        report_ms=100,
        clock_skew_ms=0,
        tight=False,
        late_start_ms=0,
        noisy=False,
        check_always=True,
    )
    return dataclasses.replace(plan, **settings)


def _options(words: list[str]) -> dict[str, str]:
    if len(words) % 2:
        raise StoryError(f"options come in pairs of name and value: {' '.join(words)}")
    return dict(zip(words[::2], words[1::2], strict=True))


def _client(name: str, number: int, options: dict[str, str]) -> ClientPlan:
    length, shared = int(options["prompt"]), int(options.get("shared", "0"))
    prompt = tuple(7 if i < shared else (number + 1) * 3 % 29 for i in range(length))
    return ClientPlan(
        name=name,
        arrival_ms=0,
        prompt_ids=prompt,
        max_tokens=int(options["max"]),
        choices=int(options.get("choices", "1")),
        seed=2 * number,
        stop_ids=(),
        stop_pair=None,
        min_tokens=0,
        deadline_after_ms=int(options["deadline"]) if "deadline" in options else None,
        read_ms=int(options.get("read", "0")),
        abort_after_ms=None,
        vanish_after_ms=None,
        cut_after_ms=(),
        priority=int(options.get("priority", "0")),
        exact=options.get("exact", "false") == "true",
    )


def _value(word: str) -> object:
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.lstrip("-").isdigit() else word
