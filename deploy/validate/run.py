"""Goes through the checks natively, and once more as the SM86 code, in a process of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.validate.checks import Check, Outcome, perform
from deepinfer.deploy.validate.report import figures, misses, sentence, table
from deepinfer.deploy.validate.second import SecondRun
from deepinfer.deploy.validate.subject import make_subject
from deepinfer.deploy.validate.suite import card_checks
from deepinfer.kernels.compiler import TARGET_VARIABLE, KernelError, device_target, precompile
from deepinfer.workers.gpu.card import Card, GpuUnavailableError, find_card

SM86: Final = "compute_86"
"""PTX for the cards that this project is for; a newer card that runs it tests their branches."""

_ROOM_FOR_TWO_BYTES: Final = 40 << 30
"""On cards with so much memory both processes work at a time."""

_log = logging.getLogger(__name__)


def run_validation(
    model: str | None, shape: str, *, quick: bool, ptx: bool, output: Path, console: Console
) -> bool:
    """Run everything, print a table, write ``kernel_validation.json``; False for any miss.

    About ``model``, or random weights of ``shape``.

    ``ptx``: once more from ``SM86``, unless that is what this card runs anyway.

    Raises ConfigError where kernels cannot run, saying what to install or use instead, and as
    ``make_subject``.
    """
    card, target = usable_card()
    subject = make_subject(model, shape, console=console)
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        steps.advance()

    with counted(console, 1, "listing the checks") as steps:
        checks = card_checks(subject, card, quick=quick)
        second = None
        if ptx and TARGET_VARIABLE not in os.environ and not target.endswith("_86"):
            second = SecondRun(subject, SM86, quick=quick, seen=note)
        steps.expect(len(checks) * (1 if second is None else 2))
        if second is not None and card.bytes_total >= _ROOM_FOR_TWO_BYTES:
            second.start()
        steps.tell(f"compiling for {target}")
        compile_for(checks)
        for check in checks:
            steps.tell(f"{check.kernel} {check.variant} for {target}")
            note(perform(check, target))
        if second is not None:
            steps.tell(f"the same from {SM86} PTX")
            second.finish()
    found = figures(subject.name, card, outcomes)
    command = f"deepinfer validate-kernels {subject.arguments}{' --quick' if quick else ''}"
    write_result(output / "kernel_validation.json", command, found)
    console.print(table(outcomes))
    for line in misses(outcomes):
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(sentence(outcomes), markup=False, highlight=False, soft_wrap=True)
    return not any(outcome.misses for outcome in outcomes)


def usable_card() -> tuple[Card, str]:
    """The card, and what kernels are compiled for on it.

    Raises ConfigError where they cannot run; says what to install or use instead.
    """
    try:
        return find_card(), device_target()
    except (GpuUnavailableError, KernelError) as error:
        raise ConfigError(str(error)) from error


def compile_for(checks: Sequence[Check]) -> None:
    """Compile in parallel what the checks launch; one that fails will tell of it itself."""
    try:
        precompile(dict.fromkeys(spec for check in checks for spec in check.specs))
    except KernelError as error:
        _log.warning("not all kernels could be compiled: %s", error)
