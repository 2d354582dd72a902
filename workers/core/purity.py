"""Which of a sequence's KV was computed by FP16 steps that attended nothing but such KV."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kvstore.core.precision import Precision


@dataclass(slots=True)
class Purity:
    """How far the worst tag in the prefix chain is still FP16, at most MIXED, and at most FP8.

    Going along a sequence the worst tag can only become worse, so three places tell all of it::

        |<--- fp16 --->|
        |<--------- mixed ---------->|
        |<------------- fp8 ----------------->|
        |---- FP16 ----|--- MIXED ---|-- FP8 -|-- W8A8 --| computed
    """

    fp16: int = 0
    mixed: int = 0
    fp8: int = 0

    def extend(self, start: int, end: int, tag: Precision) -> None:
        """KV of tokens ``[start, end)``, the next ones, was computed under this tag."""
        if tag is Precision.FP16 and self.fp16 == start:
            self.fp16 = end
        if tag <= Precision.MIXED and self.mixed == start:
            self.mixed = end
        if tag <= Precision.FP8 and self.fp8 == start:
            self.fp8 = end

    def truncate(self, tokens: int) -> None:
        """Only the first ``tokens`` tokens have KV."""
        self.fp16 = min(self.fp16, tokens)
        self.mixed = min(self.mixed, tokens)
        self.fp8 = min(self.fp8, tokens)

    def at(self, tokens: int) -> Precision:
        """The worst tag among the KV of the first ``tokens`` tokens."""
        if tokens <= self.fp16:
            return Precision.FP16
        if tokens <= self.mixed:
            return Precision.MIXED
        return Precision.FP8 if tokens <= self.fp8 else Precision.W8A8

    def check(self, computed: int) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert 0 <= self.fp16 <= self.mixed <= self.fp8 <= computed, f"{self} of {computed} tokens"
