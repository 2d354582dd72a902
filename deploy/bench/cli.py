"""``deepinfer bench``: parses and prints; each experiment is a module beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.deploy.console import out, plain_errors

bench = typer.Typer(no_args_is_help=True, help="Experiments; each writes JSON and a plot.")


@bench.command("offload")
def bench_offload(
    model: Annotated[str, typer.Option(help="Model folder, GGUF file, or demo.")] = "demo",
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: all four.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 5,
    output: Annotated[Path, typer.Option(help="Folder for the JSON and the plot.")] = Path(
        "docs/results"
    ),
) -> None:
    """Force one swap a round: a pool of exactly 3 blocks, two requests that need 3 each."""
    with plain_errors():
        from deepinfer.deploy.bench.offload import run_offload

        ok = run_offload(
            model=model,
            dtypes=tuple(kv_cache_dtype or ("fp16", "int8", "fp8", "fp8_e5m2")),
            rounds=rounds,
            output=output,
            console=out,
        )
    raise typer.Exit(0 if ok else 1)


@bench.command("controller")
def bench_controller(
    output: Annotated[Path, typer.Option(help="Folder for the JSON and the plot.")] = Path(
        "docs/results"
    ),
) -> None:
    """The controller's core alone: events a second, and how the cost grows."""
    with plain_errors():
        from deepinfer.deploy.bench.controller import main as run_controller

        run_controller(output)


@bench.command("concurrency")
def bench_concurrency(
    model: Annotated[str, typer.Option(help="Model folder, GGUF file, or demo.")] = "demo",
    levels: Annotated[str, typer.Option(help="Numbers of streams, by commas.")] = "1,2,4,8",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Mean length of a prompt; they are of unlike length.")
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 32,
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: fp16.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of everybody.")] = 1,
    peers: Annotated[bool, typer.Option(help="Measure transformers in the same run.")] = True,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file to make prompts of; default: ours.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the JSON and the plot.")] = Path(
        "docs/results"
    ),
) -> None:
    """Speed by the number of streams, beside the bare engine loop and transformers."""
    with plain_errors():
        from deepinfer.deploy.bench.concurrency import Load, parse_levels, run_concurrency

        load = Load(
            levels=parse_levels(levels),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            rounds=rounds,
            threads=threads,
            kv_cache_dtypes=tuple(kv_cache_dtype or ("fp16",)),
            peers=peers,
        )
        run_concurrency(model=model, load=load, text=text, output=output, console=out)
