"""Random mixes of requests: what each client does is drawn from a seed, and what it got is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from deepinfer.client import AsyncClient, DeadlineExceeded, Delta, Finished, Options
from deepinfer.client.channels import Channels
from deepinfer.client.request import build_request
from deepinfer.proto import inference_pb2

PROMPT_MAX = 120
OUTPUT_MAX = 60
SHARED = tuple(random.Random(1).randrange(256) for _ in range(48))
"""The beginning of a third of the prompts: three blocks of a prefix cache."""


@dataclass(slots=True)
class Got:
    """One request and what its client has of it."""

    what: str
    """What the client did, for messages."""
    prompt: tuple[int, ...]
    sampling: Options
    tokens: list[list[int]] = field(default_factory=list)
    """Of each choice."""
    whole: bool = False
    """Whether the answer came to its end; otherwise it is the beginning of one."""

    def check(self, expected: tuple[tuple[int, ...], ...]) -> None:
        """Raise AssertionError unless every token is the right one."""
        for choice, (held, right) in enumerate(zip(self.tokens, expected, strict=True)):
            upto = right if self.whole else right[: len(held)]
            assert tuple(held) == upto, f"{self.what}, choice {choice}: {held} and not {right}"


class RawStream:
    """A Generate or Resume stream without the SDK: it neither comes back nor aborts by itself."""

    def __init__(self, channels: Channels, got: Got) -> None:
        self._channels = channels
        self._request = build_request(got.prompt, got.sampling)
        self._got = got
        self._call: Any = None
        self._messages: AsyncIterator[inference_pb2.GenerateResponse]
        self.accepted = inference_pb2.Accepted()
        got.tokens = [[]]

    async def generate(self, endpoint: str) -> None:
        """Send the request, and wait until it is accepted."""
        stub = self._channels.stub(endpoint)
        self._call = stub.Generate(
            self._request, metadata=self._channels.metadata, wait_for_ready=True
        )
        self._messages = aiter(self._call)
        first = await anext(self._messages)
        self.accepted = first.accepted
        assert self.accepted.request_id, first

    async def resume(self, endpoint: str, claim: int, *, key: str | None = None) -> None:
        """Go on behind what is here; with another ``key`` than the request's, if one is given."""
        request = inference_pb2.ResumeRequest(
            request_id=self.accepted.request_id,
            resume_key=self.accepted.resume_key if key is None else key,
            claim=claim,
            request=self._request,
            progress=[inference_pb2.ChoiceProgress(index=0, token_ids=self._got.tokens[0])],
            arrival_ms=self.accepted.arrival_ms,
        )
        stub = self._channels.stub(endpoint)
        self._call = stub.Resume(request, metadata=self._channels.metadata, wait_for_ready=True)
        self._messages = aiter(self._call)

    async def read(self, *, tokens: int = OUTPUT_MAX + 1, pause_s: float = 0.0) -> None:
        """Read until so many tokens are here, or the answer is; ``pause_s`` after each message."""
        while not self._got.whole and len(self._got.tokens[0]) < tokens:
            response = await anext(self._messages, None)
            assert response is not None, f"{self._got.what}: ended before its answer did"
            self._take(response)
            await asyncio.sleep(pause_s)

    async def ended_as(self) -> grpc.StatusCode:
        """Read to the end, whatever that is."""
        try:
            async for response in self._messages:
                self._take(response)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def vanish(self) -> None:
        """Break the stream, as a client does that dies."""
        self._call.cancel()

    def _take(self, response: inference_pb2.GenerateResponse) -> None:
        held = self._got.tokens[0]
        match response.WhichOneof("response"):
            case "chunk":
                assert response.chunk.position == len(held), f"{self._got.what}: a gap or an echo"
                held += response.chunk.token_ids
            case "complete":
                complete = response.complete
                assert complete.finish_reason in ("stop", "length"), complete
                assert complete.completion_tokens == len(held), complete
                self._got.whole = True


class Mix:
    """Draws requests and their clients' behaviour from ``rng`` and runs them at once."""

    def __init__(
        self, rng: random.Random, client: AsyncClient, channels: Channels, grace_s: float
    ) -> None:
        self._rng = rng
        self._client = client
        self._channels = channels
        self._grace_s = grace_s

    async def run(self) -> list[Got]:
        """Run 2 to 7 requests, begun within 0.3 s of each other; return what came of each."""
        kinds: list[tuple[Callable[[Got, random.Random], Awaitable[None]], int]] = [
            (self._reads, 3),
            (self._cancels, 2),
            (self._has_a_deadline, 2),
            (self._vanishes, 2),
            (self._comes_back, 2),
            (self._is_copied, 2),
            (self._resumes_twice, 2),
            (self._reads_slowly, 2),
            (self._asks_again, 1),
        ]
        clients = []
        for act in self._rng.choices(
            [kind for kind, _ in kinds],
            weights=[weight for _, weight in kinds],
            k=self._rng.randint(2, 7),
        ):
            name = act.__name__.strip("_")
            got = self._draw(name, choices=self._rng.choice((1, 1, 2)) if name == "reads" else 1)
            clients.append((act, got, random.Random(self._rng.random()), self._rng.random() * 0.3))

        async def one(
            act: Callable[[Got, random.Random], Awaitable[None]],
            got: Got,
            rng: random.Random,
            after_s: float,
        ) -> Got:
            await asyncio.sleep(after_s)
            async with asyncio.timeout(60):
                await act(got, rng)
            return got

        return list(await asyncio.gather(*(one(*client) for client in clients)))

    def _draw(self, what: str, choices: int) -> Got:
        rng = self._rng
        prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, PROMPT_MAX)))
        if rng.random() < 0.3:
            prompt = (*SHARED, *prompt)[:PROMPT_MAX]
        sampling: Options = {"max_tokens": rng.randint(1, OUTPUT_MAX), "n": choices}
        if rng.random() < 0.5:
            sampling["temperature"] = 0.0
        else:
            # Powers of two, for the wire carries single precision.
            sampling["temperature"], sampling["top_p"] = 0.75, 0.875
            sampling["seed"] = rng.randrange(1 << 32)
        return Got(what, prompt, sampling)

    def _anywhere(self, rng: random.Random) -> str:
        return rng.choice(self._channels.endpoints)

    async def _reads(self, got: Got, rng: random.Random) -> None:
        completion = await self._client.generate(got.prompt, **got.sampling)
        got.tokens = [list(choice.token_ids) for choice in completion.choices]
        got.whole = True

    async def _cancels(self, got: Got, rng: random.Random) -> None:
        after = rng.randint(0, got.sampling["max_tokens"])
        got.tokens = [[]]
        async with self._client.stream(got.prompt, **got.sampling) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    got.tokens[0] += event.token_ids
                if len(got.tokens[0]) >= after or isinstance(event, Finished):
                    break

    async def _has_a_deadline(self, got: Got, rng: random.Random) -> None:
        options: Options = {**got.sampling, "deadline_s": rng.choice((0.02, 0.1, 0.3, 1.0))}
        try:
            completion = await self._client.generate(got.prompt, **options)
            got.whole = True
        except DeadlineExceeded as late:
            completion = late.completion
        got.tokens = [list(completion.token_ids)]

    async def _vanishes(self, got: Got, rng: random.Random) -> None:
        stream = RawStream(self._channels, got)
        await stream.generate(self._anywhere(rng))
        await stream.read(tokens=rng.randint(0, got.sampling["max_tokens"]))
        stream.vanish()

    async def _comes_back(self, got: Got, rng: random.Random) -> None:
        """At any gateway, in time or after its request was given up."""
        stream = RawStream(self._channels, got)
        await stream.generate(self._anywhere(rng))
        for claim in range(1, rng.randint(2, 4)):
            await stream.read(tokens=rng.randint(0, got.sampling["max_tokens"]))
            if got.whole:
                return
            stream.vanish()
            await asyncio.sleep(rng.choice((0.0, 0.5, 1.5)) * self._grace_s)
            await stream.resume(self._anywhere(rng), claim)
        await stream.read()

    async def _is_copied(self, got: Got, rng: random.Random) -> None:
        """Another client names its request id: it is refused, and this one does not notice."""
        stream = RawStream(self._channels, got)
        await stream.generate(self._anywhere(rng))
        copy = RawStream(self._channels, Got("a copy", got.prompt, got.sampling))
        copy.accepted = stream.accepted
        await copy.resume(self._anywhere(rng), 9, key="0" * 64)
        assert await copy.ended_as() is grpc.StatusCode.PERMISSION_DENIED
        abort = inference_pb2.AbortRequest(
            request_id=stream.accepted.request_id, resume_key="0" * 64, claim=9
        )
        stub = self._channels.stub(self._anywhere(rng))
        with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
            await stub.Abort(abort, metadata=self._channels.metadata, wait_for_ready=True)
        await stream.read()

    async def _resumes_twice(self, got: Got, rng: random.Random) -> None:
        """Two Resumes of one request: the older stream has to give way."""
        stream = RawStream(self._channels, got)
        await stream.generate(self._anywhere(rng))
        await stream.read(tokens=rng.randint(0, got.sampling["max_tokens"]))
        older = Got("an older stream", got.prompt, got.sampling)
        first = RawStream(self._channels, older)
        first.accepted = stream.accepted
        older.tokens = [list(got.tokens[0])]
        await first.resume(self._anywhere(rng), 1)
        code = asyncio.create_task(first.ended_as())
        await asyncio.sleep(rng.choice((0.0, 0.02, 0.1)))
        got.whole = False
        await stream.resume(self._anywhere(rng), 2)
        await stream.read()
        # It may have come to its end before the newer one was heard of.
        assert await code in (grpc.StatusCode.ABORTED, grpc.StatusCode.OK)
        assert older.tokens[0] == got.tokens[0][: len(older.tokens[0])]

    async def _reads_slowly(self, got: Got, rng: random.Random) -> None:
        stream = RawStream(self._channels, got)
        await stream.generate(self._anywhere(rng))
        await asyncio.sleep(rng.choice((0.0, 0.5)))
        await stream.read(tokens=20, pause_s=0.03)
        await stream.read()

    async def _asks_again(self, got: Got, rng: random.Random) -> None:
        """For a finished answer, from a part of it that it has."""
        stream = RawStream(self._channels, got)
        endpoint = self._anywhere(rng)
        await stream.generate(endpoint)
        await stream.read()
        del got.tokens[0][rng.randint(0, len(got.tokens[0])) :]
        got.whole = False
        await stream.resume(endpoint, 1)
        await stream.read()
