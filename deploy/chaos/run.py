"""``deepinfer chaos`` from the command line's values to the files it leaves."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.chaos.campaign import Campaign, Runner
from deepinfer.deploy.chaos.journal import Journal
from deepinfer.deploy.chaos.report import draw, summary, table, typical, verdict
from deepinfer.deploy.chaos.rows import Trial
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.models import check_model, resolve_model


def run_chaos(campaign: Campaign, output: Path, console: Console) -> bool:
    """Run what is left of a campaign; write its journal, JSON and picture.

    ``output`` is the JSON; beside it come ``.trials.jsonl`` (the journal, from which a campaign
    goes on), ``.png``, and a folder ``.logs`` if something was wrong. Of a campaign that is through
    only the picture is drawn anew.

    Returns:
        Whether every trial is through, and all of them were right.

    Raises:
        ConfigError: the journal is of another campaign.
        LaunchError: the unpressed answers could not be computed.
        ModelUnavailableError: there is no such model.
    """
    journal = Journal.open(output.with_suffix(".trials.jsonl"), campaign.header())

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if journal.trials:
        say(f"{len(journal.counted)} of {campaign.kills} trials are in {journal.path}")
    if journal.left(campaign.kills) or not output.exists():
        model = resolve_model(campaign.model)
        runner = Runner(
            campaign=campaign,
            journal=journal,
            model=model,
            vocabulary=check_model(model).vocab_size,
            faults=output.with_suffix(".logs"),
            say=say,
            save=lambda runner: write_result(output, campaign.command(output), figures_of(runner)),
        )
        runner.run()
    if not journal.trials:
        say("no trial is through")
        return False
    figures = summary(journal.trials, journal.missed)
    console.print(table(figures, f"{campaign.target}, {campaign.path}, {campaign.device}"))
    say(verdict(figures))
    try:
        check_plots()
    except ConfigError as error:
        say(f"no picture: {error}")
    else:
        draw(journal.trials, output.with_suffix(".png"))
    return not journal.left(campaign.kills) and all(trial.right for trial in journal.trials)


def figures_of(runner: Runner) -> dict[str, Any]:
    """What a campaign has found so far, plain values."""
    campaign, journal = runner.campaign, runner.journal
    shown = typical(journal.counted)
    return (
        {"campaign": campaign.header() | {"kills": campaign.kills, "jobs": campaign.jobs}}
        | summary(journal.trials, journal.missed)
        | {
            "starts_s": runner.starts_s,
            "broken": runner.broken,
            "unreached": runner.unreached,
            "typical": None if shown is None else _row(shown),
            "rows": [_row(replace(trial, timeline=())) for trial in journal.trials],
        }
    )


def _row(trial: Trial) -> dict[str, Any]:
    """A trial without what all have in common, and without what it has not; 0.1 ms are enough."""
    common = ("target", "path")
    found = {n: _short(v) for n, v in asdict(trial).items() if n not in common}
    return {n: v for n, v in found.items() if v not in (None, 0, 0.0, "", False) and v != {}}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items() if each}
    return [_short(each) for each in value] or None if isinstance(value, list | tuple) else value
