"""What ``deepinfer simulate`` does and prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.console import out
from deepinfer.deploy.sim import campaign as campaigns
from deepinfer.deploy.sim.campaign import Campaign
from deepinfer.deploy.sim.case import Case, load
from deepinfer.deploy.sim.coverage import Part, table
from deepinfer.deploy.sim.plan import draw
from deepinfer.deploy.sim.shrink import Shrunk, shrink
from deepinfer.deploy.sim.simulate import Failed, Tape

_EVENT_CHARS = 400


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


# ---- many seeds -----------------------------------------------------------------------------


def conduct(campaign: Campaign, output: Path | None, *, say_coverage: bool) -> int:
    """Run a campaign, print what it came to, and return the exit status."""
    text = TextColumn("{task.completed:,.0f} of {task.total:,.0f} seeds")
    failed = TextColumn("{task.fields[failed]} failed")
    bar = Progress(
        *(BarColumn(), text, failed, TimeRemainingColumn()),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    with bar:
        task = bar.add_task("seeds", total=campaign.seeds, failed=0)

        def watch(now: campaigns.Progress) -> None:
            bar.update(task, completed=now.tally.seeds, failed=len(now.tally.failures))

        done, wall_s = campaigns.conduct(campaign, watch=watch)
    tally = done.tally
    for failure in tally.failures:
        _tell_failure(failure)
    if say_coverage:
        _tell_coverage(done)
    _say(
        f"{tally.seeds} seeds, {len(tally.failures)} failed; {tally.acts} events in"
        f" {tally.simulated_ms / 1000:.0f} simulated s; {wall_s:.1f} s,"
        f" {tally.seeds / wall_s:.0f} seeds/s"
    )
    if not done.complete and len(tally.failures) < campaign.failures_max:
        goes_on = ": the same command goes on" if campaign.progress else ""
        _say(f"{campaign.seeds - tally.seeds} seeds are left{goes_on}")
    if output is not None:
        write_result(output, _command(campaign), figures(done, wall_s))
    return 1 if tally.failures else 0


def _command(campaign: Campaign) -> str:
    start = f" --start {campaign.start}" if campaign.start else ""
    return f"deepinfer simulate --seeds {campaign.seeds}{start} --jobs {campaign.jobs}"


def figures(done: campaigns.Progress, wall_s: float) -> dict[str, Any]:
    """What a result file says of a campaign."""
    tally = done.tally
    return {
        "seeds": tally.seeds,
        "seeds_asked": done.campaign.seeds,
        "start": done.campaign.start,
        "violations": len(tally.failures),
        "failures": [
            {"seed": f.seed, "kind": f.kind, "error": f.error, "replay": f.replay}
            for f in tally.failures
        ],
        "events": tally.acts,
        "simulated_s": round(tally.simulated_ms / 1000),
        "wall_s": round(wall_s, 1),
        "parts": done.parts,
        "jobs": done.campaign.jobs,
        "seeds_per_s": round(tally.seeds / wall_s, 1),
        "sources": campaigns.fingerprint(),
        "coverage": {part.value: table(tally.coverage, part) for part in Part},
    }


def _tell_failure(failed: Failed) -> None:
    _say(f"seed {failed.seed}: {failed.error}")
    for line in failed.last_events:
        _say(f"    {line[:_EVENT_CHARS]}")
    _say(f"    replay: {failed.replay}")
    _say(f"    shrink: {failed.shrink}")


def _tell_coverage(done: campaigns.Progress) -> None:
    for part in Part:
        _say(f"{part.value}:")
        for name, count in table(done.tally.coverage, part).items():
            _say(f"  {count:12,}  {name}")


# ---- one case -------------------------------------------------------------------------------


def trace_seed(seed: int) -> int:
    """Print every event of a seed; return the exit status."""
    return _trace(f"seed {seed}", Case(draw(seed)))


def replay(path: Path) -> int:
    """Print every event of the case in a file; return the exit status."""
    return _trace(str(path), load(path))


def _trace(name: str, case: Case) -> int:
    _say(f"{name}: {case.plan}")
    tape = Tape(sys.stdout)
    try:
        case.world(tape).run()
    except Exception as error:  # noqa: BLE001  # whatever a core raises is what is shown
        sys.stdout.flush()
        _say(f"{name}: {type(error).__name__}: {error}")
        return 1
    sys.stdout.flush()
    _say(f"{name}: passed, trace {tape.digest()}")
    return 0


def shrink_seed(seed: int, output: Path | None) -> int:
    """Find out what a seed needs to fail, print it, write it down; return the exit status."""
    found = shrink(Case(draw(seed)))
    path = output or Path(f"simulate-{seed}.json")
    found.case.save(path)
    _tell_shrunk(found)
    _say(f"replay: deepinfer simulate --replay {path}")
    return 1


def _tell_shrunk(found: Shrunk) -> None:
    plan = found.case.plan
    _say(found.error)
    sizes = (f"{n} of {found.before[what]} {what}" for what, n in found.after.items())
    _say(f"still fails with {', '.join(sizes)} ({found.runs} runs)")
    for client in plan.clients:
        prompt = len(client.prompt_ids)
        _say(
            f"  {client.arrival_ms:6d} ms  {client.name} comes with {prompt} tokens of prompt,"
            f" max_tokens {client.max_tokens}"
        )
    for strike in plan.strikes:
        _say(f"  {strike.at_ms:6d} ms  {strike.name}")
    for mishap in sorted(found.case.mishaps or ()):
        _say(f"     {mishap.source} -> {mishap.target} number {mishap.number}: {mishap.kind}")
