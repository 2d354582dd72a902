"""The order of the line on one worker: newcomers by arrival, swapped requests oldest first."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import SendOrder
from deepinfer.kvstore.core.ids import Run, Seq, StoreId
from deepinfer.kvstore.core.messages import Admit, SwapIn, TicketState, WorkerReport
from support.controller_cluster import Cluster
from support.controller_peers import BLOCK_SIZE


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.sampled_from([5, 8, 16]),
    requests=st.integers(2, 14),
    offload=st.booleans(),
    reserve=st.sampled_from(["growth", "full"]),
    growth_reserve=st.integers(0, 2),
    residency=st.sampled_from([0, 8, 1000]),
)
def test_the_line_keeps_its_order(
    seed: int,
    blocks: int,
    requests: int,
    offload: bool,
    reserve: str,
    growth_reserve: int,
    residency: int,
) -> None:
    random = Random(seed)
    config = ControllerConfig(
        cpu_offload=offload,
        reserve=reserve,
        growth_reserve_blocks=growth_reserve,
        min_residency_tokens=residency,
    )
    cluster = Cluster(config)
    worker = cluster.worker("w", blocks)
    store = cluster.store()
    gateway = cluster.gateway()
    cluster.start()
    arrived: list[Seq] = []
    admitted: list[Seq] = []
    resumed: dict[Seq, Run] = {}

    spare = blocks

    def carry(message: object) -> bool:
        nonlocal spare
        if isinstance(message, WorkerReport):
            spare = message.blocks_free - message.blocks_short
        if not isinstance(message, SendOrder):
            return True
        order = message.order
        if isinstance(order, Admit | SwapIn):
            assert -(-order.tokens // BLOCK_SIZE) <= spare, "placed beside the starving"
        if isinstance(order, Admit) and order.seq not in admitted:
            # Preempted requests come again, and before everyone; the first time goes by arrival.
            assert order.seq == arrived[len(admitted)]
            admitted.append(order.seq)
        elif isinstance(order, SwapIn):
            assert resumed.get(order.seq) != order.ticket.order, "resumed twice from one payload"
            resumed[order.seq] = order.ticket.order
            for ticket, level in store.tickets.items():
                waiting = level.state is TicketState.COMMITTED and ticket.seq not in worker.runs
                if waiting and resumed.get(ticket.seq) != ticket.order:
                    assert order.ticket.order < ticket.order, "a younger swap went first"
        return True

    cluster.carry = carry
    for index in range(requests):
        prompt = random.randrange(1, (blocks - 2) * BLOCK_SIZE)
        new = random.randrange(1, blocks * BLOCK_SIZE - prompt + 1)
        arrived.append(cluster.submit(f"r{index:02}", prompt, new))
        for _ in range(random.randrange(1, 6)):
            cluster.round()
    cluster.run(lambda: len(gateway.finished) == requests, rounds=6000)
    assert cluster.stores == {StoreId("store"): store}
    assert admitted == arrived
