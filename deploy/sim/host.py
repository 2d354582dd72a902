"""What the hosts of all five kinds share: a process with a core in it, and its links.

A host is an honest environment for one production core. It carries out effects and reports what
came of them; it decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from deepinfer.deploy.sim.engine import Process
from deepinfer.deploy.sim.network import Stream

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World


class Host(Process):
    """A process around a core that is made anew in each life."""

    __slots__ = (
        "_checked",
        "_done",
        "_heard",
        "_performers",
        "_skew_ms",
        "_tick",
        "_tick_ms",
        "core",
        "world",
    )

    kind: ClassVar[str]
    """What it is a process of: worker, store, gateway, controller or client."""

    def __init__(self, world: World, name: str, tick: object) -> None:
        super().__init__(world.engine, name)
        self.world = world
        self.core: Any = None
        self._tick = tick
        self._tick_ms = world.tick_ms
        self._skew_ms = 0
        self._checked = 0
        self._heard = world.heard[self.kind]
        self._done = world.done[self.kind]
        self._performers: dict[type, Callable[[Any], None]] = {}

    @property
    def now_ms(self) -> int:
        """What this process's clock says."""
        return self.engine.now_ms + self._skew_ms

    def start(self) -> None:
        """Begin the next life, with a clock that is off by as much as the plan allows."""
        super().start()
        self._skew_ms = self.within(self.world.plan.clock_skew_ms + 1)

    def begin_ticking(self) -> None:
        """Start this life's clock."""
        self.after(1 + self.within(self._tick_ms), self._ticked)

    def _ticked(self) -> None:
        self.drive(self._tick)
        self.after(self._tick_ms, self._ticked)

    def drive(self, event: object) -> None:
        """Hand the core an event and carry out what it asks for."""
        world = self.world
        if world.tape is not None and event is not self._tick:
            world.tape(self.engine.now_ms, "=>", self.name, self.name, event)
        self._heard[type(event)] += 1
        effects = self.core.handle(event, self.engine.now_ms + self._skew_ms)
        self._checked += 1
        if world.check_always or self._checked % 64 == 0:
            self.core.check()
        if effects:
            performers, done = self._performers, self._done
            for effect in effects:
                kind = type(effect)
                done[kind] += 1
                performers[kind](effect)

    def call(
        self,
        target: Host,
        body: object,
        serve: Callable[[Any, Callable[[object], None]], None],
        on_reply: Callable[[Any], None],
        on_failure: Callable[[], None],
        timeout_ms: int,
    ) -> None:
        """Call ``serve(body, reply)`` in another process.

        Exactly one of ``on_reply`` and ``on_failure`` follows, if this life lasts. After a failure
        the call may have run, may be running, or may yet run; it may also run twice.
        """
        _Call(self, target, body, serve, on_reply, on_failure, timeout_ms)


class _Call:
    __slots__ = (
        "_body",
        "_caller",
        "_life",
        "_on_failure",
        "_on_reply",
        "_over",
        "_serve",
        "_target",
    )

    def __init__(
        self,
        caller: Host,
        target: Host,
        body: object,
        serve: Callable[[Any, Callable[[object], None]], None],
        on_reply: Callable[[Any], None],
        on_failure: Callable[[], None],
        timeout_ms: int,
    ) -> None:
        self._caller = caller
        self._life = caller.life
        self._target = target
        self._body = body
        self._serve = serve
        self._on_reply = on_reply
        self._on_failure = on_failure
        self._over = False
        caller.world.network.post(caller.name, target.name, body, self._arrive)
        caller.after(timeout_ms, self._fail)

    def _arrive(self) -> None:
        target = self._target
        if target.up:
            target.take(target.life, self._serve, (self._body, self._reply))
        else:
            self._caller.engine.after(1, self._caller.take, self._life, self._fail, ())

    def _reply(self, reply: object) -> None:
        self._caller.world.network.post(
            self._target.name, self._caller.name, reply, self._answered, reply
        )

    def _answered(self, reply: object) -> None:
        self._caller.take(self._life, self._finish, (reply,))

    def _finish(self, reply: object) -> None:
        if not self._over:
            self._over = True
            self._on_reply(reply)

    def _fail(self) -> None:
        if not self._over:
            self._over = True
            self._on_failure()


class Reporter(Host, ABC):
    """A host that keeps a stream of reports to the controller."""

    __slots__ = ("_controller",)

    def __init__(self, world: World, name: str, tick: object) -> None:
        super().__init__(world, name, tick)
        self._controller: Stream | None = None

    def begin_reporting(self) -> None:
        """Look for a controller, now and whenever the stream breaks."""
        self._controller = None
        self.after(1 + self.within(9), self._connect)

    def _connect(self) -> None:
        controller = self.world.havoc.controller_for(self)
        reachable = self.world.network.reachable(self.name, controller.name)
        if not controller.up or controller.stopped or not reachable:
            self.after(20, self._connect)
            return
        self._controller = Stream(
            self.world.network,
            self,
            controller,
            arrive_a=self._replied,
            arrive_b=controller.on_report,
            down_a=self._disconnected,
            down_b=controller.on_report_stream_down,
        )
        self.on_report_link()

    def _disconnected(self, stream: Stream) -> None:
        if stream is self._controller:
            self._controller = None
            self.after(1 + self.within(39), self._connect)

    def _replied(self, stream: Stream, reply: Any) -> None:
        if stream is self._controller:
            self.on_report_reply(reply)

    def send_report(self, report: object) -> None:
        """Send a report if there is a stream; otherwise it is lost."""
        if self._controller is not None:
            self._controller.send(self, report)

    @abstractmethod
    def on_report_link(self) -> None:
        """A new stream to a controller is open."""

    @abstractmethod
    def on_report_reply(self, reply: Any) -> None:
        """The controller answered a report."""
