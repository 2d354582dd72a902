"""``deepinfer fuzz``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.deploy.console import err, out, plain_errors


def fuzz(
    target: Annotated[
        str, typer.Option(help="What gets the cases: names with commas, or all.")
    ] = "all",
    cases: Annotated[int, typer.Option(min=1, help="Cases of each target.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the choices.")] = 1,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which it ends by itself.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Processes.")] = len(
        os.sched_getaffinity(0)
    ),
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder for inputs that break something; default: a temporary one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON, written as it goes; an earlier run is gone on with.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Only say what targets there are.")
    ] = False,
) -> None:
    """Give hostile input to every decoder and RPC handler; code 1 if anything breaks."""
    with plain_errors():
        from deepinfer.deploy.fuzz.campaign import Campaign, Plan
        from deepinfer.deploy.fuzz.registry import TARGETS

        if listed:
            for name, each in TARGETS.items():
                out.print(f"{name:16} {each.about}", markup=False, highlight=False)
            return
        names = tuple(TARGETS) if target == "all" else tuple(target.split(","))
        if unknown := [name for name in names if name not in TARGETS]:
            known = ", ".join(TARGETS)
            raise typer.BadParameter(f"{', '.join(unknown)}: must be all or of {known}")
        folder = corpus or Path(tempfile.mkdtemp(prefix="deepinfer-fuzz-corpus-"))
        plan = Plan(
            targets=names, cases=cases, seed=seed, jobs=jobs, budget_s=budget, folder=folder
        )
        campaign = Campaign(
            plan,
            command=" ".join(["deepinfer", *sys.argv[1:]]),
            output=output,
            say=lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True),
        )
        fine = campaign.run()
        for name, total in campaign.totals.items():
            figures = campaign.figures()["targets"][name]
            out.print(
                f"{name:16} {total.cases:>9,} cases  {figures['cases_per_s']:>7,}/s  "
                f"{total.refused:>9,} refused  slowest {figures['slowest_ms']:g} ms  "
                f"{figures['crashes']} broke",
                markup=False,
                highlight=False,
            )
        if not fine:
            err.print(f"inputs are in {folder}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if fine else 1)
