"""``deepinfer simulate``: parses; also ``python -m deepinfer.deploy.sim``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.deploy.console import err

MANY = 20_000
"""From so many seeds on, what is done is written down without being asked for."""


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 1000,
    start: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes.", show_default="all cores")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.1, help="Stop after so many seconds.")
    ] = None,
    max_failures: Annotated[
        int, typer.Option(min=1, help="Stop after so many failing seeds.")
    ] = 10,
    progress: Annotated[
        Path | None,
        typer.Option(help=f"Where to note what is done; default: noted from {MANY:,} seeds on."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the result as JSON; of --shrink: the case.")
    ] = None,
    coverage: Annotated[bool, typer.Option(help="Say how often what was seen.")] = False,
    trace: Annotated[bool, typer.Option(help="Print every event, of each seed.")] = False,
    shrunk: Annotated[
        bool, typer.Option("--shrink", help="Find out what a failing seed needs to fail.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Run the case in this file, event by event.")
    ] = None,
) -> None:
    """Run the production cores under seeded faults and check every history.

    A run of many seeds that was interrupted, or whose --budget was used up, goes on when the same
    command is given again.
    """
    from deepinfer.deploy.running import state_dir
    from deepinfer.deploy.sim import command
    from deepinfer.deploy.sim.campaign import Campaign, cores_here

    try:
        if replay is not None:
            status = command.replay(replay)
        elif shrunk:
            status = command.shrink_seed(start, output)
        elif trace:
            status = max(command.trace_seed(seed) for seed in range(start, start + seeds))
        else:
            if progress is None and seeds >= MANY:
                progress = state_dir() / f"simulate-{start}-{seeds}.json"
            status = command.conduct(
                Campaign(
                    seeds=seeds,
                    start=start,
                    jobs=jobs or cores_here(),
                    failures_max=max_failures,
                    budget_s=budget,
                    progress=progress,
                ),
                output,
                say_coverage=coverage,
            )
    except ValueError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        status = 1
    except KeyboardInterrupt:
        status = 130
    raise typer.Exit(status)
