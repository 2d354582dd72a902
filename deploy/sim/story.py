"""Stories: small scripts of what happens to a cluster, and what must come of it.

A story is a text file. Its first lines, up to ``given``, say what it shows. Then::

    given
        block size 2                        tokens in a block
        worker w0 blocks 3 [node n1] [chunk 2] [step 5]
            [tail 4 return 50] [fails 0.5] [without planes]   if levels are set
        store s0 budget 8 [node n1] [tickets 4]   budget in blocks
        gateway g0
        client c0 prompt 4 max 6 [choices 2] [shared 4] [notices] [exact true]
        set min_residency_tokens 0          any field of Plan

    story
        come c0                             the client sends its request
        see k1 -> w0 Admit c0               run until this arrives (at most 20 simulated s)
        see w0 hears StepDone               run until this core is told that
        never w0 -> g0 Tokens c1            from here on this must not arrive
        allow                               ends every ``never``
        hold w0 -> s0 Commit c0             the next such message waits, and what is behind it
        release                             let everything go that is held
        lose s0 -> w0 StoreReply            the next such call or reply is lost
        double k1 -> w0 Admit c0            the next such call is carried out twice
        kill w0 | start w0 | stop w0 | go w0 | drain w0 | replace k
        cut w0 g0                           their stream breaks
        abort c0 | leave c0 | break c0      the user aborts | the client dies | its stream breaks
        rot s0                              a bit flips in each of its pages
        run 500                             simulated milliseconds
        expect w0 blocks_free == 3          a number of its core's snapshot (or of a client:
                                            tokens, finish, failure)
        expect w0 has c0 decode             the state of a resident; ``lacks c0`` if there is none
        finish                              no more faults: all must end well and leave nothing

Conditions ``field=value`` may follow a message's name and client: ``StoreReply status=sealed``.
Messages take 1 ms, and whatever else chance decides is decided by seed 0: a story always runs the
same way.
"""

from __future__ import annotations

import operator
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from deepinfer.deploy.sim.client_host import ClientHost
from deepinfer.deploy.sim.gateway_host import GatewayHost
from deepinfer.deploy.sim.given import StoryError, plan_of
from deepinfer.deploy.sim.host import Host
from deepinfer.deploy.sim.store_host import Mapped, Mapping, PutStream
from deepinfer.deploy.sim.worker_host import WorkerHost
from deepinfer.deploy.sim.world import World
from deepinfer.gateway.core.events import FromWorker
from deepinfer.kvstore.core.events import Call
from deepinfer.kvstore.core.ids import Seq
from deepinfer.workers.core.events import FromGateway

SEE_MS = 20_000
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Which messages a line means. ``source`` is ``hears`` for what a core is told."""

    source: str
    target: str
    kind: str
    client: str | None
    fields: tuple[tuple[str, str], ...]

    def fits(self, world: World, source: str, target: str, message: object) -> bool:
        if (source, target) != (self.source, self.target):
            return False
        inner = _inner(message)
        if type(inner).__name__ != self.kind:
            return False
        if self.client is not None and _owner(world, inner) != self.client:
            return False
        return all(_shown(_field(inner, name)) == value for name, value in self.fields)


def _inner(message: object) -> object:
    """What a call carries, without its envelope."""
    match message:
        case Mapping() | Mapped() | Call():
            return message.body
        case PutStream():
            return message.request
        case FromWorker() | FromGateway():
            return message.message
        case _:
            return message


def _owner(world: World, message: object) -> str | None:
    """The client whose request the message is about."""
    seq = getattr(message, "seq", None) or getattr(getattr(message, "ticket", None), "seq", None)
    request = seq.request if isinstance(seq, Seq) else getattr(message, "request", None)
    return None if request is None else world.history.client_of.get(request)


def _field(value: object, path: str) -> object:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


class _Script:
    """The weather of a story: 1 ms, and whatever the script holds, loses and doubles."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.once: list[tuple[str, _Pattern]] = []

    def hop_ms(self, source: str, target: str, message: object) -> int | None:
        return None if self._due(source, target, message) == "hold" else 1

    def calls_ms(self, source: str, target: str, message: object) -> tuple[int | None, ...]:
        match self._due(source, target, message):
            case "hold":
                return (None,)
            case "lose":
                return ()
            case "double":
                return (1, 2)
            case _:
                return (1,)

    def leaks(self) -> bool:
        return False

    def _due(self, source: str, target: str, message: object) -> str | None:
        if not self.once:
            return None
        assert self.world is not None
        for entry in self.once:
            if entry[1].fits(self.world, source, target, message):
                self.once.remove(entry)
                return entry[0]
        return None


class Story:
    """One story being told."""

    def __init__(self, text: str, *, tape: Callable[[str], None] | None = None) -> None:
        self._out = tape
        self._script = _Script()
        self._nevers: list[_Pattern] = []
        self._waiting: _Pattern | None = None
        self.title, given, self._lines = _split(text)
        self.world = World(plan_of(given), tape=self._heard, weather=self._script)
        self._script.world = self.world

    def tell(self) -> None:
        """Run the whole story. Raises StoryError, or whatever the cores break."""
        world = self.world
        for host in world.servers():
            host.start()
        world.controller.start()
        world.engine.run_until(300)
        for number, line in self._lines:
            words = shlex.split(line)
            if self._out is not None:
                self._out(f"{world.engine.now_ms:6d} # {line}")
            try:
                getattr(self, f"_do_{words[0]}")(words[1:])
            except StoryError as error:
                raise StoryError(f"line {number}: {line}: {error}") from None
            except (AttributeError, ValueError, KeyError, IndexError) as error:
                raise StoryError(
                    f"line {number}: {line}: {type(error).__name__} {error}"
                ) from error

    def _heard(self, now_ms: int, sign: str, source: str, target: str, message: object) -> None:
        if self._out is not None:
            self._out(f"{now_ms:6d} {source} {sign} {target} {message!r}")
        if sign == "--":
            return
        told = "hears" if sign == "=>" else source
        for pattern in self._nevers:
            if pattern.fits(self.world, told, target, message):
                raise StoryError(f"{told} -> {target} {message!r}, which must never be")
        if self._waiting is not None and self._waiting.fits(self.world, told, target, message):
            self._waiting = None

    # ---- lines ----

    def _do_come(self, words: list[str]) -> None:
        for name in words:
            self.world.clients[name].start()

    def _do_see(self, words: list[str]) -> None:
        self._waiting = _pattern(words)
        engine = self.world.engine
        limit_ms = engine.now_ms + SEE_MS
        while self._waiting is not None:
            if engine.now_ms > limit_ms or not engine.step():
                raise StoryError(f"not seen within {SEE_MS} ms")

    def _do_never(self, words: list[str]) -> None:
        self._nevers.append(_pattern(words))

    def _do_allow(self, words: list[str]) -> None:
        self._nevers.clear()

    def _do_hold(self, words: list[str]) -> None:
        self._script.once.append(("hold", _pattern(words)))

    def _do_lose(self, words: list[str]) -> None:
        self._script.once.append(("lose", _pattern(words)))

    def _do_double(self, words: list[str]) -> None:
        self._script.once.append(("double", _pattern(words)))

    def _do_release(self, words: list[str]) -> None:
        self._script.once = [entry for entry in self._script.once if entry[0] != "hold"]
        self.world.network.release()

    def _do_kill(self, words: list[str]) -> None:
        self.world.havoc.kill(self._host(words[0]))

    def _do_start(self, words: list[str]) -> None:
        self.world.havoc.restart(self._host(words[0]))

    def _do_replace(self, words: list[str]) -> None:
        if self.world.controller.up:
            self.world.havoc.replace_stopped_controller()
        else:
            self.world.havoc.replace_controller()

    def _do_stop(self, words: list[str]) -> None:
        self._host(words[0]).stop()

    def _do_go(self, words: list[str]) -> None:
        self._host(words[0]).go_on()

    def _do_drain(self, words: list[str]) -> None:
        self.world.havoc.orderly.drain(self._drained(words[0]))

    def _drained(self, name: str) -> WorkerHost | GatewayHost:
        host = self._host(name)
        if not isinstance(host, WorkerHost | GatewayHost):
            raise StoryError("only workers and gateways are drained")
        return host

    def _do_cut(self, words: list[str]) -> None:
        a, b = self._host(words[0]), self._host(words[1])
        streams = [stream for stream in a.streams if stream.peer(a) is b]
        if not streams:
            raise StoryError("no stream between them")
        for stream in streams:
            stream.cut()

    def _do_abort(self, words: list[str]) -> None:
        self.world.clients[words[0]].abort()

    def _do_leave(self, words: list[str]) -> None:
        self.world.clients[words[0]].vanish()

    def _do_break(self, words: list[str]) -> None:
        self.world.clients[words[0]].cut()

    def _do_rot(self, words: list[str]) -> None:
        store = self.world.stores[words[0]]
        for page in sorted(store.slab):
            self.world.havoc.rot_page(store, page)

    def _do_run(self, words: list[str]) -> None:
        self.world.engine.run_until(self.world.engine.now_ms + int(words[0]))

    def _do_expect(self, words: list[str]) -> None:
        host = self._host(words[0])
        if words[1] in ("has", "lacks"):
            self._expect_resident(host, words[1], words[2], words[3:])
            return
        path, compare, wanted = words[1:]
        found = self._number(host, path)
        fits = (
            _COMPARE[compare](found, int(wanted))
            if type(found) is int
            else _COMPARE[compare](_shown(found), wanted)
        )
        if not fits:
            raise StoryError(f"{path} is {_shown(found)}")

    def _expect_resident(self, host: Host, verb: str, client: str, state: list[str]) -> None:
        states = [
            resident.state.value
            for seq, resident in host.core.residents.items()
            if self.world.history.client_of.get(seq.request) == client
        ]
        if verb == "lacks":
            if states:
                raise StoryError(f"it has {client} in {states}")
        elif not states or (state and states != state):
            raise StoryError(f"it has {client} in {states}")

    def _number(self, host: Host, path: str) -> Any:
        if isinstance(host, ClientHost):
            return self._of_client(host, path)
        value: Any = host.core.snapshot()
        for name in path.split("."):
            value = value[name]
        return value

    def _of_client(self, client: ClientHost, path: str) -> Any:
        match path:
            case "tokens":
                return sum(len(part) for part in client.core.received())
            case "failure":
                return None if client.failure is None else client.failure.failure
            case "succeeded":
                return client.succeeded
            case "request":
                return client.request
            case _:
                raise StoryError("clients have tokens, failure, succeeded and request")

    def _do_finish(self, words: list[str]) -> None:
        self._script.once.clear()
        self.world.network.release()
        self.world.engine.run_until(self.world.engine.now_ms + 1)
        self.world.calm()
        self.world.finish()

    def _host(self, name: str) -> Host:
        world = self.world
        if name == "k" or name == world.controller.name:
            return world.controller
        old = world.havoc.rival(name)
        if old is not None:
            return old
        hosts: list[Host] = [
            *world.workers.values(),
            *world.stores.values(),
            *world.gateways.values(),
            *world.clients.values(),
        ]
        for host in hosts:
            if host.name == name:
                return host
        raise StoryError(f"there is no {name}")


def _pattern(words: list[str]) -> _Pattern:
    """``a -> b Kind [client] [field=value ...]`` or ``a hears Kind ...``."""
    if words[1] == "hears":
        source, target, rest = "hears", words[0], words[2:]
    elif words[1] == "->":
        source, target, rest = words[0], words[2], words[3:]
    else:
        raise StoryError(
            "a message is written: a -> b Kind [client] [field=value], or a hears Kind"
        )
    kind, *rest = rest
    client = rest.pop(0) if rest and "=" not in rest[0] else None
    fields = tuple((name, value) for name, _, value in (word.partition("=") for word in rest))
    return _Pattern(source, target, kind, client, fields)


def _split(text: str) -> tuple[str, list[str], list[tuple[int, str]]]:
    title: list[str] = []
    given: list[str] = []
    story: list[tuple[int, str]] = []
    part = "title"
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("  #", 1)[0].strip()
        if line in ("given", "story"):
            part = line
        elif part == "title":
            title.append(line)
        elif line and not line.startswith("#"):
            if part == "given":
                given.append(line)
            else:
                story.append((number, line))
    if not story:
        raise StoryError("a story needs a part 'given' and a part 'story'")
    return "\n".join(title).strip(), given, story


def tell(path: Path, *, tape: Callable[[str], None] | None = None) -> Story:
    """Run the story in a file and return it."""
    story = Story(path.read_text(), tape=tape)
    story.tell()
    return story
