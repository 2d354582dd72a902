"""``python -m deepinfer.deploy.sim``: the command without the rest of DeepInfer."""

from __future__ import annotations

import typer

from deepinfer.deploy.sim.cli import simulate

if __name__ == "__main__":
    typer.run(simulate)
