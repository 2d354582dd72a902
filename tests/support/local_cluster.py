"""Controller, store, worker and gateways as they are, on one loop of one process, without Ray."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.client import AsyncClient
from deepinfer.controller.actor import ControllerActor, ControllerSettings
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import Members, Peer
from deepinfer.gateway.actor import ControllerAccess, GatewayActor, GatewaySettings
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.kvstore.actor import StoreActor, StoreSettings
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId, WorkerId, WorkerRef
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import Order
from deepinfer.text.load import load_tokenizer
from deepinfer.workers.actor import WorkerActor, WorkerSettings
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model

TOKEN = "a-token-of-some-length"
CLUSTER_TOKEN = "the-token-of-the-cluster-itself"
BLOCK_SIZE = 4


@dataclass(slots=True)
class LocalCluster:
    """The actors, found by name in this process instead of through Ray."""

    workers: dict[str, WorkerActor] = field(default_factory=dict)
    store: StoreActor | None = None
    controller: ControllerActor | None = None
    gateways: dict[str, GatewayActor] = field(default_factory=dict)
    gateway_names: tuple[str, ...] = ()
    addresses: dict[str, str] = field(default_factory=dict)
    """Of the gateways."""

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        """``ports.Orders``."""
        return self.workers[worker.worker].order(order, directory)

    async def members(self) -> Members:
        """``ports.Directory``."""
        return Members(
            workers={WorkerId(name): None for name in self.workers},
            stores={StoreId("store-0"): None},
            gateways={GatewayId(name): None for name in self.gateway_names},
        )

    async def life(self, peer: Peer) -> Incarnation | None:
        """``ports.Directory``: nobody is seen to die here."""
        return None

    async def restart(self, name: str, life: Incarnation) -> None:
        raise RuntimeError(f"{name} has no process of its own")

    async def find(self) -> str:
        """Where the controller is."""
        if self.controller is None:
            raise LookupError("no controller yet")
        return await self.controller.address()

    async def status(self) -> dict[str, Any]:
        """The controller's status document."""
        if self.controller is None:
            raise LookupError("no controller")
        return await self.controller.status()

    def client(self) -> AsyncClient:
        """A client of all gateways."""
        return AsyncClient(list(self.addresses.values()), token=TOKEN)

    async def states(self) -> dict[str, str]:
        """The state of every sequence, by its request."""
        return {s["request"]: s["state"] for s in (await self.status())["sequences"]}

    async def until_state(self, request: str, state: str, timeout_s: float = 20.0) -> None:
        """Wait until the controller knows the request in a state."""
        deadline = time.monotonic() + timeout_s
        while (now := (await self.states()).get(request)) != state:
            assert time.monotonic() < deadline, f"{request} is {now}, not {state}"
            await asyncio.sleep(0.002)

    async def held(self) -> list[str]:
        """Blocks, payloads, requests and streams that are held, in words; by all who hold any."""
        found = []
        for name, worker in self.workers.items():
            counts: dict[str, Any] = await worker.status()
            keys: tuple[str, ...] = (
                "blocks_held",
                "blocks_quarantined",
                "blocks_promised",
                "residents",
            )
            found += [f"{name}: {key} = {counts[key]}" for key in keys if counts[key]]
        assert self.store is not None
        stored = await self.store.status()
        keys = ("used_bytes", "tickets_reserved", "tickets_committed", "puts", "reads")
        found += [f"store: {key} = {stored[key]}" for key in keys if stored[key]]
        found += [f"controller: {request} {s}" for request, s in (await self.states()).items()]
        for name, address in self.addresses.items():
            if name in self.gateways:
                async with AsyncClient(address, token=TOKEN) as client:
                    gateway = (await client.status())["gateway"]
                keys = ("live_requests", "streams")
                found += [f"{name}: {key} = {gateway[key]}" for key in keys if gateway[key]]
        return found

    async def until_free(self, timeout_s: float = 20.0) -> float:
        """Wait until nothing is held; return how many seconds that took."""
        began_s = time.monotonic()
        while found := await self.held():
            assert time.monotonic() - began_s < timeout_s, "\n".join(found)
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s


@asynccontextmanager
async def local_cluster(
    model: Path,
    *,
    blocks: int,
    gateways: int = 1,
    prefill_chunk_tokens: int = 512,
    orphan_grace_ms: int = 5_000,
    block_size: int = BLOCK_SIZE,
    prefix_cache: bool = False,
    weights: str = "auto",
    precision_levels: int = 2,
    fp8_products: str = "w8a16",
    shed: bool = False,
    start_shed: bool = False,
    controller: ControllerConfig | None = None,
) -> AsyncIterator[LocalCluster]:
    """A cluster of one worker with a pool of ``blocks``, for as long as the block lasts."""
    layout = kv_layout(load_model(model).config, resolve_kv_dtype("fp16"), block_size)
    tokenizer = load_tokenizer(model)
    cluster = LocalCluster(gateway_names=tuple(f"gateway-{i}" for i in range(gateways)))
    async with AsyncExitStack() as stack:
        cluster.store = StoreActor(
            StoreSettings(
                store="store-0",
                node="n",
                budget_bytes=1 << 26,
                page_bytes=layout.block_bytes,
                token=CLUSTER_TOKEN,
            ),
            cluster.find,
        )
        stack.push_async_callback(cluster.store.stop)
        worker = WorkerActor(
            WorkerSettings(
                worker="worker-0",
                node="n",
                model_path=str(model),
                kv_cache_dtype="fp16",
                weights=weights,
                precision_levels=precision_levels,
                fp8_products=fp8_products,
                shed=shed,
                start_shed=start_shed,
                token=CLUSTER_TOKEN,
                config=WorkerConfig(
                    blocks_total=blocks,
                    block_size=block_size,
                    block_bytes=layout.block_bytes,
                    prefill_chunk_tokens=prefill_chunk_tokens,
                    prefix_cache=prefix_cache,
                ),
            ),
            cluster.find,
        )
        stack.push_async_callback(worker.stop)
        await worker.ping()
        cluster.workers["worker-0"] = worker
        for name in cluster.gateway_names:
            gateway = GatewayActor(
                GatewaySettings(
                    gateway=name,
                    model="tiny",
                    model_path=str(model),
                    max_context_tokens=load_model(model).config.max_positions,
                    vocab_size=tokenizer.vocab_size,
                    eos_token_ids=tokenizer.eos_ids,
                    kv_cache_dtype="fp16",
                    token=TOKEN,
                    cluster_token=CLUSTER_TOKEN,
                    secret=b"secret",
                    config=GatewayConfig(orphan_grace_ms=orphan_grace_ms),
                ),
                ControllerAccess(find=cluster.find, status=cluster.status),
            )
            stack.push_async_callback(gateway.stop)
            cluster.gateways[name] = gateway
            cluster.addresses[name] = await gateway.address()
        cluster.controller = ControllerActor(
            ControllerSettings(
                namespace="none",
                token=TOKEN,
                cluster_token=CLUSTER_TOKEN,
                config=controller
                or ControllerConfig(min_residency_tokens=2, orphan_grace_ms=orphan_grace_ms),
            ),
            orders=cluster,
            directory=cluster,
        )
        stack.push_async_callback(cluster.controller.stop)
        yield cluster


def run_on(
    runner: asyncio.Runner, test: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 100.0
) -> None:
    """Run a test on a loop that outlives what it makes.

    ``grpc.aio.Server.__del__`` starts a task on the loop it was made on, even when stopped.
    """

    async def run() -> None:
        async with asyncio.timeout(timeout_s):
            await test()

    try:
        runner.run(run())
    finally:
        gc.collect()
        runner.run(asyncio.sleep(0))
