"""`deepinfer chat`: a conversation at a terminal, or over a pipe with one turn a line.

Answers go to standard output, everything else to standard error, so that a pipe carries answers
alone.
"""

from __future__ import annotations

import contextlib
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from deepinfer.client import (
    Choice,
    Client,
    DeepInferError,
    Delta,
    Finished,
    InvalidRequest,
    Notice,
    ResourceExhausted,
    Retrying,
)
from deepinfer.deploy.console import check_utf8, standard_input
from deepinfer.deploy.generate import tell_of_retries
from deepinfer.deploy.interrupts import Terminated
from deepinfer.deploy.status import mib

HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt (without TEXT: remove it) and start anew
/stats         what the last answer and the conversation took
/quit          leave; so does Ctrl-D
Ctrl-C stops the answer that is being written and keeps the chat."""
PROMPT = "> "


@dataclass(slots=True)
class Chat:
    """One conversation. ``sampling`` goes with every request as it is."""

    client: Client
    sampling: dict[str, Any]
    out: Console
    err: Console
    system: str = ""
    events: bool = False
    """Whether to tell of swaps while they happen."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """What was said, by the user and the model in turn."""
    answers: list[Choice] = field(default_factory=list)
    """Those that ended by themselves."""
    failed: bool = False
    """Whether the last turn got no answer."""

    def run(self, lines: Iterator[str]) -> None:
        """Take turns until the lines end or say /quit."""
        for line in lines:
            said = line.strip()
            if said == "/quit":
                return
            if said.startswith("/"):
                self._command(said)
            elif said:
                self._turn(said)

    def _command(self, said: str) -> None:
        name, _, rest = said.partition(" ")
        match name:
            case "/reset":
                self.turns.clear()
                self._note("the conversation starts anew")
            case "/system":
                self.system = rest.strip()
                self.turns.clear()
                self._note("system prompt set" if self.system else "no system prompt")
            case "/stats":
                self._stats()
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"unknown command {name}: /help lists them")

    def _turn(self, said: str) -> None:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += [*self.turns, {"role": "user", "content": said}]
        text, choice = "", None
        started_s = time.monotonic()
        self.failed = True
        try:
            check_utf8(said)
            options = self.sampling | {"include_events": True}  # also for its Retrying
            with self.client.stream(messages, **options) as stream:
                for event in stream:
                    if isinstance(event, Delta | Finished):
                        text += event.text
                        self._show(event.text)
                    if isinstance(event, Finished):
                        choice = event.choice
                    elif isinstance(event, Retrying):
                        if text and self.err.is_terminal:
                            self.err.print()
                        tell_of_retries(event, self.err)
                    elif isinstance(event, Notice) and self.events and (told := tell(event)):
                        self._note(f"[{told}; {time.monotonic() - started_s:.1f} s]", before="\n")
        except Terminated:
            raise
        except KeyboardInterrupt:
            self._end_line(text)
            self._note("[aborted]")
        except DeepInferError as error:
            self._end_line(text)
            self.err.print(
                f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            if self.turns and isinstance(error, InvalidRequest | ResourceExhausted):
                self._note("[the conversation may have become too long: /reset forgets it]")
        else:
            self._end_line(text)
            assert choice is not None, "the SDK raises or ends every choice"
            self.answers.append(choice)
            self.failed = False
            self._note(f"[{summary(choice)}]")
        if text or not self.failed:
            # Also one that was cut short: the user has read it, and may refer to it.
            self.turns += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": text},
            ]

    def _stats(self) -> None:
        if not self.answers:
            self._note("no answer yet")
            return
        tokens = sum(len(answer.token_ids) for answer in self.answers)
        swaps = sum(answer.swaps.swaps for answer in self.answers)
        stall_s = sum(answer.swaps.stall_s for answer in self.answers)
        self._note(f"last: {summary(self.answers[-1])}")
        self._note(
            f"all: {len(self.answers)} answers, {tokens} tokens, swapped out {swaps} times, "
            f"{stall_s:.2f} s in swaps; {len(self.turns)} messages are kept"
        )

    def _show(self, text: str) -> None:
        self.out.file.write(printable(text) if self.out.is_terminal else text)
        self.out.file.flush()

    def _end_line(self, text: str) -> None:
        if not text.endswith("\n"):
            self._show("\n")

    def _note(self, line: str, before: str = "") -> None:
        if before and self.err.is_terminal:
            self.err.print()
        self.err.print(line, style="dim", markup=False, highlight=False)


def tell(notice: Notice) -> str:
    """What happened, in a few words; nothing of the first placement."""
    size = f"{notice.blocks} blocks, {mib(notice.payload_bytes)} in {notice.copy_s * 1e3:.1f} ms"
    match notice.kind:
        case "swapped_out":
            return f"swapped out of {notice.worker} to {notice.store}: {size}"
        case "resumed":
            return f"back on {notice.worker} from {notice.store}: {size}"
        case "swap_failed":
            return f"stays on {notice.worker}: the swap did not go through"
        case "recomputed":
            return f"computed again on {notice.worker}"
        case _:
            return ""


def summary(choice: Choice) -> str:
    """How an answer ended and how fast it came."""
    timings, swaps = choice.timings, choice.swaps
    parts = [choice.finish_reason, f"{len(choice.token_ids)} tokens"]
    if timings.ttft_s is not None:
        parts.append(f"first after {timings.ttft_s:.2f} s")
    if timings.tpot_s:
        parts.append(f"{1 / timings.tpot_s:.1f} tok/s")
    if swaps.swaps:
        parts.append(f"swapped out {swaps.swaps} times ({swaps.stall_s:.2f} s)")
    return ", ".join(parts)


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def typed_lines(console: Console) -> Iterator[str]:
    """What is typed at a prompt, with editing and history, until Ctrl-D; Ctrl-C clears the line."""
    with contextlib.suppress(ImportError):  # a Python without it has no editing
        import readline  # noqa: F401  # importing it gives input() editing and history
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            console.print()
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D leaves", style="dim")


def chat_lines(console: Console) -> Iterator[str]:
    """Typed lines at a terminal; the lines of standard input elsewhere."""
    lines = standard_input()
    return typed_lines(console) if lines.isatty() else iter(lines)
