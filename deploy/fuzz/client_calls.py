"""What a gateway answers, at the client: a stream of responses, whole requests long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from deepinfer.client.core.config import ClientConfig
from deepinfer.client.driver import Driver
from deepinfer.client.errors import DeepInferError
from deepinfer.deploy.fuzz.shapes import Proto, Records, recorded, records
from deepinfer.deploy.fuzz.target import Case, Target
from deepinfer.proto import inference_pb2

_TURNS: Final = 4
_CONFIG: Final = ClientConfig(
    give_up_ms=1,
    connect_give_up_ms=1,
    accept_timeout_ms=1,
    abort_accept_ms=1,
    backoff_first_ms=1,
    backoff_max_ms=1,
)


class _Call:
    """One stream's responses; it ends with the last, or stays open."""

    def __init__(self, responses: Sequence[inference_pb2.GenerateResponse], *, ends: bool) -> None:
        self._responses = responses
        self._ends = ends

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for response in self._responses:
            yield response
        if not self._ends:
            await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Nothing is sent any more anyway."""


class _Channels:
    """One endpoint. The first stream is the input's; later ones say nothing, and stay open."""

    endpoints = ("gateway:1",)
    metadata = ()

    def __init__(self, call: _Call) -> None:
        self._calls = [call]

    def stub(self, _: str) -> Any:
        return SimpleNamespace(Generate=self._stream, Resume=self._stream, Abort=self._abort)

    def secure(self, _: str) -> bool:
        return False

    def _stream(self, _: object, **__: object) -> _Call:
        return self._calls.pop() if self._calls else _Call((), ends=False)

    async def _abort(self, _: object, **__: object) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse()


def _request() -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text="Hi", include_events=True)
    sampling = request.sampling_params
    sampling.n, sampling.logprobs, sampling.prompt_logprobs = 2, 1, 0
    return request


@contextmanager
def _opened(_: Path) -> Iterator[Case]:
    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[Any]] = []
    failed: list[BaseException] = []

    def make(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **how: Any) -> Any:
        task = asyncio.Task(work, loop=loop, **how)
        tasks.append(task)
        return task

    loop.set_task_factory(cast("Any", make))  # a protocol of typeshed's that has no name here
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))

    async def case(data: bytes) -> None:
        responses = []
        for _, message in records(data):
            try:
                responses.append(inference_pb2.GenerateResponse.FromString(message))
            except DecodeError:
                break  # gRPC ends the call
        channels: Any = _Channels(_Call(responses, ends=len(data) % 2 == 0))
        driver = Driver(channels, _request(), _CONFIG, lambda _: None)
        for _ in range(_TURNS + len(responses)):
            await asyncio.sleep(0)
        await driver.close()
        try:
            while await driver.next() is not None:
                pass
            driver.completion()
        except DeepInferError:
            pass  # what it says of a request that ended badly

    def run(data: bytes) -> None:
        tasks.clear()
        failed.clear()
        loop.run_until_complete(case(data))
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if failed:
            raise failed[0]

    try:
        yield run
    finally:
        loop.close()


def _seeds() -> list[bytes]:
    logprobs = {"token_ids": [70, 71], "token_logprobs": [-0.5, -1.0], "token_bytes": [b"F", b"G"]}
    said: list[dict[str, Any]] = [
        {"accepted": {"request_id": "r", "resume_key": "k", "prompt_tokens": 3, "seed": 4}},
        {"prompt": {"position": 1, "logprobs": logprobs}},
        {"notice": {"kind": 2, "index": 1, "worker": "worker-0", "number": 1}},
        {"chunk": {"token_ids": [70, 71], "text": "FG", "output_logprobs": logprobs}},
        {"chunk": {"token_ids": [72], "index": 1, "text": "H", "precisions": b"\1"}},
        {"complete": {"finish_reason": "length", "prompt_tokens": 3, "completion_tokens": 2}},
        {"complete": {"finish_reason": "stop", "completion_tokens": 1, "index": 1, "text": "!"}},
    ]
    made = [inference_pb2.GenerateResponse(**each).SerializeToString() for each in said]
    return [recorded([(0, message) for message in made[:count]]) for count in (7, 4, 1)]


TARGETS: Final = (
    Target(
        name="responses",
        about="a gateway's stream of responses, at the client",
        seeds=_seeds,
        shape=Records([Proto(inference_pb2.GenerateResponse)]),
        open=_opened,
        errors=(),
    ),
)
"""Those of this module."""
