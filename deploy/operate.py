"""Emptying and restarting single processes of the cluster that runs here, as its operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc

from deepinfer.client import DeepInferError
from deepinfer.deploy import interrupts
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.launch import connect, running
from deepinfer.deploy.running import Running
from deepinfer.proto import control_pb2, control_pb2_grpc
from deepinfer.proto.bearer import bearer

POLL_S = 0.1
CALL_S = 5.0
FIND_S = 30.0
"""How long the controller may be away: it may be restarting too."""
EMPTY_S = 30.0
"""How long a drain may take behind its grace: the last copies, and what was lost on the way."""
BACK_S = 180.0
"""How long a restarted process may take to serve again: a worker loads its model."""
ALONE_GRACE_S = 5.0
"""The only gateway refuses all that comes while it drains, and clients do not try for ever."""

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses of a controller that may be back soon."""

Kind: TypeAlias = Literal["workers", "gateways"]
Level: TypeAlias = control_pb2.DrainLevel


class UnknownNameError(LaunchError):
    """The controller knows nobody of that name."""


@dataclass(slots=True)
class Operator:
    """The controller of one cluster, as its operator calls it; found anew after its restart."""

    here: Running
    _channel: grpc.Channel | None = None

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Everyone of a kind, by number.

        Raises:
            LaunchError: no gateway answers.
        """
        return tuple(sorted(self._status()[kind], key=lambda name: (len(name), name)))

    def drain(self, name: str, grace_s: float | None, life: int = 0) -> Level:
        """Empty a worker or gateway (if it is still that life); how far it is.

        Raises:
            LaunchError: there is none of that name, or the controller does not answer.
        """
        grace_ms = None if grace_s is None else round(max(0.0, grace_s) * 1000)
        asked = control_pb2.DrainRequest(name=name, grace_ms=grace_ms, incarnation=life)
        return self._call(lambda stub, **how: stub.Drain(asked, **how))

    def level(self, name: str) -> Level:
        """How far it is. Raises as ``drain``."""
        asked = control_pb2.DrainRequest(name=name)
        return self._call(lambda stub, **how: stub.GetDrain(asked, **how))

    def serves(self, name: str, *, after: int) -> bool:
        """Whether a life of it that came after that one serves. Raises as ``drain``.

        A controller that was restarted meanwhile does not know of one that has not come back.
        """
        try:
            level = self.level(name)
        except UnknownNameError:
            return False
        return level.serving and level.incarnation > after

    def restart(self, name: str, life: int) -> Level:
        """End the process of a drained life. Raises as ``drain``, and if it is not drained."""
        asked = control_pb2.RestartRequest(name=name, incarnation=life)
        return self._call(lambda stub, **how: stub.Restart(asked, **how))

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _status(self) -> dict[str, Any]:
        trouble = ""
        for endpoint in self.here.endpoints:
            try:
                with connect(endpoint, None) as client:
                    return client.status()
            except DeepInferError as error:
                trouble = str(error)
        raise LaunchError(f"no gateway of {self.here.name} answers: {trouble}")

    def _call(self, call: Callable[..., Level]) -> Level:
        deadline = time.monotonic() + FIND_S
        while True:
            try:
                how = {"metadata": bearer(self.here.operator_token), "timeout": CALL_S}
                return call(self._stub(), **how)
            except grpc.RpcError as error:
                self.close()
                failed: Any = error  # a call's error says its status, whatever the stubs' types say
                if failed.code() is grpc.StatusCode.NOT_FOUND:
                    raise UnknownNameError(failed.details()) from error
                if failed.code() not in AWAY:
                    raise LaunchError(failed.details()) from error
                trouble: Exception = error
            except LaunchError as error:
                trouble = error
            if time.monotonic() > deadline:
                raise LaunchError(f"the controller does not answer: {trouble}") from trouble
            interrupts.check()
            time.sleep(POLL_S)

    def _stub(self) -> Any:
        if self._channel is None:
            address = self._status()["addresses"].get("controller")
            if address is None:
                raise LaunchError("the controller does not serve yet")
            self._channel = grpc.insecure_channel(address, (("grpc.enable_http_proxy", 0),))
        return control_pb2_grpc.ControlStub(self._channel)


@contextmanager
def operator(endpoint: str | None) -> Iterator[Operator]:
    """The operator of the cluster started here with that endpoint, or of the only one.

    Raises:
        LaunchError: there is none, or several and no endpoint was named.
    """
    made = Operator(running(endpoint))
    try:
        yield made
    finally:
        made.close()


def drain_one(
    cluster: Operator, name: str, grace_s: float | None, say: Callable[[str], None]
) -> Level:
    """Empty one process, and wait until it is.

    The wish is repeated as long as it takes: a controller that has just been restarted knows
    nothing of it.

    Raises:
        LaunchError: it is not empty ``EMPTY_S`` after its grace (never, without one).
    """
    first = cluster.drain(name, grace_s)
    began = time.monotonic()
    said = -1
    level = first
    while not level.drained and level.incarnation == first.incarnation:
        if level.left not in (0, said):
            said = level.left
            say(f"{name}: {said} {'request' if said == 1 else 'requests'} left")
        took_s = time.monotonic() - began
        if grace_s is not None and took_s > grace_s + EMPTY_S:
            raise LaunchError(f"{name} still has {level.left} requests after {took_s:.0f} s")
        interrupts.check()
        time.sleep(POLL_S)
        left_s = None if grace_s is None else grace_s - (time.monotonic() - began)
        level = cluster.drain(name, left_s, first.incarnation)
    return level


def restart_one(
    cluster: Operator, name: str, grace_s: float | None, say: Callable[[str], None]
) -> float:
    """Empty one process, restart it, and wait until the next life serves; the seconds that took.

    Raises:
        LaunchError: it does not become empty, or does not come back.
    """
    began = time.monotonic()
    old = cluster.level(name).incarnation
    level = drain_one(cluster, name, grace_s, say)
    if level.incarnation == old:  # or it has ended by itself meanwhile
        say(f"{name}: restarting")
        cluster.restart(name, old)
    deadline = time.monotonic() + BACK_S
    while not cluster.serves(name, after=old):
        if time.monotonic() > deadline:
            raise LaunchError(f"{name} does not serve again after {BACK_S:g} s")
        interrupts.check()
        time.sleep(POLL_S)
    took_s = time.monotonic() - began
    say(f"{name}: serves again after {took_s:.1f} s")
    return took_s


def restart_all(
    cluster: Operator, kinds: Sequence[Kind], grace_s: float, say: Callable[[str], None]
) -> dict[str, float]:
    """Restart every process of some kinds, one after the other; the seconds that each took.

    Raises:
        LaunchError: one does not become empty or come back: those behind it are left alone.
    """
    took: dict[str, float] = {}
    for kind in kinds:
        names = cluster.names(kind)
        alone = kind == "gateways" and len(names) == 1 and grace_s > ALONE_GRACE_S
        if alone:
            say(f"{names[0]} is the only gateway: {ALONE_GRACE_S:g} s of grace, not {grace_s:g}")
        for name in names:
            took[name] = restart_one(cluster, name, ALONE_GRACE_S if alone else grace_s, say)
    return took
