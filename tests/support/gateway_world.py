"""A real gateway on a socket, between a scripted worker, a minimal controller and real clients.

No Ray. The worker answers every prompt with the same text, byte by byte, at a pace that tests
choose; the controller places whatever a gateway lists as not attached.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from deepinfer.client import AsyncClient
from deepinfer.client.core.config import ClientConfig
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.health import Health
from deepinfer.gateway.intake import ModelCard
from deepinfer.gateway.reporting import Reporter
from deepinfer.gateway.service import build_server
from deepinfer.gateway.shell import Shell
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, RequestId, Run, Seq
from deepinfer.proto import (
    control_pb2,
    control_pb2_grpc,
    ids_pb2,
    inference_pb2,
    link_pb2,
    link_pb2_grpc,
)
from deepinfer.proto.bundle import unbundled
from deepinfer.text.load import load_tokenizer
from deepinfer.text.tokenizer import Tokenizer

TOKEN = "a-token-of-some-length"
SECRET = b"the cluster's secret"
CONTEXT = 512
METADATA = (("authorization", f"Bearer {TOKEN}"),)
CLUSTER_TOKEN = "the-token-of-the-cluster-itself"
CLUSTER_METADATA = (("authorization", f"Bearer {CLUSTER_TOKEN}"),)


@dataclass(eq=False)
class Running:
    """A run at the scripted worker."""

    seq: Seq
    run: Run
    tokens: list[int] = field(default_factory=list)
    limit: int = 0
    acked: int = 0
    dropped: bool = False
    finished: bool = False
    task: asyncio.Task[None] | None = None


class ScriptedWorker:
    """Answers every prompt with ``answer``; follows a gateway through restarts."""

    def __init__(self, name: str, address: str, tokenizer: Tokenizer, answer: str) -> None:
        self.ref = ids_pb2.WorkerRef(worker=name, incarnation=1)
        self.address = address
        self.answer = tokenizer.encode(answer, add_special_tokens=False)
        self.pace_s = 0.002
        self.runs: dict[tuple[Seq, Run], Running] = {}
        self.outgoing: asyncio.Queue[link_pb2.FromWorker] = asyncio.Queue()
        self.received: list[link_pb2.ToWorker] = []

    async def serve(self) -> None:
        """Keep a link open until cancelled."""
        this = asyncio.current_task()
        while this is None or not this.cancelling():
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._link()
            await asyncio.sleep(0.05)

    async def _link(self) -> None:
        outgoing: asyncio.Queue[link_pb2.FromWorker] = asyncio.Queue()
        self.outgoing = outgoing
        outgoing.put_nowait(link_pb2.FromWorker(hello=link_pb2.Hello(worker=self.ref)))
        for running in self.runs.values():
            if not running.dropped and not running.finished:
                self.attach(running)
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = link_pb2_grpc.WorkerLinkStub(channel).Connect(metadata=CLUSTER_METADATA)

            async def write() -> None:
                while True:
                    await call.write(await outgoing.get())

            writer = asyncio.create_task(write())
            try:
                async for bundle in call:
                    for message in unbundled(bundle):
                        self.received.append(message)
                        self._got(message)
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def place(self, seq: Seq, run: Run) -> None:
        """Start a run."""
        running = self.runs[seq, run] = Running(seq, run)
        self.attach(running)

    def attach(self, running: Running) -> None:
        """Ask whether the run may speak."""
        attach = link_pb2.Attach(seq=proto_seq(running.seq), run=proto_run(running.run))
        self.outgoing.put_nowait(link_pb2.FromWorker(attach=attach))

    def say(self, seq: Seq, run: Run, index: int, ids: list[int], finish: str = "") -> None:
        """Send tokens, whatever the run's state is."""
        tokens = link_pb2.Tokens(
            seq=proto_seq(seq),
            run=proto_run(run),
            index=index,
            tokens=[link_pb2.LinkToken(id=i, logprob=-0.5) for i in ids],
            finish_reason=finish,
        )
        self.outgoing.put_nowait(link_pb2.FromWorker(tokens=tokens))

    def notice(self, seq: Seq, run: Run, number: int, kind: str, **values: int) -> None:
        """Send a notice."""
        notice = inference_pb2.Notice(
            kind=kind,
            index=seq.choice,
            worker=self.ref.worker,
            store="store-0",
            run_epoch=run.epoch,
            run_counter=run.counter,
            number=number,
            **values,
        )
        said = link_pb2.LinkNotice(seq=proto_seq(seq), notice=notice)
        self.outgoing.put_nowait(link_pb2.FromWorker(notice=said))

    def _got(self, message: link_pb2.ToWorker) -> None:
        kind = message.WhichOneof("message")
        body = getattr(message, kind or "")
        seq = Seq(body.seq.request, body.seq.choice)
        run = Run(body.run.epoch, body.run.counter)
        running = self.runs.get((seq, run))
        if running is None:
            return
        match kind:
            case "attached":
                held = list(message.attached.tokens)
                if running.tokens[: len(held)] != held:
                    running.tokens = held
                running.acked = len(held)
                running.limit = message.attached.record.sampling_params.max_tokens
                if running.task is not None:
                    running.task.cancel()
                running.task = asyncio.create_task(self._decode(running))
            case "ack":
                running.acked = max(running.acked, message.ack.next_index)
                running.finished = running.finished or message.ack.finished
            case _:
                running.dropped = True

    async def _decode(self, running: Running) -> None:
        total = min(running.limit, len(self.answer))
        finish = "length" if total == running.limit else "stop"
        if len(running.tokens) > running.acked:
            done = finish if len(running.tokens) == total else ""
            unacked = running.tokens[running.acked :]
            self.say(running.seq, running.run, running.acked, unacked, done)
        while len(running.tokens) < total and not running.dropped:
            await asyncio.sleep(self.pace_s)
            index = len(running.tokens)
            running.tokens.append(self.answer[index])
            done = finish if index + 1 == total else ""
            self.say(running.seq, running.run, index, running.tokens[index:], done)


class MinimalController(control_pb2_grpc.ControlServicer):
    """Places what is not attached; keeps the levels of the last reports."""

    def __init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.levels: dict[Seq, control_pb2.RequestLevel] = {}
        self.cancelled: list[Seq] = []
        self.reject: dict[Seq, tuple[int, int]] = {}
        self.reject_next: tuple[int, int] | None = None
        self.reports: list[control_pb2.GatewayReport] = []
        self._placed: set[tuple[Seq, int]] = set()
        self._runs = 0

    async def GatewayReports(
        self,
        request_iterator: AsyncIterator[control_pb2.GatewayReport],
        context: grpc.aio.ServicerContext[control_pb2.GatewayReport, control_pb2.ReportReply],
    ) -> None:
        """Take levels; answer each report."""
        async for report in request_iterator:
            self.reports.append(report)
            for gone in report.gone:
                self.levels.pop(Seq(RequestId(gone.request), gone.choice), None)
            for level in report.requests:
                seq = Seq(RequestId(level.seq.request), level.seq.choice)
                self.levels[seq] = level
                if level.cancelled:
                    if seq not in self.cancelled:
                        self.cancelled.append(seq)
                elif not level.HasField("attached") and (seq, level.claim) not in self._placed:
                    if self.reject_next is not None:
                        self.reject[seq] = self.reject_next
                    else:
                        self._placed.add((seq, level.claim))
                        self.place(seq)
            rejects = [
                control_pb2.Reject(seq=proto_seq(s), blocks_needed=n, blocks_total=t)
                for s, (n, t) in self.reject.items()
            ]
            self.reject.clear()
            await context.write(
                control_pb2.ReportReply(epoch=1, number=report.number, reject=rejects)
            )

    def place(self, seq: Seq) -> Run:
        """Start a new run of the sequence at the first worker."""
        self._runs += 1
        run = Run(1, self._runs)
        self.workers[0].place(seq, run)
        return run


class GatewayHost:
    """One gateway that can be killed and started again on its port."""

    def __init__(self, card: ModelCard, controller: str, config: GatewayConfig, name: str) -> None:
        self.card = card
        self.controller = controller
        self.config = config
        self.name = name
        self.port = 0
        self.life = 0
        self.document: dict[str, object] = {"workers": {}, "swapped": 0}
        """What the controller says its status is."""
        self.shell: Shell | None = None
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve; the second time on the same port."""
        self.life += 1
        shell = self.shell = Shell(
            GatewayId(self.name), Incarnation(self.life), self.config, self.card
        )
        self.health = Health(shell.gateway, self._status)
        self._server = build_server(
            shell,
            token=TOKEN,
            cluster_token=CLUSTER_TOKEN,
            secret=SECRET,
            status=self._status,
            health=self.health,
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

        async def find() -> str:
            return self.controller

        reporter = Reporter(shell, find, address=self.address, cluster_token=CLUSTER_TOKEN)
        self._tasks = [asyncio.create_task(shell.tick()), asyncio.create_task(reporter.run())]

    async def _status(self) -> dict[str, object]:
        if not self.controller:
            raise LookupError("the controller does not answer")
        return self.document

    async def stop(self) -> None:
        """Die at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)

    def core_check(self) -> None:
        """Check the core's invariants."""
        assert self.shell is not None
        self.shell.core.check()


class World:
    """A controller, gateways and a worker for each of them."""

    def __init__(self, tokenizer: Tokenizer, answer: str) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.controller = MinimalController()
        self.gateways: list[GatewayHost] = []
        self.workers: list[ScriptedWorker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))

    @property
    def gateway(self) -> GatewayHost:
        return self.gateways[0]

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]

    async def start(self, config: GatewayConfig) -> None:
        """Start everything."""
        control_pb2_grpc.add_ControlServicer_to_server(self.controller, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        card = ModelCard(
            model="bytes",
            tokenizer=self.tokenizer,
            max_context_tokens=CONTEXT,
            vocab_size=self.tokenizer.vocab_size,
            kv_cache_dtype="fp16",
            eos_token_ids=self.tokenizer.eos_ids,
        )
        self.gateways.append(GatewayHost(card, f"127.0.0.1:{port}", config, "gateway-0"))
        await self.gateway.start()
        self.workers.append(
            ScriptedWorker("worker-0", self.gateway.address, self.tokenizer, self.answer)
        )
        self.controller.workers = self.workers
        self._tasks.append(asyncio.create_task(self.worker.serve()))

    async def stop(self) -> None:
        """Stop everything."""
        tasks = [*self._tasks, *(r.task for r in self.worker.runs.values() if r.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for gateway in self.gateways:
            gateway.core_check()
            await gateway.stop()
        await self._server.stop(None)

    def client(self, *, token: str = TOKEN) -> AsyncClient:
        """A client of the gateway."""
        config = ClientConfig(give_up_ms=10_000)
        return AsyncClient([g.address for g in self.gateways], token=token, config=config)

    def seqs(self) -> list[Seq]:
        """Sequences that were placed, in order."""
        return list(dict.fromkeys(seq for seq, _ in self.worker.runs))


@contextlib.asynccontextmanager
async def running_world(
    folder: Path, *, answer: str, config: GatewayConfig | None = None
) -> AsyncIterator[World]:
    """A world for the length of a test."""
    world = World(load_tokenizer(folder), answer)
    await world.start(config or GatewayConfig())
    try:
        yield world
    finally:
        await world.stop()


def run_in_world(
    runner: asyncio.Runner,
    folder: Path,
    test: Callable[[World], Awaitable[None]],
    *,
    answer: str,
    config: GatewayConfig | None = None,
) -> None:
    """Run ``test`` in a world of its own, on a loop that outlives the world."""

    async def run() -> None:
        async with asyncio.timeout(60), running_world(folder, answer=answer, config=config) as w:
            await test(w)

    settle(runner, run())


def settle(runner: asyncio.Runner, test: Coroutine[Any, Any, None]) -> None:
    """Run ``test`` on the runner's loop, and after it what its servers leave there.

    ``grpc.aio.Server.__del__`` starts a task on the loop it was made on, even when stopped.
    """
    try:
        runner.run(test)
    finally:
        gc.collect()
        runner.run(asyncio.sleep(0))


async def eventually(said: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until ``said()`` is true."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not said():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


def proto_seq(seq: Seq) -> ids_pb2.Seq:
    return ids_pb2.Seq(request=seq.request, choice=seq.choice)


def proto_run(run: Run) -> ids_pb2.Run:
    return ids_pb2.Run(epoch=run.epoch, counter=run.counter)
