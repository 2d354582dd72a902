"""What a request may ask for, from the SDK through gateway, controller and worker and back.

The real processes' parts on one loop: a pool too small for the requests together, so that they
are swapped out and come back, in the middle of their prompts too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.client import (
    Accepted,
    AsyncClient,
    Completion,
    Delta,
    Finished,
    InvalidRequest,
    PromptDelta,
    ResourceExhausted,
)
from deepinfer.client.results import TokenLogprob
from deepinfer.gateway import actor
from deepinfer.text.load import load_tokenizer
from deepinfer.text.tokenizer import Tokenizer
from support.local_cluster import TOKEN, LocalCluster, local_cluster, run_on
from support.tiny_model import write_tiny_llama

EOS = 258
PROMPTS = ("hello", "world and", "a third one")
ASK: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 3,
    "logit_bias": {65: 2.5, 66: -100.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def together(cluster: LocalCluster, **options: Any) -> list[Completion]:
    async with cluster.client() as client:
        done = await asyncio.gather(*(client.generate(p, **options) for p in PROMPTS))
    await cluster.until_free()
    return list(done)


def test_log_probabilities_survive_swaps(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with local_cluster(model, blocks=96) as cluster:
            plain = await together(cluster, **ASK)
        async with local_cluster(model, blocks=11, prefill_chunk_tokens=2) as cluster:
            pressed = await together(cluster, **ASK)
        tokenizer = load_tokenizer(model)
        assert sum(c.swaps.swaps for c in plain) == 0
        assert sum(c.swaps.resumes for c in pressed) >= 1
        for one, other, prompt in zip(plain, pressed, PROMPTS, strict=True):
            assert one.token_ids == other.token_ids
            assert one.choices[0].logprobs == other.choices[0].logprobs
            assert one.prompt_logprobs == other.prompt_logprobs
            first, *rest = one.prompt_logprobs
            assert first is None
            assert [p.token_id for p in rest if p] == tokenizer.encode(prompt)[1:]
            assert 66 not in one.token_ids
            for entry in (*rest, *one.choices[0].logprobs):
                check_logprob(entry, tokenizer)

    run_on(runner, test)


def check_logprob(entry: TokenLogprob | None, tokenizer: Tokenizer) -> None:
    assert entry is not None
    assert math.isfinite(entry.logprob)
    assert len(entry.top) in (2, 3)
    assert entry.token_bytes == tokenizer.token_bytes(entry.token_id)
    for one in entry.top:
        assert one.token_bytes == tokenizer.token_bytes(one.token_id)
    values = [one.logprob for one in entry.top]
    assert values == sorted(values, reverse=True)
    assert entry.logprob <= values[0]
    assert math.fsum(map(math.exp, values)) <= 1 + 1e-6
    by_id = {one.token_id: one.logprob for one in entry.top}
    assert by_id.get(entry.token_id, entry.logprob) == entry.logprob


KINDS = {"accepted": Accepted, "prompt": PromptDelta, "tokens": Delta}


@pytest.mark.parametrize("when", KINDS)
def test_a_gateway_that_dies_loses_and_doubles_none(
    model: Path, runner: asyncio.Runner, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "STOP_GRACE_S", None)  # it dies: what it sends is cut off
    prompt = list(range(1, 120))
    options = {**ASK, "max_tokens": 200}

    async def test() -> None:
        async with local_cluster(model, blocks=128) as cluster, cluster.client() as client:
            whole = await client.generate(prompt, **options)
        async with local_cluster(model, blocks=128, gateways=2, prefill_chunk_tokens=4) as cluster:
            first, second = cluster.addresses.values()
            positions: list[int] = []
            killed = False
            async with (
                AsyncClient([first, second], token=TOKEN) as client,
                client.stream(prompt, **options) as stream,
            ):
                async for event in stream:
                    if isinstance(event, PromptDelta):
                        positions += range(event.position, event.position + len(event.logprobs))
                    if not killed and isinstance(event, KINDS[when]):
                        killed = True
                        name = next(n for n in cluster.gateways if stream.request_id.startswith(n))
                        await cluster.gateways.pop(name).stop()
                completion = await stream.completion()
            assert positions == list(range(1, len(prompt)))
            assert completion.prompt_logprobs == whole.prompt_logprobs
            assert completion.token_ids == whole.token_ids
            assert completion.choices[0].logprobs == whole.choices[0].logprobs
            assert completion.timings.reconnects >= 1

    run_on(runner, test)


def test_choices_share_the_prompt_and_usage_says_so(model: Path, runner: asyncio.Runner) -> None:
    prompt = list(range(1, 42))

    async def test() -> None:
        async with local_cluster(model, blocks=96, prefix_cache=True) as cluster:
            async with cluster.client() as client:
                ask: dict[str, Any] = {"max_tokens": 8, "seed": 5, "ignore_eos": True}
                three = await client.generate(prompt, n=3, **ask)
                usage = three.usage
                assert (usage.prompt_tokens, usage.cached_tokens) == (41, 0)
                assert (usage.completion_tokens, usage.total_tokens) == (24, 65)
                assert [c.usage.cached_tokens for c in three.choices] == [0, 40, 40]
                assert len({c.token_ids for c in three.choices}) == 3
                again = await client.generate(prompt, **ask)
                assert again.token_ids == three.choices[0].token_ids
                assert again.usage.cached_tokens == 40
                # A stop of one leaves the others.
                stop = three.choices[1].token_ids[3]
                assert stop not in three.choices[0].token_ids + three.choices[2].token_ids
                stopped = await client.generate(prompt, n=3, stop_token_ids=[stop], **ask)
                assert [c.finish_reason for c in stopped.choices] == ["length", "stop", "length"]
                assert stopped.choices[1].matched_stop == stop
                assert stopped.choices[1].token_ids == three.choices[1].token_ids[:4]
                assert stopped.choices[2].token_ids == three.choices[2].token_ids
                async with client.stream(prompt, **ask) as stream:
                    (end,) = [e async for e in stream if isinstance(e, Finished)]
                assert end.usage == again.choices[0].usage
                one = await client.generate([9], max_tokens=1, prompt_logprobs=1)
                assert one.prompt_logprobs == (None,)
            await cluster.until_free()

    run_on(runner, test)


def test_min_tokens_ignore_eos_and_stops(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with local_cluster(model, blocks=96) as cluster, cluster.client() as client:
            wants_end: dict[str, Any] = {"temperature": 0.0, "logit_bias": {EOS: 100.0}}
            at_once = await client.generate("hello", max_tokens=9, **wants_end)
            assert at_once.token_ids == (EOS,)
            assert (at_once.text, at_once.finish_reason) == ("", "stop")
            assert at_once.choices[0].matched_stop == EOS
            shown = await client.generate(
                "hello", max_tokens=9, skip_special_tokens=False, **wants_end
            )
            assert shown.text == "<|eos|>"
            later = await client.generate("hello", max_tokens=9, min_tokens=4, **wants_end)
            assert len(later.token_ids) == 5
            assert later.token_ids[-1] == EOS
            assert EOS not in later.token_ids[:4]
            never = await client.generate("hello", max_tokens=9, ignore_eos=True, **wants_end)
            assert never.token_ids == (EOS,) * 9
            assert never.finish_reason == "length"
            # A stop string that several tokens spell.
            asked: dict[str, Any] = {"max_tokens": 40, "seed": 1, "ignore_eos": True}
            text = (await client.generate("hello", **asked)).text
            stop = text[6:10]
            cut = await client.generate("hello", stop=[stop], **asked)
            assert cut.text == text[: text.index(stop)]
            assert (cut.finish_reason, cut.choices[0].matched_stop) == ("stop", stop)
            kept = await client.generate(
                "hello", stop=stop, include_stop_str_in_output=True, **asked
            )
            assert kept.text == text[: text.index(stop)] + stop
            await cluster.until_free()

    run_on(runner, test)


def test_bad_input_leaves_nothing(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with local_cluster(model, blocks=11) as cluster, cluster.client() as client:
            for options, field in (
                ({"temperature": -1}, "sampling_params.temperature"),
                ({"prompt_logprobs": 21}, "sampling_params.prompt_logprobs"),
                ({"logit_bias": {259: 1.0}}, "sampling_params.logit_bias"),
                ({"max_tokens": 600}, "sampling_params.max_tokens"),
            ):
                with pytest.raises(InvalidRequest) as caught:
                    await client.generate("hello", **options)
                assert list(caught.value.fields) == [field]
            for n in (1, 3):
                with pytest.raises(ResourceExhausted, match=r"needs 16 KV blocks.*pool has 11"):
                    await client.generate(list(range(60)), max_tokens=4, n=n)
            good = await client.generate("hello", max_tokens=4)
            assert good.completion_tokens == 4
            await cluster.until_free()

    run_on(runner, test)
