"""SDK, gateway, controller, store and worker as they are, in one process without Ray.

The pool is too small for the requests together, so that they are swapped out and come back; the
answers must be those of an unpressed run.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deepinfer.client import AsyncClient, Completion
from deepinfer.controller.actor import ControllerActor, ControllerSettings
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import Members, Peer
from deepinfer.gateway.actor import ControllerAccess, GatewayActor, GatewaySettings
from deepinfer.kvstore.actor import StoreActor, StoreSettings
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId, WorkerId, WorkerRef
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import Order
from deepinfer.text.load import load_tokenizer
from deepinfer.workers.actor import WorkerActor, WorkerSettings
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model
from support.tiny_model import write_tiny_llama

TOKEN = "a-token-of-some-length"
BLOCK_SIZE = 4


class LocalCluster:
    """The actors, found by name in this process instead of through Ray."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerActor] = {}
        self.controller: ControllerActor | None = None
        self.orders: list[Order] = []

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        """``ports.Orders``."""
        self.orders.append(order)
        return self.workers[worker.worker].order(order, directory)

    async def members(self) -> Members:
        """``ports.Directory``."""
        return Members(
            workers={WorkerId(name): None for name in self.workers},
            stores={StoreId("store-0"): None},
            gateways={GatewayId("gateway-0"): None},
        )

    async def life(self, peer: Peer) -> Incarnation | None:
        """``ports.Directory``: nobody dies here."""
        return None

    async def find(self) -> str:
        """Where the controller is."""
        if self.controller is None:
            raise LookupError("no controller yet")
        return await self.controller.address()

    async def status(self) -> Mapping[str, object]:
        """The controller's status document."""
        assert self.controller is not None
        return await self.controller.status()


async def answers(model: Path, *, blocks: int, prompts: list[str]) -> list[Completion]:
    """Send all prompts at once to a fresh cluster with a pool of ``blocks``."""
    layout = kv_layout(load_model(model).config, resolve_kv_dtype("fp16"), BLOCK_SIZE)
    tokenizer = load_tokenizer(model)
    cluster = LocalCluster()
    async with AsyncExitStack() as stack:
        store = StoreActor(
            StoreSettings(
                store="store-0",
                node="n",
                budget_bytes=1 << 26,
                page_bytes=layout.block_bytes,
                token=TOKEN,
            ),
            cluster.find,
        )
        stack.push_async_callback(store.stop)
        worker = WorkerActor(
            WorkerSettings(
                worker="worker-0",
                node="n",
                model_path=str(model),
                kv_cache_dtype="fp16",
                token=TOKEN,
                config=WorkerConfig(
                    blocks_total=blocks, block_size=BLOCK_SIZE, block_bytes=layout.block_bytes
                ),
            ),
            cluster.find,
        )
        stack.push_async_callback(worker.stop)
        await worker.ping()
        cluster.workers["worker-0"] = worker
        gateway = GatewayActor(
            GatewaySettings(
                gateway="gateway-0",
                model="tiny",
                model_path=str(model),
                max_context_tokens=512,
                vocab_size=tokenizer.vocab_size,
                eos_token_ids=tokenizer.eos_ids,
                kv_cache_dtype="fp16",
                token=TOKEN,
                secret=b"secret",
            ),
            ControllerAccess(find=cluster.find, status=cluster.status),
        )
        stack.push_async_callback(gateway.stop)
        cluster.controller = ControllerActor(
            ControllerSettings(
                namespace="none", token=TOKEN, config=ControllerConfig(min_residency_tokens=2)
            ),
            orders=cluster,
            directory=cluster,
        )
        stack.push_async_callback(cluster.controller.stop)
        async with AsyncClient(await gateway.address(), token=TOKEN) as client:
            completions = await asyncio.gather(
                *(
                    client.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
                    for prompt in prompts
                )
            )
            await asyncio.sleep(0.5)
            status = await client.status()
            pool = await worker.status()
            assert pool["blocks_held"] == 0
            assert status["swapped"] == 0
            assert status["cpu_offload"]["payload_bytes"] == 0
    return list(completions)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_swapped_out_and_back_the_answers_are_the_same(model: Path) -> None:
    prompts = ["hello", "world and", "a third one"]
    with asyncio.Runner() as runner:

        async def test() -> None:
            async with asyncio.timeout(100):
                plain = await answers(model, blocks=96, prompts=prompts)
                pressed = await answers(model, blocks=11, prompts=prompts)
            assert [c.token_ids for c in pressed] == [c.token_ids for c in plain]
            assert [c.text for c in pressed] == [c.text for c in plain]
            assert sum(c.swaps.swaps for c in plain) == 0
            swaps = [c.swaps for c in pressed]
            assert sum(s.swaps for s in swaps) >= 1
            assert [s.resumes for s in swaps] == [s.swaps for s in swaps]
            assert all((s.stall_s > 0) == (s.swaps > 0) for s in swaps)

        runner.run(test())
        gc.collect()
        runner.run(asyncio.sleep(0))
