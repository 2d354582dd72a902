"""``deepinfer chaos``: parses; the work is in ``run.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from deepinfer.deploy.bench.cli import MODEL_HELP, result_folder
from deepinfer.deploy.console import out, plain_errors


def _file(context: typer.Context, path: Path) -> Path:
    result_folder(context, path.parent)
    return path


def _pauses(text: str) -> tuple[float, ...]:
    from deepinfer.deploy.config import ConfigError

    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigError(f"pause = {text!r}: must be seconds, or several by commas") from None


def chaos(
    target: Annotated[
        str, typer.Option(help="worker, store, controller, gateway or node (a machine as a whole).")
    ] = "worker",
    point: Annotated[
        str, typer.Option(help="Where it is to be stopped; any: all in turn.")
    ] = "any",
    path: Annotated[
        str | None, typer.Option(help="memfd or grpc: how payloads get to the store.")
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="Trials that count.")] = 40,
    seed: Annotated[int, typer.Option(help="Of loads and moments.")] = 0,
    pause: Annotated[
        str, typer.Option(help="Seconds to stand still (SIGSTOP), by commas, instead of a kill.")
    ] = "",
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "demo",
    device: Annotated[str, typer.Option(help="What workers compute on: cpu or cuda.")] = "cpu",
    workers: Annotated[int, typer.Option(min=1, help="Of a cluster; of nodes: how many.")] = 2,
    gateways: Annotated[int, typer.Option(min=1, help="Of a cluster.")] = 2,
    streams: Annotated[
        int | None, typer.Option(min=1, help="At once; default: two a worker, and one.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=2048, help="Of every answer.")] = 32,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Tokens depend on the request alone; default: on a card only.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Clusters at once.")] = 1,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no trial begins.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option(help="JSON; what is there already is gone on with.", callback=_file),
    ] = Path("docs/results/chaos.json"),
) -> None:
    """Kill or pause real processes under load, and count what clients lost."""
    with plain_errors():
        from deepinfer.deploy.chaos.campaign import Campaign
        from deepinfer.deploy.chaos.points import TARGETS, Target
        from deepinfer.deploy.chaos.run import run_chaos
        from deepinfer.deploy.config import ConfigError, Device

        known = next((name for name in TARGETS if name == target), None)
        if known is None:
            raise ConfigError(f"target = {target!r}: must be {', '.join(get_args(Target))}")
        on = next((name for name in get_args(Device) if name == device), None)
        if on is None:
            raise ConfigError(f"device = {device!r}: must be {' or '.join(get_args(Device))}")
        campaign = Campaign(
            target=known,
            point=point,
            path=path or ("grpc" if target == "node" else "memfd"),
            kills=kills,
            seed=seed,
            pauses_s=_pauses(pause),
            model=model,
            device=on,
            workers=workers,
            gateways=gateways,
            streams=streams,
            tokens=tokens,
            deterministic=on == "cuda" if deterministic is None else deterministic,
            jobs=jobs,
            budget_s=budget,
        )
        right = run_chaos(campaign, output, out)
    raise typer.Exit(0 if right else 1)
