"""What every GPU kernel needs of a card, without one: registers, shared memory, blocks an SM."""

from __future__ import annotations

from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.config import ConfigError
from deepinfer.kernels.compiler import Compiled, KernelError
from deepinfer.kernels.resources import ARCHS, compile_all, occupancy

COMMAND = "deepinfer bench kernel-resources"


def run_kernel_resources(*, output: Path, console: Console) -> bool:
    """Compile every kernel for each of ``ARCHS`` and write ``kernel_resources.json``.

    False when a kernel spills registers to memory or keeps a stack. Raises ConfigError without
    CuPy or NVRTC.
    """
    rows: list[dict[str, Any]] = []
    with counted(console, len(ARCHS)) as steps:
        for arch in ARCHS:
            steps.tell(f"compiling every kernel for {arch}")
            try:
                rows += [_row(each) for each in compile_all(arch)]
            except KernelError as error:
                raise ConfigError(str(error)) from error
            steps.advance()
    write_result(
        output / "kernel_resources.json",
        COMMAND,
        {"nvrtc": _nvrtc(), "sm": {a: asdict(v) for a, v in ARCHS.items()}, "kernels": rows},
    )
    console.print(_table(rows))
    return not any(row["stack_bytes"] or row["spill_bytes"] for row in rows)


def _row(compiled: Compiled) -> dict[str, Any]:
    spec, resources = compiled.spec, compiled.resources
    assert resources is not None, "a cubin's log states its resources"
    fit = occupancy(ARCHS[compiled.arch], spec.threads, resources, spec.shared_bytes)
    return {
        "kernel": spec.name,
        "source": spec.source,
        "arch": compiled.arch,
        "threads": spec.threads,
        **asdict(resources),
        "dynamic_shared_bytes_max": spec.shared_bytes,
        "blocks_an_sm": fit.blocks,
        "occupancy": round(fit.share, 3),
        "limited_by": fit.limit,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("arch")
    table.add_column("kernel", overflow="fold")
    for heading in ("registers", "shared bytes", "blocks an SM"):
        table.add_column(heading, justify="right")
    for row in rows:
        spilled = f" + {row['spill_bytes']} B spilled" if row["spill_bytes"] else ""
        table.add_row(
            row["arch"],
            row["kernel"],
            f"{row['registers']}{spilled}",
            f"{row['shared_bytes'] + row['dynamic_shared_bytes_max']:,}",
            f"{row['blocks_an_sm']} ({row['occupancy']:.0%})",
        )
    return table


def _nvrtc() -> str:
    for name in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "of the system"
