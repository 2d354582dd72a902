"""Text of requests: what stop strings are looked for in, and what each stream shows.

Both are functions of a choice's tokens alone, token by token, so a stream that begins behind
token k shows exactly what the stream before it had not shown.
"""

from __future__ import annotations

from deepinfer.gateway.core.events import Scan, Scanned, StopMatched
from deepinfer.kvstore.core.ids import RequestId, Seq
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord
from deepinfer.text.stream import TextStream
from deepinfer.text.tokenizer import Tokenizer


def text_of(tokenizer: Tokenizer, record: RequestRecord, *, continues_text: bool) -> TextStream:
    """An empty text of one choice of a request."""
    sampling = record.sampling
    return TextStream(
        tokenizer,
        sampling.stop,
        sampling.skip_special_tokens,
        sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        continues_text=continues_text,
    )


class ChoiceText:
    """What one stream shows of one choice, behind the tokens that its client has."""

    def __init__(self, text: TextStream, record: RequestRecord, received: tuple[int, ...]) -> None:
        self._text = text
        self._record = record
        self._last = received[-1] if received else None
        text.extend(received)

    def push(self, token_ids: tuple[int, ...]) -> str:
        """The text that these tokens make safe to show."""
        if token_ids:
            self._last = token_ids[-1]
        return self._text.extend(token_ids)

    def finish(self) -> str:
        """The rest of the text."""
        return self._text.finish()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.stop_string

    def stop_token(self, reason: FinishReason) -> int | None:
        """The stop token that ended it, if one did."""
        stopped = reason is FinishReason.STOP and self.stop_string is None
        return self._last if stopped and self._last in self._record.stop_token_ids else None


class Scanner:
    """Answers ``Scan``: looks for stop strings in the tokens of every request that has some."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[RequestId, tuple[RequestRecord, bool]] = {}
        self._texts: dict[Seq, TextStream] = {}

    def add(self, record: RequestRecord, *, continues_text: bool) -> None:
        """Make a request known before the core asks for a scan of it."""
        if record.sampling.stop:
            self._requests[record.request] = record, continues_text

    def forget(self, request: RequestId) -> None:
        """The request's record is gone."""
        known = self._requests.pop(request, None)
        if known is not None:
            for seq in known[0].seqs():
                self._texts.pop(seq, None)

    def scan(self, scan: Scan) -> Scanned | StopMatched:
        """Scan what follows the tokens scanned so far."""
        if scan.start == 0:
            record, continues_text = self._requests[scan.seq.request]
            self._texts[scan.seq] = text_of(self._tokenizer, record, continues_text=continues_text)
        text = self._texts[scan.seq]
        text.extend(scan.token_ids)
        if text.stopped:
            return StopMatched(scan.seq, text.tokens)
        return Scanned(scan.seq, scan.start + len(scan.token_ids))
