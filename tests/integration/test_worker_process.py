"""The worker's shell over real links: a life, swaps over both store paths, broken links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from deepinfer.kvstore.client import Path as StorePath
from deepinfer.kvstore.core.ids import RequestId, Seq
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import Cancel, Departure, Drop, NoticeKind
from deepinfer.kvstore.core.requests import RequestRecord, SamplingParams
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.engine import Engine
from deepinfer.workers.local import LocalEngine
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.pool import PagedPool
from support.tiny_model import write_tiny_llama
from support.worker_cluster import Cluster, Held, running_worker

PROMPT = (9, 70, 33, 12, 101, 55, 8, 64, 90, 7, 41)
SAMPLING = SamplingParams(max_tokens=60, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=5)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What an unpressed run in one process answers to ``PROMPT``."""
    threads = torch.get_num_threads()
    loaded = load_model(model)
    layout = kv_layout(loaded.config, resolve_kv_dtype("auto"), 4)
    runner = ModelRunner(loaded, PagedPool(layout, 64), CpuBackend())
    config = WorkerConfig(blocks_total=64, block_size=4, block_bytes=layout.block_bytes)
    (done,) = LocalEngine(Engine(runner), config).generate([PROMPT], SAMPLING, seed=77)
    torch.set_num_threads(threads)
    return done.token_ids


def record(name: str = "r", *, sampling: SamplingParams = SAMPLING) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name), prompt_ids=PROMPT, sampling=sampling, arrival_ms=0, seed=77
    )


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def held(cluster: Cluster, seq: Seq) -> Held:
    return cluster.gateway.held[seq]


def test_a_plain_life_over_real_links(model: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with running_worker(model) as cluster:
            r = record()
            seq = Seq(r.request, 0)
            current = await cluster.admit(r)
            assert await cluster.finished(seq) == expected
            await cluster.departs(r.request, current, Departure.FINISHED)
            assert [n.kind for n in held(cluster, seq).notices] == [NoticeKind.PLACED]
            status = await cluster.worker.status()
            assert status["tokens_generated"] == 60
            report = cluster.controller.last
            assert report is not None
            assert report.counters["deepinfer_worker_tokens_generated_total"] == 60
            assert report.blocks_free == report.blocks_total == 96

    run(main)


@pytest.mark.parametrize("path", ["memfd", "grpc"])
def test_a_swap_out_and_in_changes_no_token(
    model: Path, expected: list[int], path: StorePath
) -> None:
    async def main() -> None:
        async with running_worker(model, store_path=path, step_s=0.02) as cluster:
            r = record()
            seq = Seq(r.request, 0)
            current = await cluster.admit(r)
            for count in (3, 20):
                await cluster.holds(seq, count)
                ticket = await cluster.swap_out(seq, current)
                await cluster.departs(r.request, current, Departure.SWAPPED)
                assert held(cluster, seq).finish is None, "swapped too late to show anything"
                assert (await cluster.worker.status())["blocks_held"] == 0
                current = await cluster.swap_in(ticket)
            assert await cluster.finished(seq) == expected
            kinds = [notice.kind for notice in held(cluster, seq).notices]
            assert kinds == [
                NoticeKind.PLACED,
                NoticeKind.SWAPPED_OUT,
                NoticeKind.RESUMED,
                NoticeKind.SWAPPED_OUT,
                NoticeKind.RESUMED,
            ]
            out = held(cluster, seq).notices[1]
            assert out.payload_bytes == out.blocks * cluster.block_bytes > 0
            assert out.copy_us > 0
            status = await cluster.worker.status()
            swaps = ("requests_swapped_total", "requests_resumed_total", "recomputed")
            assert [status[name] for name in swaps] == [2, 2, 0]

    run(main)


def test_others_decode_while_one_is_swapped(model: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with running_worker(model, prefix_cache=False, step_s=0.02) as cluster:
            one, two = record("one"), record("two")
            current = await cluster.admit(one)
            await cluster.admit(two)
            await cluster.until(lambda: len(held(cluster, Seq(one.request, 0)).tokens) >= 2)
            ticket = await cluster.swap_out(Seq(one.request, 0), current)
            await cluster.departs(one.request, current, Departure.SWAPPED)
            await cluster.swap_in(ticket)
            assert await cluster.finished(Seq(one.request, 0)) == expected
            assert await cluster.finished(Seq(two.request, 0)) == expected

    run(main)


def test_a_refused_reservation_fails_the_swap_and_the_request_goes_on(
    model: Path, expected: list[int]
) -> None:
    async def main() -> None:
        async with running_worker(model, step_s=0.02) as cluster:
            r = record()
            seq = Seq(r.request, 0)
            current = await cluster.admit(r)
            await cluster.holds(seq, 2)
            await cluster.swap_out(seq, current, blocks=1)  # too few for its payload
            assert await cluster.finished(seq) == expected
            assert NoticeKind.SWAP_FAILED in [n.kind for n in held(cluster, seq).notices]
            assert (await cluster.worker.status())["kv_cpu_offload_failed_total"] == 1

    run(main)


def test_a_broken_gateway_link_loses_no_token(model: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with running_worker(model, step_s=0.02) as cluster:
            r = record()
            seq = Seq(r.request, 0)
            current = await cluster.admit(r)
            for count in (2, 20):
                await cluster.holds(seq, count)
                cluster.gateway.hang_up()
            assert await cluster.finished(seq) == expected
            assert cluster.gateway.links == 3
            await cluster.departs(r.request, current, Departure.FINISHED)

    run(main)


def test_cancel_and_drop_free_everything_at_once(model: Path) -> None:
    async def main() -> None:
        async with running_worker(model) as cluster:
            sampling = SamplingParams(max_tokens=200, ignore_eos=True)
            one, two = record("one", sampling=sampling), record("two", sampling=sampling)
            current = await cluster.admit(one)
            other = await cluster.admit(two)
            seqs = [Seq(r.request, 0) for r in (one, two)]
            await cluster.until(lambda: all(held(cluster, seq).tokens for seq in seqs))
            await cluster.worker.order(Cancel(cluster.mint(), seqs[0], current), cluster.directory)
            cluster.gateway.say(Drop(seqs[1], other))
            await cluster.departs(one.request, current, Departure.DROPPED)
            await cluster.departs(two.request, other, Departure.DROPPED)
            await cluster.until(
                lambda: (
                    cluster.controller.last is not None
                    and cluster.controller.last.blocks_free == 96
                )
            )

    run(main)


def test_a_draining_worker_says_so_and_refuses(model: Path) -> None:
    async def main() -> None:
        async with running_worker(model) as cluster:
            await cluster.worker.drain()
            r = record()
            current = await cluster.admit(r)
            await cluster.departs(r.request, current, Departure.REFUSED)
            report = cluster.controller.last
            assert report is not None
            assert report.draining

    run(main)


def test_a_wrong_block_size_in_bytes_is_refused_at_the_start(model: Path) -> None:
    async def main() -> None:
        from deepinfer.workers.actor import WorkerActor, WorkerSettings
        from deepinfer.workers.core.config import WorkerConfigError

        async def nobody() -> str:
            raise LookupError("none")

        config = WorkerConfig(blocks_total=4, block_size=4, block_bytes=1)
        settings = WorkerSettings(
            worker="w", node="n", model_path=str(model), token="t", config=config
        )
        worker = WorkerActor(settings, nobody)
        with pytest.raises(WorkerConfigError, match=r"worker\.block_bytes = 1"):
            await worker.ping()
        await worker.stop()

    run(main)
