"""What `bench soak` asks of a cluster: bursts of requests, each read, cancelled or held up.

========  ========================================================================================
end       read as fast as it comes, to the end
stop      the same, with a stop string that its text comes to
cancel    aborted after some of its tokens
early     aborted after some time, mostly before its first token
slow      read with pauses over a connection that takes few bytes ahead, so that the gateway waits
========  ========================================================================================

Whatever a stream brings is held against what an unpressed run said.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from deepinfer.client import (
    Aborted,
    AsyncClient,
    AsyncStream,
    DeepInferError,
    Delta,
    Finished,
    Notice,
)
from deepinfer.client.request import build_request
from deepinfer.deploy.bench.known import Heard, Known
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from deepinfer.proto.bearer import bearer

KINDS = ("end", "stop", "cancel", "early", "slow")
WEIGHTS = (50, 15, 12, 11, 12)
"""How often each kind is drawn, in percent."""
SMALL_WINDOW = (
    # So few bytes are taken before they are asked for: the gateway soon cannot write any more.
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_http_proxy", 0),
)
EARLY_S = 0.08
"""An early cancel comes within so long."""
SLOW_READ_S = 0.03
"""Longest pause of a slow reader between two messages."""
FAULTS_MAX = 50
"""So many are kept in words; all are counted."""


@dataclass(slots=True)
class Tally:
    """What has come of it all so far."""

    streams: Counter[str] = field(default_factory=Counter)
    """By kind."""
    complete: int = 0
    cancelled: int = 0
    tokens: int = 0
    swaps: int = 0
    """Swap-outs that streams were told of."""
    resumes: int = 0
    recomputes: int = 0
    wrong: int = 0
    """Streams that brought something else than they should have."""
    failed: int = 0
    """Streams that ended with an error."""
    faults: list[str] = field(default_factory=list)

    def fault(self, words: str) -> None:
        """Keep a wrong or failed stream in words."""
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(words)


class Load:
    """Bursts over one client and one slow connection, both of the first gateway and kept open."""

    def __init__(
        self,
        endpoints: Sequence[str],
        token: str,
        known: Sequence[Known],
        draw: Random,
    ) -> None:
        self.client = AsyncClient(list(endpoints), token=token)
        self._slow = grpc.aio.insecure_channel(endpoints[0], options=SMALL_WINDOW)
        self._token = token
        self._known = known
        self._draw = draw
        self.tally = Tally()

    async def burst(self, streams: int) -> None:
        """Send so many requests at once and see all of them to their ends."""
        kinds = self._draw.choices(KINDS, WEIGHTS, k=streams)
        await asyncio.gather(*(self._one(kind, self._draw.choice(self._known)) for kind in kinds))

    async def close(self) -> None:
        """Close both connections."""
        await self.client.close()
        await self._slow.close(None)

    async def _one(self, kind: str, known: Known) -> None:
        if kind == "stop" and not known.stop:
            kind = "end"
        self.tally.streams[kind] += 1
        right = known.token_ids[: known.stopped_tokens] if kind == "stop" else known.token_ids
        heard = Heard(right)
        try:
            if kind == "slow":
                await self._read_slowly(known, heard)
            else:
                options: dict[str, Any] = {**known.options, "include_events": True}
                if kind == "stop":
                    options["stop"] = known.stop
                async with self.client.stream(known.prompt_ids, **options) as stream:
                    await self._read(kind, known, heard, stream)
        except (DeepInferError, grpc.aio.AioRpcError) as error:
            self.tally.failed += 1
            self.tally.fault(f"{kind}: {type(error).__name__}: {error}")
        self.tally.tokens += heard.tokens
        if heard.wrong:
            self.tally.wrong += 1
            self.tally.fault(f"{kind}: {heard.wrong}")

    async def _read(self, kind: str, known: Known, heard: Heard, stream: AsyncStream) -> None:
        after = self._draw.randint(1, len(known.token_ids)) if kind == "cancel" else None
        timer = None
        if kind == "early":
            delay_s = self._draw.uniform(0, EARLY_S)
            timer = asyncio.get_running_loop().call_later(delay_s, stream.abort)
        try:
            async for event in stream:
                if isinstance(event, Delta):
                    heard.hear(event.position, event.token_ids)
                    if after is not None and heard.tokens >= after:
                        stream.abort()
                elif isinstance(event, Notice):
                    self._note(event.kind)
                elif isinstance(event, Finished):
                    self._ended(kind, known, heard, event)
        except Aborted:
            if kind not in ("cancel", "early"):
                raise
            self.tally.cancelled += 1
        finally:
            if timer is not None:
                timer.cancel()

    def _note(self, kind: str) -> None:
        self.tally.swaps += kind == "swapped_out"
        self.tally.resumes += kind == "resumed"
        self.tally.recomputes += kind == "recomputed"

    def _ended(self, kind: str, known: Known, heard: Heard, event: Finished) -> None:
        """The stream says that it is complete: hold that against what it should be."""
        self.tally.complete += 1
        heard.end(len(heard.right))
        text, reason = known.text, "length"
        if kind == "stop":
            text, reason = known.stopped_text, "stop"
        said = event.choice
        if (said.finish_reason, said.text) != (reason, text) and not heard.wrong:
            heard.wrong = f"{said.finish_reason} {said.text!r}: right is {reason} {text!r}"

    async def _read_slowly(self, known: Known, heard: Heard) -> None:
        request = build_request(known.prompt_ids, {**known.options, "include_events": True})  # type: ignore[typeddict-item]
        stub = inference_pb2_grpc.InferenceStub(self._slow)
        text, ended = "", False
        async for response in stub.Generate(request, metadata=bearer(self._token)):
            match response.WhichOneof("response"):
                case "chunk":
                    heard.hear(response.chunk.position, response.chunk.token_ids)
                    text += response.chunk.text
                case "notice":
                    kind = inference_pb2.Notice.Kind.Name(response.notice.kind)
                    self._note(kind.lower())
                case "complete":
                    text, ended = text + response.complete.text, True
            await asyncio.sleep(self._draw.uniform(0, SLOW_READ_S))
        if ended:
            self.tally.complete += 1
            heard.end(len(heard.right))
            if text != known.text and not heard.wrong:
                heard.wrong = f"{text!r}: right is {known.text!r}"
