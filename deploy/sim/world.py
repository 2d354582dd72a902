"""The whole cluster in one process: the five production cores, and nothing else that decides.

Safety is judged as it goes (``checker.py``, ``WorkerHost.check_kv``, every core's ``check``);
progress and leaks are judged by ``World.finish``, after the last fault.
"""

from __future__ import annotations

from collections import Counter

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import Members
from deepinfer.deploy.sim.ambush import Ambushes
from deepinfer.deploy.sim.checker import History, ViolationError
from deepinfer.deploy.sim.client_host import ClientHost
from deepinfer.deploy.sim.controller_host import ControllerHost
from deepinfer.deploy.sim.engine import Engine
from deepinfer.deploy.sim.faults import Mishap, Saboteur, SeededWeather
from deepinfer.deploy.sim.gateway_host import GatewayHost
from deepinfer.deploy.sim.havoc import Havoc
from deepinfer.deploy.sim.host import Host
from deepinfer.deploy.sim.network import Network, Tape, Weather
from deepinfer.deploy.sim.plan import FINISH_MS, ClientPlan, Plan, StorePlan, WorkerPlan
from deepinfer.deploy.sim.store_host import StoreHost
from deepinfer.deploy.sim.worker_host import WorkerHost
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, RequestId, StoreId, WorkerId
from deepinfer.kvstore.core.precision import Policy, PrecisionSettings, StepCost
from deepinfer.workers.core.config import WorkerConfig

BLOCK_BYTES = 64
KINDS = ("controller", "worker", "store", "gateway", "client")


def _costs(step_ms: int, levels: int) -> tuple[StepCost, ...]:
    """What a worker believes of its steps: at the highest level they take half as long."""
    shares = [1 - level / (2 * max(1, levels - 1)) for level in range(levels)]
    return tuple(
        StepCost((1, 8, 64), (1000.0 * step_ms * s, 1100.0 * step_ms * s, 3000.0 * step_ms * s))
        for s in shares
    )


def _life(host: Host) -> Incarnation | None:
    return Incarnation(host.life) if host.up else None


class World:
    """One simulated cluster."""

    def __init__(
        self,
        plan: Plan,
        *,
        tape: Tape | None = None,
        weather: Weather | None = None,
        mishaps: frozenset[Mishap] | None = None,
    ) -> None:
        self.plan = plan
        self.tape = tape
        self.tick_ms = plan.tick_ms
        self.check_always = plan.check_always
        self.block_size = plan.block_size
        self.block_bytes = BLOCK_BYTES
        self.rotted = False
        """Whether a bit has flipped in a store."""
        self.engine = Engine(plan.seed)
        self.heard: dict[str, Counter[type]] = {kind: Counter() for kind in KINDS}
        """Events that the cores of each kind of process were told, by type."""
        self.done: dict[str, Counter[type]] = {kind: Counter() for kind in KINDS}
        """Effects that they had."""
        self.weather = SeededWeather(self.engine, plan.weather, mishaps)
        self.network = Network(self.engine, weather or self.weather, tape)
        self.history = History(noisy=plan.noisy, nested=plan.levels > 1)
        self.workers = {p.name: WorkerHost(self, p) for p in plan.workers}
        self.stores = {p.name: StoreHost(self, p) for p in plan.stores}
        self.gateways = {name: GatewayHost(self, name) for name in plan.gateways}
        self.clients = {p.name: ClientHost(self, p) for p in plan.clients}
        self.controller = ControllerHost(self, 1)
        self.ambushes = Ambushes(self)
        self.havoc = Havoc(self)
        self.saboteur = Saboteur(self)

    # ---- configuration of the cores: their own defaults, with shorter patience ----

    def controller_config(self) -> ControllerConfig:
        """Configuration of the controller."""
        plan = self.plan
        return ControllerConfig(
            cpu_offload=plan.cpu_offload,
            max_swapped_requests=plan.max_swapped_requests,
            victims=plan.policy,
            reserve="full" if plan.reserve_full else "growth",
            growth_reserve_blocks=plan.growth_reserve_blocks,
            min_residency_tokens=plan.min_residency_tokens,
            reserve_slack_tokens=plan.reserve_slack_tokens,
            order_timeout_ms=400,
            settle_ms=200,
            startup_grace_ms=1000,
            suspect_ms=500,
            dead_ms=1500,
            orphan_grace_ms=1500,
            retry_ms=300,
            precision=PrecisionSettings(
                policy=Policy(plan.precision),
                level_max=plan.level_max,
                threshold_tokens=plan.threshold_tokens,
                ttft_target_ms=plan.ttft_target_ms,
                tpot_target_ms=plan.tpot_target_ms,
                dwell_ms=plan.dwell_ms,
            ),
            shed_dwell_ms=100,
            shed_calm_ms=50,
            shed_exact_wait_ms=plan.shed_exact_wait_ms,
            prefetch_bytes_max=plan.prefetch_blocks * BLOCK_BYTES,
            prefetch_renew_ms=400,
        )

    def worker_config(self, plan: WorkerPlan) -> WorkerConfig:
        """Configuration of one worker."""
        return WorkerConfig(
            blocks_total=plan.blocks,
            block_size=self.block_size,
            block_bytes=BLOCK_BYTES,
            levels=self.plan.levels,
            costs=_costs(plan.step_ms, self.plan.levels) if self.plan.costs else (),
            w8a8_rows=self.plan.w8a8_rows,
            max_batch_tokens=max(plan.max_batch_tokens, plan.max_batch_seqs),
            max_batch_seqs=plan.max_batch_seqs,
            prefill_chunk_tokens=plan.prefill_chunk_tokens,
            prefix_cache=self.plan.prefix_cache,
            report_interval_ms=self.plan.report_ms,
            attach_timeout_ms=300,
            unreachable_ms=2000,
            resend_ms=300,
            put_timeout_ms=1500,
            commit_timeout_ms=500,
            resolve_timeout_ms=900,
            fetch_timeout_ms=1500,
            step_timeout_ms=2000,
            prefetch_bytes_max=self.plan.prefetch_blocks * BLOCK_BYTES,
            prefetch_keep_ms=1500,
            ended_max=1 if self.plan.tight else 1024,
            tail_blocks=plan.tail_blocks,
            return_ms=plan.return_ms,
            start_shed=plan.start_shed,
            restore_retry_ms=100,
            restore_retry_max_ms=800,
        )

    def store_config(self, plan: StorePlan) -> StoreConfig:
        """Configuration of one store."""
        return StoreConfig(
            tickets_max=plan.tickets_max,
            sealed_max=1 if self.plan.tight else 1024,
            writers_max=1 if self.plan.tight else 1024,
            reservation_ms=3000,
            dma_grace_ms=300,
            report_interval_ms=self.plan.report_ms,
        )

    def gateway_config(self) -> GatewayConfig:
        """Configuration of every gateway."""
        return GatewayConfig(
            orphan_grace_ms=1500,
            startup_grace_ms=1500,
            report_interval_ms=self.plan.report_ms,
            report_timeout_ms=400,
            held_refresh_ms=400,
            unread_ms=1500,
            max_live_requests=2 if self.plan.tight else 64,
            max_delta_tokens=1 if self.plan.tight else 256,
            max_notices=1 if self.plan.tight else 64,
            max_cancels=1 if self.plan.tight else 64,
            finished_keep_ms=200 if self.plan.tight else 60_000,
        )

    # ---- what everyone may know ----

    def members(self) -> Members:
        """Who should be there, and which life of each is known; none before its first start."""
        return Members(
            workers={WorkerId(w.name): _life(w) for w in self.workers.values() if w.life},
            stores={StoreId(s.name): _life(s) for s in self.stores.values() if s.life},
            gateways={GatewayId(g.name): _life(g) for g in self.gateways.values() if g.life},
        )

    def choices(self, request: RequestId) -> int:
        """How many choices a request has."""
        return self.history.record(request).sampling.n

    def servers(self) -> list[Host]:
        """Every worker, store and gateway."""
        return [*self.workers.values(), *self.stores.values(), *self.gateways.values()]

    def node_of(self, host: Host) -> str:
        """The node that a process is on."""
        if isinstance(host, WorkerHost | StoreHost):
            return host.plan.node
        gateways = list(self.gateways)
        return f"n{gateways.index(host.name) % 2}" if host.name in gateways else "n0"

    @property
    def fair(self) -> bool:
        """Whether nothing breaks any more."""
        return self.weather.fair

    def may_refuse(self, plan: ClientPlan) -> bool:
        """Whether some state of the cluster cannot hold the request, so that it may be refused."""
        workers = list(self.workers.values())
        if plan.exact:
            able = [worker for worker in workers if not worker.plan.start_shed]
            some_not = len(able) < len(workers) and self.plan.late_start_ms > 0
            if not able or some_not or self.plan.shed_exact_wait_ms < FINISH_MS:
                return True
            workers = able
        sheds = self.plan.precision != "fp16" and self.plan.level_max >= self.plan.levels - 1
        gains = int(sheds and not plan.exact)
        pools = [worker.least_blocks + gains * worker.plan.tail_blocks for worker in workers]
        some_lack = self.plan.faults or self.plan.late_start_ms
        least = min(pools) if some_lack else max(pools)
        return -(-(len(plan.prompt_ids) + plan.max_tokens) // self.block_size) > least

    def note(self, what: str) -> None:
        """Write a remark on the tape."""
        if self.tape is not None:
            self.tape(self.engine.now_ms, "--", "world", "", what)

    # ---- the two phases ----

    def start(self) -> None:
        """Start every process; clients come when they planned to."""
        late_ms = self.plan.late_start_ms
        for host in (*self.workers.values(), *self.stores.values(), *self.gateways.values()):
            if late_ms:
                self.engine.after(host.within(late_ms), self.havoc.restart, host)
            else:
                host.start()
        self.controller.start()
        for client in self.clients.values():
            self.engine.after(client.plan.arrival_ms, client.start)
        self.saboteur.start()

    def run(self) -> None:
        """Live through the fault phase, then finish."""
        self.start()
        engine, end_ms = self.engine, self.plan.fault_phase_ms
        while engine.now_ms < end_ms and (self.plan.patient or self._waiting()):
            engine.run_until(min(engine.now_ms + 100, end_ms))
        self.calm()
        self.finish()

    def calm(self) -> None:
        """No more faults: fair weather, and every process is up and running."""
        self.note("no more faults")
        self.saboteur.over = True
        self.weather.fair = True
        self.havoc.make_whole()

    def finish(self) -> None:
        """Run until every client has its answer and nothing is left of it anywhere.

        Raises ViolationError if that takes longer than ``FINISH_MS``.
        """
        engine = self.engine
        limit_ms = engine.now_ms + FINISH_MS
        while engine.now_ms < limit_ms and (self._waiting() or self.leftovers()):
            engine.run_until(engine.now_ms + 100)
        leftovers = self.leftovers()
        if leftovers:
            raise ViolationError(
                f"left after {FINISH_MS} ms without faults: " + "; ".join(leftovers)
            )
        for host in (
            self.controller,
            *self.workers.values(),
            *self.stores.values(),
            *self.gateways.values(),
        ):
            host.core.check()
        for client in self.clients.values():
            if client.up:
                client.core.check()

    def _waiting(self) -> list[ClientHost]:
        """Clients without an end to their request."""
        return [
            client
            for client in self.clients.values()
            if client.life == 0 or (client.up and client.ended_ms is None)
        ]

    def leftovers(self) -> list[str]:
        """What is not finished, freed or forgotten yet."""
        left = [f"{client.name} ({client.request}) waits" for client in self._waiting()]
        for worker in self.workers.values():
            left += worker.leftovers()
        for store in self.stores.values():
            left += store.leftovers()
        for gateway in self.gateways.values():
            left += gateway.leftovers()
        return left or self.controller.leftovers()
