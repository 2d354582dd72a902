"""Whatever is lost on the way, every request ends, nothing leaks, and no pool is overrun."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import Drain, SendOrder
from deepinfer.kvstore.core.ids import Run, Seq, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import Admit, Cancel, SwapIn, WorkerReport
from support.controller_cluster import Cluster
from support.controller_peers import BLOCK_SIZE, FakeWorker


class Ledger:
    """A naive account of each pool: its last report that arrived, and what was sent since.

    It stands in ``Cluster.carry`` and raises when an order asks for more blocks than that leaves.
    """

    def __init__(self, cluster: Cluster, lost: float, random: Random) -> None:
        self.cluster = cluster
        self.lost = lost
        self.random = random
        self.reports: dict[WorkerId, WorkerReport] = {}
        self.sent: dict[Run, None] = {}
        self.under_way: dict[tuple[WorkerRef, Seq], tuple[Run, int]] = {}

    def carry(self, message: object) -> bool:
        if isinstance(message, SendOrder):
            self._order(message)
        arrives = self.random.random() >= self.lost
        if arrives and isinstance(message, WorkerReport):
            self.reports[message.worker] = message
            ref = WorkerRef(message.worker, message.incarnation)
            shown = [(level.seq, level.run) for level in message.residents]
            shown += [(departed.seq, departed.run) for departed in message.departed]
            for name, run in shown:
                sent = self.under_way.get((ref, name))
                if sent is not None and sent[0] <= run:
                    del self.under_way[ref, name]
        return arrives

    def _order(self, sent: SendOrder) -> None:
        order = sent.order
        sent_before = self.under_way.get((sent.worker, order.seq))
        if isinstance(order, Cancel) and sent_before is not None and sent_before[0] <= order.run:
            del self.under_way[sent.worker, order.seq]
        if not isinstance(order, Admit | SwapIn) or order.order in self.sent:
            return  # sent again: its neighbours may have grown meanwhile, then it is refused
        self.sent[order.order] = None
        report = self.reports[sent.worker.worker]
        assert -(-order.max_total_tokens // BLOCK_SIZE) <= report.blocks_total
        if any(level.seq == order.seq for level in report.residents):
            return  # a takeover takes no blocks
        before = self.under_way.get((sent.worker, order.seq))
        if before is not None:  # the same place for another gateway
            self.under_way[sent.worker, order.seq] = (order.run, before[1])
            return
        for key in [k for k in self.under_way if k[1] == order.seq]:
            del self.under_way[key]  # a newer run: the older one will not be admitted
        need = -(-order.tokens // BLOCK_SIZE)
        ahead = sum(b for (w, _), (_, b) in self.under_way.items() if w == sent.worker)
        assert need + ahead <= report.blocks_free, (order, report, self.under_way)
        self.under_way[sent.worker, order.seq] = (order.run, need)


def faults(cluster: Cluster, random: Random, killed: list[FakeWorker], ledger: Ledger) -> None:
    """One thing that goes wrong."""
    workers = list(cluster.workers.values())
    victim = random.choice(workers)
    match random.randrange(8):
        case 0 if victim.alive:
            cluster.kill(victim, announced=random.random() < 0.5)
            killed.append(victim)
        case 1:
            for worker in killed:
                worker.restart()
            killed.clear()
        case 2:
            ledger.under_way.clear()  # known to nobody: a worker without room will refuse
            cluster.restart_controller()
        case 3:
            cluster.lose_store(random.choice(list(cluster.stores.values())))
        case 4:
            gateway = random.choice(list(cluster.gateways.values()))
            for record in list(gateway.requests.values())[:1]:
                record.cancelled = True
        case 5:
            old, new = random.sample(list(cluster.gateways.values()), 2)
            for name, record in list(old.requests.items())[:2]:
                if name not in new.requests:
                    cluster.submit(
                        name.request,
                        record.prompt,
                        record.max_tokens,
                        gateway=new.id,
                        claim=record.claim + 1,
                    )
        case 6 if victim.alive:
            victim.breaks_swaps = not victim.breaks_swaps
        case 7:
            cluster.tell(Drain(victim.id))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    pools=st.lists(st.sampled_from([3, 4, 6, 12]), min_size=1, max_size=3),
    requests=st.integers(1, 14),
    lost=st.sampled_from([0.0, 0.1, 0.3]),
    fault_rate=st.sampled_from([0.0, 0.02, 0.1]),
    budget_blocks=st.sampled_from([0, 4, 10_000]),
    policy=st.sampled_from(["lru", "youngest", "cost"]),
    reserve=st.sampled_from(["growth", "full"]),
    bound=st.sampled_from([None, 0, 2]),
)
def test_every_request_ends(
    seed: int,
    pools: list[int],
    requests: int,
    lost: float,
    fault_rate: float,
    budget_blocks: int,
    policy: str,
    reserve: str,
    bound: int | None,
) -> None:
    random = Random(seed)
    config = ControllerConfig(victims=policy, reserve=reserve, max_swapped_requests=bound)
    cluster = Cluster(config)
    for index, blocks in enumerate(pools):
        cluster.worker(f"w{index}", blocks)
    cluster.store(budget_bytes=budget_blocks * 1000)
    for name in ("g0", "g1"):
        cluster.gateway(name)
    cluster.start()
    ledger = Ledger(cluster, lost, random)
    for worker in cluster.workers.values():
        ledger.reports[worker.id] = worker.report()
    cluster.carry = ledger.carry
    killed: list[FakeWorker] = []
    submitted = 0
    for _ in range(120):
        if submitted < requests and random.random() < 0.3:
            prompt, new = random.randrange(1, 70), random.randrange(1, 60)
            cluster.submit(f"r{submitted}", prompt, new, gateway=random.choice(["g0", "g1"]))
            submitted += 1
        if random.random() < fault_rate:
            faults(cluster, random, killed, ledger)
        cluster.round(steps=random.randrange(0, 3))
    # From here on nothing is lost and nobody dies.
    ledger.lost = 0.0
    for worker in cluster.workers.values():
        worker.breaks_swaps = False
        worker.restart()
    gateways = cluster.gateways.values()
    cluster.run(lambda: not any(gateway.requests for gateway in gateways), rounds=3000)
    cluster.run(
        lambda: (
            not any(worker.runs for worker in cluster.workers.values())
            and not any(store.tickets for store in cluster.stores.values())
            and cluster.core.snapshot()["sequences"] == []
        ),
        rounds=400,
    )
    largest = max(pools)
    for gateway in gateways:
        for needed, total in gateway.rejected.values():
            assert needed > total == largest
