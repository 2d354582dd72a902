"""``bench stops``: orderly stops and rolling restarts of real clusters under load, counted.

A trial is a cluster of its own, started by ``deepinfer up`` in a process of its own, with clients
that ask without a pause. Some trials first restart every worker and gateway by ``deepinfer
restart``; all end with SIGTERM to the launcher. Counted is what clients saw, and what was left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from deepinfer.deploy.bench.results import percentile, write_result
from deepinfer.deploy.bench.stops_load import Book, Load
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.oracle import Answer, Question, unpressed

COMMAND = (sys.executable, "-c", "from deepinfer.deploy.cli import main; main()")
WORKERS, GATEWAYS = 2, 2
BLOCK_SIZE = 16
QUESTIONS = 24
UP_S, BUSY_S, RESTART_S, GONE_S = 240.0, 60.0, 600.0, 30.0
"""The longest that a start, the first answers, a rolling restart, and the end may take."""
MARK = "DEEPINFER_STOPS"
"""An environment variable by which all processes of a trial are found, whoever their parent is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run; the same plan goes on with a result that was cut short."""

    model: str
    times: int
    """Trials, each with one stop."""
    rolling: int
    """Of these so many restart everything first."""
    grace_s: float
    streams: int
    max_tokens: int
    blocks: int
    """In each worker's pool: few, so that some requests are swapped out when the signal comes."""
    seed: int


@dataclass(slots=True)
class Trial:
    """One cluster from its start to its end."""

    number: int
    ended: bool = False
    """It came to its end; what is below counts."""
    trouble: str = ""
    restarted: dict[str, float] | None = None
    """Seconds that each process's drain and restart took."""
    rolling: dict[str, Any] | None = None
    """What clients saw meanwhile."""
    stopping: dict[str, Any] | None = None
    """What they saw from the signal on."""
    running: int = 0
    """Requests that had been accepted when the signal came."""
    stop_s: float = 0.0
    """From the signal to the launcher's exit."""
    exit_code: int | None = None
    left: tuple[str, ...] = ()
    """Processes and files that were still there ``GONE_S`` later."""


def run_stops(
    plan: Plan, *, jobs: int, budget_s: float | None, output: Path, console: Console
) -> bool:
    """Run the trials, so many at a time; True if every one that ran was right.

    The result is written after each trial; trials that it has already are not run again. No trial
    begins that would, by the slowest one so far, end after ``budget_s``.

    Raises:
        LaunchError: the result there is of another plan.
    """
    began = time.monotonic()
    path = output / "stops.json"
    done = _read(path, plan)
    if done:
        console.print(f"{len(done)} trials are in {path} already")
    model = get_model(plan.model, console=console)
    asked = _questions(plan, model)
    waiting = [n for n in range(plan.times) if n not in {trial.number for trial in done}]
    slowest_s = [0.0]

    async def work() -> None:
        while waiting:
            if budget_s is not None and time.monotonic() - began + slowest_s[0] > budget_s:
                return
            started = time.monotonic()
            trial = await run_trial(plan, waiting.pop(0), model, asked)
            slowest_s[0] = max(slowest_s[0], time.monotonic() - started)
            done.append(trial)
            done.sort(key=lambda each: each.number)
            write_result(path, _command(plan), figures(plan, done))
            console.print(_line(trial), markup=False, highlight=False)

    async def every() -> None:
        await asyncio.gather(*(work() for _ in range(jobs)))

    asyncio.run(every())
    found = figures(plan, done)
    console.print(json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1))
    return bool(done) and found["wrong"] == 0


def _questions(plan: Plan, model: Path) -> list[tuple[Question, Answer]]:
    from deepinfer.text.load import load_tokenizer

    vocabulary = load_tokenizer(model).vocab_size
    draw = random.Random(plan.seed)
    questions = [
        Question(
            prompt=tuple(draw.randrange(vocabulary) for _ in range(draw.randint(16, 48))),
            sampling={
                "max_tokens": draw.randint(plan.max_tokens // 2, plan.max_tokens),
                "temperature": 0.0 if i % 2 == 0 else 0.8,
            },
            seed=i,
        )
        for i in range(QUESTIONS)
    ]
    answers = unpressed(model, questions, kv_cache_dtype="auto", block_size=BLOCK_SIZE)
    return list(zip(questions, answers, strict=True))


async def run_trial(
    plan: Plan, number: int, model: Path, asked: Sequence[tuple[Question, Answer]]
) -> Trial:
    """Start, load, perhaps restart everything, stop, and look at what is left."""
    trial = Trial(number)
    folder = Path(tempfile.mkdtemp(prefix="dis-"))  # short: Ray puts sockets below it
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(folder / "s"),
        "RAY_TMPDIR": str(folder / "r"),
        "NO_COLOR": "1",
        MARK: str(folder),
    }
    (folder / "r").mkdir()
    draw = random.Random(f"{plan.seed} {number}")
    flags = {
        "model": model, "port": 0, "workers": WORKERS, "gateways": GATEWAYS,
        "grace": plan.grace_s, "device": "cpu", "block-size": BLOCK_SIZE, "kv-quality": "off",
        "max-cache": f"{plan.blocks} blocks", "max-cpu-offload-mb": 256, "metrics-port": 0,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    log = folder / "up.log"
    with log.open("wb") as file:
        launcher = await asyncio.create_subprocess_exec(
            *COMMAND, "up", *words,
            env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    load: Load | None = None
    try:
        endpoints = await _serving(launcher, log)
        token = (folder / "s" / "deepinfer" / "token").read_text().strip()
        load = Load(endpoints, token, asked, streams=plan.streams, seed=draw.randrange(1 << 30))
        await load.until_busy(BUSY_S)
        if number < plan.rolling:
            trial.restarted = await _restart(plan, environment)
            trial.rolling = load.book.figures()
        await asyncio.sleep(draw.uniform(0.0, 3.0))
        load.book = Book()
        trial.running = sum(load.running.values())
        signalled = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        ending = asyncio.create_task(load.end(at_once=True))
        async with asyncio.timeout(plan.grace_s + GONE_S):
            trial.exit_code = await launcher.wait()
        trial.stop_s = time.monotonic() - signalled
        await asyncio.wait_for(ending, BUSY_S)
        trial.stopping = load.book.figures()
        trial.left = await _left(folder)
        trial.ended = True
    except (LaunchError, OSError, RuntimeError, TimeoutError) as error:
        trial.trouble = f"{type(error).__name__}: {error}\n{_text(log)[-2000:]}"
    finally:
        for pid in [*_processes(folder)]:
            _kill(pid)
        await launcher.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return trial


async def _serving(launcher: asyncio.subprocess.Process, log: Path) -> list[str]:
    """Wait until it serves; where.

    Raises:
        LaunchError: it has ended, or takes too long.
    """
    deadline = time.monotonic() + UP_S
    while "Ctrl-C stops" not in (said := _text(log)):
        if launcher.returncode is not None:
            raise LaunchError(f"up ended with {launcher.returncode}")
        if time.monotonic() > deadline:
            raise LaunchError(f"up does not serve after {UP_S:g} s")
        await asyncio.sleep(0.1)
    found = re.search(r"^serving .* at (127\.0\.0\.1:\d+(?:, 127\.0\.0\.1:\d+)*)$", said, re.M)
    assert found is not None, said
    return found[1].split(", ")


async def _restart(plan: Plan, environment: dict[str, str]) -> dict[str, float]:
    """Restart every worker and gateway; the seconds that each took.

    Raises:
        LaunchError: the command failed.
    """
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "restart", "--all", "--grace", str(plan.grace_s),
        env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), RESTART_S)
    text = said.decode(errors="replace")
    if process.returncode != 0:
        raise LaunchError(f"restart ended with {process.returncode}: {text[-1000:]}")
    took = re.findall(r"^(\S+): serves again after ([\d.]+) s$", text, re.M)
    if len(took) != WORKERS + GATEWAYS:
        raise LaunchError(f"restart says: {text[-1000:]}")
    return {name: float(seconds) for name, seconds in took}


def _processes(folder: Path) -> dict[int, str]:
    """A trial's processes by what they inherited: pid to command line."""
    entry = f"{MARK}={folder}".encode()
    found = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                if entry in (each / "environ").read_bytes().split(b"\0"):
                    command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command:  # a zombie has none
                        found[int(each.name)] = command.strip()
            except OSError:
                continue  # gone meanwhile, or somebody else's
    return found


async def _left(folder: Path) -> tuple[str, ...]:
    """What is left of a cluster when its launcher has ended, after some patience with processes."""
    deadline = time.monotonic() + GONE_S
    while found := _processes(folder):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return (*found.values(), *_files(folder))


def _files(folder: Path) -> list[str]:
    """What a cluster that has ended should not have left in its folders."""
    state = [path.name for path in (folder / "s" / "deepinfer").iterdir() if path.name != "token"]
    return state + [path.name for path in (folder / "r").rglob("session_*")]


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wrong(plan: Plan, trial: Trial) -> list[str]:
    """What was not as promised."""
    if not trial.ended:
        return [trial.trouble.splitlines()[0]]
    found = []
    if trial.exit_code != 0:
        found.append(f"exit code {trial.exit_code}")
    if trial.stop_s > plan.grace_s:
        found.append(f"stopped after {trial.stop_s:.1f} s, grace {plan.grace_s:g} s")
    found += [f"left: {name}" for name in trial.left]
    for phase, book in (("rolling", trial.rolling), ("stopping", trial.stopping)):
        if book is not None:
            found += [f"{phase}: {why}" for why in book["failed"]]
            if book["changed"]:
                found.append(f"{phase}: {book['changed']} answers are others")
    if trial.rolling is not None and trial.rolling["refused"]:
        found += [f"rolling: refused: {why}" for why in trial.rolling["refusals"]]
    return found


def figures(plan: Plan, trials: Sequence[Trial]) -> dict[str, Any]:
    """The result without its provenance."""
    ended = [trial for trial in trials if trial.ended]
    rolled = [trial for trial in ended if trial.rolling is not None]
    stops_s = [trial.stop_s for trial in ended]
    took = {
        kind: [s for t in rolled for n, s in (t.restarted or {}).items() if n.startswith(kind)]
        for kind in ("worker", "gateway")
    }
    return {
        "plan": _shown(plan),
        "trials": len(trials),
        "wrong": sum(bool(wrong(plan, trial)) for trial in trials),
        "stops": {
            "stops": len(ended),
            "in_grace": sum(t.exit_code == 0 and t.stop_s <= plan.grace_s for t in ended),
            "running": sum(trial.running for trial in ended),
            **_sums([trial.stopping for trial in ended]),
            "left_over": sum(len(trial.left) for trial in ended),
            **_spread("stop", stops_s),
        },
        "rolling": {
            "rolling_restarts": len(rolled),
            "processes": sum(len(trial.restarted or {}) for trial in rolled),
            **_sums([trial.rolling for trial in rolled]),
            **_spread("worker", took["worker"]),
            **_spread("gateway", took["gateway"]),
            "longest_gap_s": max([t.rolling["longest_gap_s"] for t in rolled if t.rolling] or [0]),
        },
        "troubles": [f"{t.number}: {why}" for t in trials for why in wrong(plan, t)],
        "rows": [asdict(trial) for trial in trials],
    }


def _sums(books: Sequence[dict[str, Any] | None]) -> dict[str, int]:
    there = [book for book in books if book is not None]
    names = ("finished", "tokens", "changed", "reconnects", "swaps", "refused")
    sums = {name: sum(book[name] for book in there) for name in names}
    return sums | {"failed": sum(len(book["failed"]) for book in there)}


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_p50_s": None, f"{name}_max_s": None}
    return {f"{name}_p50_s": percentile(values, 0.5), f"{name}_max_s": max(values)}


def _line(trial: Trial) -> str:
    if not trial.ended:
        return f"trial {trial.number}: {trial.trouble}"
    assert trial.stopping is not None
    said = f"trial {trial.number}: {trial.running} running, stopped in {trial.stop_s:.1f} s"
    if trial.rolling is not None:
        rolled = trial.rolling
        said += f"; restarts: {rolled['finished']} finished, {len(rolled['failed'])} failed"
    return said


def _shown(plan: Plan) -> dict[str, Any]:
    """The plan as the result has it: a model is the same wherever it lies."""
    return asdict(plan) | {"model": Path(plan.model).name}


def _command(plan: Plan) -> str:
    words = " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
        for name, value in (
            ("model", plan.model), ("times", plan.times), ("rolling", plan.rolling),
            ("grace", plan.grace_s), ("streams", plan.streams), ("max-tokens", plan.max_tokens),
            ("blocks", plan.blocks), ("seed", plan.seed),
        )
    )  # fmt: skip
    return f"deepinfer bench stops {words}"


def _read(path: Path, plan: Plan) -> list[Trial]:
    """The trials of a result of the same plan; those that came to no end are run again.

    Raises:
        LaunchError: it is of another plan.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["plan"] != _shown(plan):
        raise LaunchError(f"{path} is of another plan: {found['plan']}: name another --output")
    trials = [Trial(**row | {"left": tuple(row["left"])}) for row in found["rows"]]
    return [trial for trial in trials if trial.ended]
