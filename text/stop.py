"""Stop strings, across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, except what may turn out to begin a stop string, up to the first that does.

    The text is read character by character, so where it was cut into pieces never matters: it
    ends at the first character that completes any stop string; if several end there, the longest
    counts. Each stop string is followed by its Knuth–Morris–Pratt automaton: constant amortised
    work for a character, however the strings repeat themselves.
    """

    __slots__ = ("_fallbacks", "_held", "_include", "_matched", "_stops", "match")

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        """Look for any of ``stop``; raises ValueError for an empty string among them."""
        if not all(stop):
            raise ValueError(f"stop = {list(stop)!r}: must be non-empty strings")
        # Longest first: of those that end at one character, the first found is the longest.
        self._stops = tuple(sorted(dict.fromkeys(stop), key=lambda text: (-len(text), text)))
        self._fallbacks = tuple(_prefix_function(text) for text in self._stops)
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._include = include_stop
        self._held = ""
        self.match: str | None = None
        """The stop string that ended the text, once one has."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take more text and return what is now safe to show.

        Stop strings that end within ``text`` are passed over if not ``armed``. After a match
        the rest is swallowed: returns the empty string from then on.
        """
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None and armed:
                self.match = stop
                self._held = ""
                return pending[: end if self._include else end - len(stop)]
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """Return what was held back: the text ended, so no stop string will complete it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Follow every automaton by one character; return the longest string completed, if any."""
        completed = None
        for i, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = fallback[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                completed = completed or stop
                matched = fallback[-1]
            self._matched[i] = matched
        return completed


def _prefix_function(text: str) -> tuple[int, ...]:
    """For each prefix of ``text``: the length of its longest proper prefix that is its suffix."""
    lengths = [0] * len(text)
    for i in range(1, len(text)):
        matched = lengths[i - 1]
        while matched and text[i] != text[matched]:
            matched = lengths[matched - 1]
        lengths[i] = matched + (text[i] == text[matched])
    return tuple(lengths)
