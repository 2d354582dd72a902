"""The entry point of a Ray job: ``python -m deepinfer.deploy.job --config cluster.yaml``.

Joins the Ray that runs already, creates the cluster's actors there, and lives as long as they: the
job is the cluster, and `ray job stop` removes it. ``--detach`` leaves the actors behind and ends;
``--down`` removes them. docs/ray.md shows the whole line.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from deepinfer.deploy import interrupts
from deepinfer.deploy.access import NAMESPACE
from deepinfer.deploy.actors import end_actors
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError, load_config
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.launch import hold
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.deploy.rays import RunningRay, members
from deepinfer.deploy.running import TokenFileError, exposed


def parser() -> argparse.ArgumentParser:
    """The command line: the settings of ``ClusterConfig`` as flags, and what only a job has."""
    made = argparse.ArgumentParser(
        prog="python -m deepinfer.deploy.job",
        description="Serve from the Ray cluster that runs already.",
        allow_abbrev=False,
    )
    made.add_argument("--config", "-c", type=Path, help="YAML file.")
    made.add_argument(
        "--nodes",
        type=_nodes,
        default="all",
        metavar="all|N",
        help="Nodes with CPUs that get a store and workers each; N waits for so many.",
    )
    made.add_argument(
        "--detach", action="store_true", help="End once it serves, and leave it running."
    )
    made.add_argument("--down", action="store_true", help="Remove the cluster that runs there.")
    for name, info in ClusterConfig.model_fields.items():
        made.add_argument(
            "--" + name.replace("_", "-"), default=None, help=info.description, **_kind(info)
        )
    return made


def _nodes(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: must be all, or a number from 1")


def _kind(info: FieldInfo) -> dict[str, Any]:
    """How a flag is read; what is legal is ``ClusterConfig``'s business."""
    kinds = get_args(info.annotation) or (info.annotation,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": next((kind for kind in (int, float) if kind in kinds), str)}


def serve(cluster: Cluster, *, detach: bool) -> None:
    """Start the cluster, say where it is, and hold it until SIGTERM or SIGINT, or let it go.

    Raises:
        LaunchError: it could not be started, or not be removed in time.
        TokenFileError: the token file cannot be used.
    """
    config = cluster.config
    for warning in config.warnings():
        _say(f"warning: {warning}")
    with cluster:
        if (loose := exposed(cluster.token_file)) is not None:
            _say(f"warning: {loose}")
        for note in cluster.notes:
            _say(note)
        _say(f"serving {config.model} at {', '.join(cluster.endpoints)}")
        _say(f"token in {cluster.token_file}")
        if detach:
            cluster.detach()
            _say("detached: remove it with `python -m deepinfer.deploy.job --down`")
            return
        # Ray kills a job some seconds after it has asked it to stop: how many, only its head knows.
        hold(cluster, lambda: config.grace if "grace" in config.model_fields_set else 0.0)


def remove(ray_below: RunningRay) -> tuple[str, ...]:
    """Remove the cluster that runs in a Ray; return the names of its actors.

    Raises:
        LaunchError: there is no Ray, no cluster in it, or an actor does not go.
    """
    ray_below.join()
    import ray

    names: tuple[str, ...] = ()
    try:
        names = members()
        if not names:
            raise LaunchError("no DeepInfer cluster runs in this Ray")
        handles = {}
        for name in names:
            with contextlib.suppress(ValueError):  # it has just gone by itself
                handles[name] = ray.get_actor(name, namespace=NAMESPACE)
        end_actors(handles, serving=True)
    finally:
        ray_below.stop(names, keep_logs=True)
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job; return its exit code."""
    values = vars(parser().parse_args(arguments))
    file, nodes = values.pop("config"), values.pop("nodes")
    detach, down = values.pop("detach"), values.pop("down")
    try:
        with interrupts.stop_signals():
            if down:
                _say(f"removed {', '.join(remove(RunningRay()))}")
                return 0
            config = load_config(file, values)
            serve(Cluster(config, say=_say, ray=RunningRay(nodes)), detach=detach)
    except (ConfigError, LaunchError, ModelUnavailableError, TokenFileError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        _say("stopped")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
