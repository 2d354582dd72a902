"""A worker's world where anything may happen, and from some moment on nothing bad does."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import GatewayId
from deepinfer.kvstore.core.messages import Cancel, Drop, Preempt
from deepinfer.workers.core.events import StoreGone
from support.worker_world import STORE, Request, World


class Havoc(World):
    """Chooses at random what happens next."""

    def havoc(self) -> None:
        """One thing that the world may do, at random: mostly go on, sometimes harm."""
        rng = self.rng
        request = rng.choice(list(self.requests.values()))
        gateway = rng.choice(list(self.links_up))
        resident = self.core.residents.get(request.seq)
        odd = rng.random() < 0.1
        match rng.randrange(20):
            case 0 | 1 | 2 if rng.random() < self.step_pace:
                self.end_step()
            case 3 | 4 | 5 if self.to_gateway[gateway]:
                self.deliver_to_gateway(gateway)
            case 6 | 7 | 8 if self.to_worker[gateway]:
                self.deliver_to_worker(gateway)
            case 9 if resident is None or odd:
                swap_in = self.swap_in(request) if rng.random() < 0.8 else None
                self.orders.append(swap_in or self.admit(request))
            case 10 if odd or (resident is not None and resident.computed):
                self.orders.append(self.swap_out(request))
            case 11 | 12 | 13 if self.orders:
                order = self.orders[0] if rng.random() < 0.7 else rng.choice(self.orders)
                if rng.random() < 0.9:
                    self.orders.remove(order)
                self.drive(order)
            case 14 if self.puts:
                self.end_put(rng.choice(list(self.puts)), ok=not odd)
            case 15 if self.fetches:
                self.end_fetch(rng.choice(list(self.fetches)), ok=rng.random() < 0.8)
            case 16 if self.calls:
                self.end_call(lost=rng.random() < 0.2, unheard=odd)
            case 17:
                self.tick(1500 if odd else rng.choice([1, 5, 10, 50]))
            case 18:
                self.answer_report(resync=odd)
            case 19 if odd or not self.links_up[gateway]:
                if self.links_up[gateway]:
                    self.break_link(gateway)
                else:
                    self.mend_link(gateway)
            case 19 if rng.random() < 0.5:
                self._rare(request, gateway)
            case _:
                if rng.random() < self.step_pace:
                    self.end_step()

    def _rare(self, request: Request, gateway: GatewayId) -> None:
        rng = self.rng
        match rng.randrange(7):
            case 0:
                self.orders.append(Cancel(self.mint(), request.seq, request.run))
            case 1:
                self.orders.append(Preempt(self.mint(), request.seq, request.run))
            case 2:
                self.drive(StoreGone(STORE))
            case 3 | 4:
                self.move_gateway(request)
                self.orders.append(self.admit(request))
            case 5 if rng.random() < 0.3:
                self.epoch += 1
            case _:
                if self.links_up[gateway]:
                    self.to_worker[gateway].append(Drop(request.seq, request.run))

    def settle(self, rounds: int) -> None:
        """From here on nothing fails, and a simple controller places whoever is not here."""
        self.orders.clear()
        for gateway, up in self.links_up.items():
            if not up:
                self.mend_link(gateway)
        for _ in range(rounds):
            unfinished = [r for r in self.requests.values() if r.finished is None]
            if not unfinished and not self.core.residents and self.quiet:
                return
            self._place(unfinished)
            self._run_once()
        states = {seq: (r.state, r.run) for seq, r in self.core.residents.items()}
        raise AssertionError(f"not finished after {rounds} rounds: {states}")

    @property
    def quiet(self) -> bool:
        return self.step is None and not self.puts and not self.fetches and not self.calls

    def _place(self, unfinished: list[Request]) -> None:
        residents = self.core.residents
        for request in unfinished:
            resident = residents.get(request.seq)
            if resident is None or resident.gateway != request.gateway:
                self.drive(self.admit(request))
        for seq, resident in list(residents.items()):
            request = self.requests[seq]
            if request.finished is not None and resident.gateway != request.gateway:
                self.drive(Cancel(self.mint(), seq, resident.run))
        if self.report is not None and self.report.stalled and residents:
            youngest = max(residents.values(), key=lambda r: r.arrival)
            self.drive(Preempt(self.mint(), youngest.seq, youngest.run))

    def _run_once(self) -> None:
        for gateway in self.links_up:
            while self.to_gateway[gateway]:
                self.deliver_to_gateway(gateway)
            while self.to_worker[gateway]:
                self.deliver_to_worker(gateway)
        self.end_step()
        for ticket in list(self.puts):
            self.end_put(ticket)
        for key in list(self.fetches):
            self.end_fetch(key)
        while self.calls:
            self.end_call()
        self.answer_report()
        self.tick()
