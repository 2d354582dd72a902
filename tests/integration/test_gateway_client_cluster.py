"""SDK, gateway, controller, store and worker as they are, in one process without Ray.

The pool is too small for the requests together, so that they are swapped out and come back; the
answers must be those of an unpressed run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deepinfer.client import Accepted, Completion, Delta, Finished
from deepinfer.gateway import actor
from support.local_cluster import local_cluster, run_on
from support.tiny_model import write_tiny_llama


async def answers(model: Path, *, blocks: int, prompts: list[str]) -> list[Completion]:
    """Send all prompts at once to a fresh cluster with a pool of ``blocks``."""
    async with local_cluster(model, blocks=blocks) as cluster, cluster.client() as client:
        completions = await asyncio.gather(
            *(
                client.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
                for prompt in prompts
            )
        )
        await cluster.until_free()
        status = await client.status()
        assert status["swapped"] == 0
        assert status["cpu_offload"]["payload_bytes"] == 0
    return list(completions)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_swapped_out_and_back_the_answers_are_the_same(model: Path) -> None:
    prompts = ["hello", "world and", "a third one"]

    async def test() -> None:
        plain = await answers(model, blocks=96, prompts=prompts)
        pressed = await answers(model, blocks=11, prompts=prompts)
        assert [c.token_ids for c in pressed] == [c.token_ids for c in plain]
        assert [c.text for c in pressed] == [c.text for c in plain]
        assert sum(c.swaps.swaps for c in plain) == 0
        swaps = [c.swaps for c in pressed]
        assert sum(s.swaps for s in swaps) >= 1
        assert [s.resumes for s in swaps] == [s.swaps for s in swaps]
        assert all((s.stall_s > 0) == (s.swaps > 0) for s in swaps)

    with asyncio.Runner() as runner:
        run_on(runner, test)


def test_a_killed_gateways_streams_go_on_at_another(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stream of the dead one, each token once, and the answers of an undisturbed run."""
    monkeypatch.setattr(actor, "STOP_GRACE_S", None)  # it dies: what it sends is cut off
    sampling = {"max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
    prompts = [f"story {i}" for i in range(6)]

    async def test() -> None:
        async with (
            local_cluster(model, blocks=200, gateways=2) as cluster,
            cluster.client() as client,
        ):
            right = [
                await client.generate(prompt, seed=i, **sampling)  # type: ignore[arg-type]
                for i, prompt in enumerate(prompts)
            ]
            at: dict[int, str] = {}

            async def one(i: int) -> Completion:
                stream = client.stream(prompts[i], seed=i, **sampling)  # type: ignore[arg-type]
                ids: list[int] = []
                async for event in stream:
                    if isinstance(event, Accepted):
                        at[i] = event.gateway
                    elif isinstance(event, Delta):
                        assert event.position == len(ids)
                        ids += event.token_ids
                    elif isinstance(event, Finished):
                        assert event.choice.token_ids == tuple(ids)
                    if len(ids) == 10:
                        halfway.release()
                return await stream.completion()

            halfway = asyncio.Semaphore(0)
            tasks = [asyncio.create_task(one(i)) for i in range(len(prompts))]
            for _ in range(len(prompts)):
                await halfway.acquire()
            doomed = at[0]
            await cluster.gateways.pop(doomed).stop()
            completions = await asyncio.gather(*tasks)
            assert [c.token_ids for c in completions] == [c.token_ids for c in right]
            assert [c.text for c in completions] == [c.text for c in right]
            moved = [i for i, gateway in at.items() if gateway == doomed]
            assert moved
            assert all(completions[i].timings.reconnects for i in moved)
            await cluster.until_free()

    with asyncio.Runner() as runner:
        run_on(runner, test)
