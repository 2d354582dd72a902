"""A real gateway and the real SDK over gRPC: streams, text, stops, and what a request may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from deepinfer.client import (
    Accepted,
    DeadlineExceeded,
    Delta,
    Finished,
    InvalidRequest,
    ModelNotFound,
    Notice,
    ResourceExhausted,
    Unauthenticated,
)
from deepinfer.gateway.core.config import GatewayConfig
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import World, eventually, run_in_world

ANSWER = "Grüße aus der Küche: the cat — 猫 — sat on the mat, END of story. 🐈 and more."

Test: TypeAlias = Callable[[World], Awaitable[None]]
Live: TypeAlias = Callable[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """Runs an asynchronous test in a world of its own."""
    with asyncio.Runner() as runner:

        def run(test: Test, config: GatewayConfig | None = None) -> None:
            run_in_world(runner, folder, test, answer=ANSWER, config=config)

        yield run


def test_a_stream_brings_every_token_once_and_whole_characters(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client() as client, client.stream("Hello", logprobs=0) as stream:
            events = [event async for event in stream]
        assert isinstance(events[0], Accepted)
        assert events[0].prompt_tokens == len(b"Hello")
        assert isinstance(events[-1], Finished)
        deltas = [event for event in events if isinstance(event, Delta)]
        choice = events[-1].choice
        assert [i for d in deltas for i in d.token_ids] == world.worker.answer
        assert "".join(d.text for d in deltas) + events[-1].text == ANSWER == choice.text
        assert choice.token_ids == tuple(world.worker.answer)
        assert choice.finish_reason == "stop"
        assert [p.logprob for p in choice.logprobs] == [-0.5] * len(ANSWER.encode())
        assert b"".join(p.token_bytes for p in choice.logprobs) == ANSWER.encode()
        assert choice.timings.ttft_s is not None
        assert choice.timings.gateway_ttft_s is not None
        assert len(choice.timings.intervals_s) == len(choice.token_ids) - 1
        await eventually(lambda: not world.controller.levels)

    live(test)


def test_generate_chat_models_and_status(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client() as client:
            short = await client.generate([1, 2, 3], max_tokens=5)
            assert short.token_ids == tuple(world.worker.answer[:5])
            assert short.finish_reason == "length"
            assert short.prompt_tokens == 3
            answer = await client.chat([{"role": "user", "content": "Hi"}])
            assert answer.text == ANSWER
            prompt = "<|start|>user\nHi<|end|><|start|>assistant\n"
            assert answer.prompt_tokens == len(world.tokenizer.encode(prompt))
            (model,) = await client.models()
            assert (model.id, model.has_chat_template) == ("bytes", True)
            with pytest.raises(ModelNotFound):
                await client.generate("x", model="other")
            counted = (await client.status())["gateway"]["counters"]
            assert counted["deepinfer_requests_accepted_total"] == 2
            assert counted['deepinfer_requests_refused_total{reason="unknown_model"}'] == 1
            assert world.gateway.shell is not None
            assert counted.keys() <= world.gateway.shell.metrics().keys(), "the metrics' names"

    live(test)


def test_several_choices(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client() as client:
            completion = await client.generate("x", n=3, max_tokens=20)
        assert [c.token_ids for c in completion.choices] == [tuple(world.worker.answer[:20])] * 3
        assert completion.completion_tokens == 60

    live(test)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_text_and_tokens(live: Live, include: bool) -> None:
    async def test(world: World) -> None:
        async with world.client() as client:
            completion = await client.generate(
                "x", stop=["END", "never"], include_stop_str_in_output=include
            )
        before = ANSWER[: ANSWER.index("END")]
        assert completion.text == before + ("END" if include else "")
        assert completion.token_ids == tuple(world.worker.answer[: len((before + "END").encode())])
        assert completion.finish_reason == "stop"
        assert completion.choices[0].matched_stop == "END"
        # The worker would have gone on: it is told to stop.
        await eventually(lambda: all(run.dropped for run in world.worker.runs.values()))

    live(test)


def test_a_stop_token_is_named(live: Live) -> None:
    async def test(world: World) -> None:
        comma = world.tokenizer.encode(",")[0]
        world.worker.answer = world.worker.answer[: world.worker.answer.index(comma) + 1]
        async with world.client() as client:
            completion = await client.generate("x", stop_token_ids=[comma])
        assert completion.choices[0].matched_stop == comma

    live(test)


def test_notices_and_swap_stats(live: Live) -> None:
    async def test(world: World) -> None:
        worker = world.worker
        worker.pace_s = 3600.0
        async with world.client() as client, client.stream("x", include_events=True) as stream:
            await eventually(lambda: any(r.limit for r in worker.runs.values()))
            (seq, run), _ = next(iter(worker.runs.items()))
            worker.say(seq, run, 0, worker.answer[:2])
            worker.notice(seq, run, 0, "SWAPPED_OUT", blocks=3, payload_bytes=900, copy_us=1500)
            worker.notice(seq, run, 0, "SWAPPED_OUT", blocks=3, payload_bytes=900, copy_us=1500)
            await asyncio.sleep(0.1)
            worker.notice(seq, run, 1, "RESUMED", blocks=3, payload_bytes=900, copy_us=2500)
            worker.say(seq, run, 2, worker.answer[2:], "stop")
            events = [event async for event in stream]
        notices = [event for event in events if isinstance(event, Notice)]
        assert [n.kind for n in notices] == ["swapped_out", "resumed"]
        assert (notices[0].store, notices[0].payload_bytes) == ("store-0", 900)
        last = events[-1]
        assert isinstance(last, Finished)
        swaps = last.choice.swaps
        assert (swaps.swaps, swaps.resumes, swaps.offload_bytes) == (1, 1, 900)
        assert (swaps.offload_s, swaps.reload_s) == (0.0015, 0.0025)
        assert swaps.stall_s > 0

    live(test)


def test_a_deadline_ends_it_with_what_there_is(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 0.05
        async with world.client() as client:
            with pytest.raises(DeadlineExceeded) as caught:
                await client.generate("x", deadline_s=0.4)
        partial = caught.value.completion
        assert partial.finish_reason == "deadline"
        assert 0 < len(partial.token_ids) < len(world.worker.answer)
        await eventually(lambda: world.controller.cancelled == world.seqs())

    live(test)


def test_a_request_that_never_fits_fails_with_both_numbers(live: Live) -> None:
    async def test(world: World) -> None:
        world.controller.reject_next = (9, 8)
        async with world.client() as client:
            with pytest.raises(ResourceExhausted, match=r"needs 9 KV blocks.*pool has 8"):
                await client.generate("x")

    live(test)


def test_more_requests_than_the_bound_are_refused(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 3600.0
        async with world.client() as client, client.stream("x") as stream:
            await anext(stream)
            with pytest.raises(ResourceExhausted, match="max_live_requests = 1"):
                await client.generate("y")

    live(test, GatewayConfig(max_live_requests=1))


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature", "between 0 and 100"),
        ({"top_p": 0.0}, "sampling_params.top_p", "above 0 and at most 1"),
        ({"n": 65}, "sampling_params.n", "between 1 and 64"),
        ({"stop": [""]}, "sampling_params.stop", "non-empty"),
        ({"stop": ["x" * 2000]}, "sampling_params.stop[0]", "at most 1024 characters"),
        ({"max_tokens": 600}, "sampling_params.max_tokens", "at most 511"),
        ({"min_tokens": 9, "max_tokens": 3}, "sampling_params.min_tokens", "max_tokens"),
        ({"stop_token_ids": [9999]}, "sampling_params.stop_token_ids[0]", "from 0 to 258"),
        ({"priority": 2_000_000}, "priority", "1000000"),
        ({"deadline_s": 1e9}, "deadline_ms", "from 1 to"),
        ({"logprobs": 21}, "sampling_params.logprobs", "between 0 and 20"),
        ({"top_k": -1}, "top_k", "-1"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"deadline_s": 0.0}, "deadline_s", "above 0"),
    ],
)
def test_bad_parameters_name_the_field(
    live: Live, options: dict[str, object], field: str, words: str
) -> None:
    async def test(world: World) -> None:
        async with world.client() as client:
            with pytest.raises(InvalidRequest, match=words) as caught:
                await client.generate("x", **options)  # type: ignore[arg-type]  # on purpose
            assert list(caught.value.fields) == [field]
            assert words in caught.value.fields[field]
        assert not world.worker.runs

    live(test)


def test_bad_prompts(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client() as client:
            for prompt, words in (
                ("", "at least one token"),
                ([], "not an empty list"),
                ([-1], "prompt"),
                ([259], r"tokenized.input_ids\[0\] = 259: must be from 0 to 258"),
                ("x" * 512, "'512 tokens': must be at most 511 tokens.*context is 512"),
                ([{"role": "king", "content": "x"}], r"messages\[0\].role"),
                ([{"role": "user"}], r"messages\[0\]"),
                ("\ud800", "text"),
                (b"x", "prompt"),
            ):
                with pytest.raises(InvalidRequest, match=words):
                    await client.generate(prompt)
            with pytest.raises(InvalidRequest, match=r"messages = 'hello': must be a list of"):
                await client.chat("hello")  # type: ignore[arg-type]
            with pytest.raises(ModelNotFound, match="'bytes' is"):
                await client.generate("x", model="another")

    live(test)


def test_no_one_gets_in_without_the_token(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client(token="wrong") as client:
            with pytest.raises(Unauthenticated, match="token is not this cluster's"):
                await client.generate("x")
            with pytest.raises(Unauthenticated):
                await client.status()
            with pytest.raises(Unauthenticated):
                await client.models()
            with pytest.raises(Unauthenticated):
                await client.abort("r", resume_key="k")

    live(test)
