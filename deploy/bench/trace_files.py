"""Recorded arrivals: the CSV of Azure's LLM inference traces, and Mooncake's JSON lines.

Neither holds a prompt's words. Azure tells when a request came and how long its prompt and its
answer were; Mooncake tells besides which blocks of 512 tokens prompts have in common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from deepinfer.deploy.config import ConfigError

AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
HASH_TOKENS: Final = 512
"""Tokens of a prompt that one of Mooncake's ``hash_ids`` stands for."""

LINES_MAX: Final = 1_000_000
LINE_CHARS_MAX: Final = 1 << 20
TOKENS_MAX: Final = 10_000_000
"""Of one prompt or answer."""
HASH_MAX: Final = 2**63 - 1
MS_MAX: Final = 10**13
"""Of a Mooncake timestamp: some centuries."""

_AZURE_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00)?")
_NUMBER: Final = re.compile(r"\d{1,12}")


class Arrival(NamedTuple):
    """One request of a trace."""

    at_ms: float
    """Since the trace's first request."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Of the prompt's blocks of ``HASH_TOKENS`` tokens: equal ids, equal tokens. Empty if the
    trace does not tell."""


class TraceError(ConfigError):
    """A trace that cannot be read: names the file, the line, the field, its value and what is
    allowed."""

    def __init__(self, place: str, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{place}: {field} = {shown}: must be {allowed}")


def read_trace(path: Path, lines_max: int = LINES_MAX) -> tuple[Arrival, ...]:
    """Every request of a trace file, in the order in which they came.

    A file that begins with a ``{`` is Mooncake's (``timestamp`` in ms, ``input_length``,
    ``output_length``, ``hash_ids``); any other must have Azure's header.

    Raises:
        TraceError: a line is not what the format allows, or there are too many or none.
        ConfigError: the file cannot be read as UTF-8.
    """
    arrivals: list[Arrival] = []
    last: Arrival | None = None
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _lines(path, file, lines_max)
            first = next(lines, None)
            if first is None:
                raise TraceError(f"{path}", "lines", 0, "at least one request")
            parse, rest = _format_of(path, first, lines)
            for place, line in rest:
                arrival = parse(place, line)
                if last is not None and arrival.at_ms < last.at_ms:
                    raise TraceError(
                        place, "time", f"{arrival.at_ms:.3f} ms", f"{last.at_ms:.3f} ms or later"
                    )
                last = arrival
                arrivals.append(arrival)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    if not arrivals:
        raise TraceError(f"{path}", "lines", 1, "a header and at least one request")
    begin_ms = arrivals[0].at_ms
    return tuple(arrival._replace(at_ms=arrival.at_ms - begin_ms) for arrival in arrivals)


_Line = tuple[str, str]
"""The place of a line, for errors, and the line."""


def _lines(path: Path, file: Any, lines_max: int) -> Iterator[_Line]:
    number = 0
    while text := file.readline(LINE_CHARS_MAX + 1):
        number += 1
        place = f"{path}:{number}"
        if number > lines_max:
            raise TraceError(place, "lines", number, f"{lines_max} at most")
        if len(text) > LINE_CHARS_MAX:
            raise TraceError(place, "line", text, f"{LINE_CHARS_MAX} characters at most")
        if text.strip():
            yield place, text.strip()


def _format_of(
    path: Path, first: _Line, lines: Iterator[_Line]
) -> tuple[Callable[[str, str], Arrival], Iterator[_Line]]:
    place, text = first
    if text.startswith("{"):

        def all_lines() -> Iterator[_Line]:
            yield first
            yield from lines

        return _mooncake, all_lines()
    if text != AZURE_HEADER:
        allowed = f"{AZURE_HEADER!r} (Azure) or a JSON object (Mooncake)"
        raise TraceError(place, "first line", text, allowed)
    return _azure, lines


def _azure(place: str, text: str) -> Arrival:
    parts = text.split(",")
    if len(parts) != 3:
        raise TraceError(place, "line", text, f"three fields: {AZURE_HEADER}")
    match = _AZURE_TIME.fullmatch(parts[0])
    allowed = "a time such as 2023-11-16 18:17:03.9799600"
    if match is None:
        raise TraceError(place, "TIMESTAMP", parts[0], allowed)
    try:
        second = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError as error:
        raise TraceError(place, "TIMESTAMP", parts[0], allowed) from error
    fraction = int((match[2] or "0").ljust(9, "0")) / 1e6
    lengths = []
    for field, value in zip(("ContextTokens", "GeneratedTokens"), parts[1:], strict=True):
        number = int(value) if _NUMBER.fullmatch(value) else -1
        lengths.append(_checked(place, field, value, number, 0, TOKENS_MAX))
    return Arrival(second.timestamp() * 1000 + fraction, lengths[0], lengths[1])


def _mooncake(place: str, text: str) -> Arrival:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(place, "line", text, f"a JSON object ({error})") from error
    if not isinstance(line, dict):
        raise TraceError(place, "line", text, "a JSON object")
    at_ms = _checked(place, "timestamp", line.get("timestamp"), line.get("timestamp"), 0, MS_MAX)
    lengths = [
        _checked(place, field, line.get(field), line.get(field), 1, TOKENS_MAX)
        for field in ("input_length", "output_length")
    ]
    ids = line.get("hash_ids")
    count = -(-lengths[0] // HASH_TOKENS)
    if not isinstance(ids, list) or len(ids) != count:
        allowed = f"{count} ids, one for each {HASH_TOKENS} tokens of input_length = {lengths[0]}"
        raise TraceError(place, "hash_ids", ids, allowed)
    for i, value in enumerate(ids):
        _checked(place, f"hash_ids[{i}]", value, value, 0, HASH_MAX)
    return Arrival(float(at_ms), lengths[0], lengths[1], tuple(ids))


def _checked(place: str, field: str, value: object, number: Any, least: int, most: int) -> int:
    if type(number) is not int or not least <= number <= most:
        raise TraceError(place, field, value, f"a whole number from {least} to {most}")
    return number
