"""Copies between blocks on a card and host memory, beside the steps that go on meanwhile.

*Side streams* carry them, so that what leaves and what comes in share the bus and neither waits for
a step: in each direction two, in turn, for between two copies of one stream the bus idles as long
as a quarter of a block takes. What keeps a copy and the steps apart:

* A copy waits, on the card, for its *fence*: an event behind every step that was launched when the
  copy was asked for. The last step that touched its blocks is one of them, whether the copy reads
  them (a victim's) or writes them (blocks that somebody else had before).
* Steps know of no copy: nobody hears that one has ended before the host has waited for the event
  behind it. So blocks are freed, and computed on, only after that; and a copy that is cancelled
  or fails is waited for as well.
* Only the thread that asked for a copy waits, for that copy's own event, never for the card.

Host memory that is *registered* (a store's slabs) is copied to and from directly. Other memory goes
through pinned staging buffers, piece by piece: one piece is on the bus while another is copied by
the host. Where nothing can be pinned, the driver stages by itself, more slowly.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import torch

from deepinfer.workers.pool import Span, Wait

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 1 << 20
"""Of one staging buffer."""
LANE_BUFFERS: Final = 2
LANES: Final = 2
"""Copies that may be staged at once; others wait for their turn."""
STREAMS: Final = 2
"""In each direction."""
FEW_SPANS: Final = 8
"""More are spread over the streams; so few are not worth another event."""

Event = Any
"""What a device's events are is its own business."""


class Way(Enum):
    """Where a copy goes."""

    OUT = "out of the card"
    IN = "into the card"


class PinError(OSError):
    """Host memory could not be pinned; says why."""


class CopyDevice(Protocol):
    """What copies need of a card. Every method may be called on any thread."""

    def steps_event(self) -> Event:
        """An event behind everything that was launched for steps so far."""
        ...

    def wait_for(self, way: Way, stream: int, event: Event) -> None:
        """Copies on that stream which are asked for from now on wait for ``event``, on the card."""
        ...

    def copy(self, way: Way, stream: int, target: int, source: int, size: int) -> None:
        """Start copying ``size`` bytes between addresses, one of which is the card's."""
        ...

    def copies_event(self, way: Way, stream: int) -> Event:
        """An event behind every copy on that stream so far."""
        ...

    def synchronize(self, event: Event) -> None:
        """Return when ``event`` has happened; other threads go on."""
        ...

    def register(self, address: int, size: int) -> None:
        """Pin memory of this process. Raises PinError."""
        ...

    def unregister(self, address: int) -> None: ...

    def pinned(self, size: int) -> int:
        """Address of new pinned memory, kept as long as the device. Raises PinError."""
        ...


class _Staged(NamedTuple):
    """A piece in a staging buffer."""

    event: Event
    buffer: int
    host: int
    size: int


class CardCopies:
    """Copies of one pool; what ``PagedPool`` asks for. Every method may be called on any thread."""

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self._changing = threading.Lock()
        self._registered: tuple[range, ...] = ()
        self._refused = False
        self._lanes: queue.SimpleQueue[tuple[int, ...]] | None = None
        self._unstaged = False
        self._turns = itertools.count()

    def fence(self) -> Event:
        """Behind every step launched so far."""
        return self._device.steps_event()

    def register(self, address: int, size: int) -> Callable[[], None] | None:
        """Pin host memory so that copies are direct; returns what undoes it.

        None where it cannot be pinned: said once, and its copies are staged.
        """
        try:
            self._device.register(address, size)
        except PinError as error:
            if not self._refused:
                self._refused = True
                log.warning(
                    "a slab of %.0f MiB of the KV store cannot be pinned (%s): swaps are staged, "
                    "and slower",
                    size / 2**20,
                    error,
                )
            return None
        held = range(address, address + size)
        with self._changing:
            self._registered = (*self._registered, held)

        def undo() -> None:
            with self._changing:
                self._registered = tuple(one for one in self._registered if one is not held)
            self._device.unregister(address)

        return undo

    def start_out(self, spans: Sequence[Span], host: int, fence: Event) -> Wait | None:
        """Copy ``spans`` of the card, one behind the other, to the address ``host``.

        Returns what waits until that is done; None: it is. Whoever is given a wait must call it,
        and keep the host memory until then.
        """
        return self._start(Way.OUT, spans, host, fence)

    def start_in(self, spans: Sequence[Span], host: int, fence: Event) -> Wait | None:
        """As ``start_out``, the other way."""
        return self._start(Way.IN, spans, host, fence)

    def _start(self, way: Way, spans: Sequence[Span], host: int, fence: Event) -> Wait | None:
        device = self._device
        turn = next(self._turns) % STREAMS
        size = sum(span.size for span in spans)
        if not self._is_registered(host, size):
            lanes = self._staging()
            if lanes is not None:
                device.wait_for(way, turn, fence)
                self._staged(lanes, way, turn, spans, host)
                return None
        streams: Sequence[int] = range(STREAMS) if len(spans) > FEW_SPANS else (turn,)
        for stream in streams:
            device.wait_for(way, stream, fence)
        try:
            for number, span in enumerate(spans):
                self._copy(way, streams[number % len(streams)], span.address, host, span.size)
                host += span.size
        except BaseException:
            for stream in streams:
                device.synchronize(device.copies_event(way, stream))
            raise
        events = [device.copies_event(way, stream) for stream in streams]

        def wait() -> None:
            for event in events:
                device.synchronize(event)

        return wait

    def _copy(self, way: Way, stream: int, card: int, host: int, size: int) -> None:
        target, source = (host, card) if way is Way.OUT else (card, host)
        self._device.copy(way, stream, target, source, size)

    def _is_registered(self, address: int, size: int) -> bool:
        return any(
            held.start <= address and address + size <= held.stop for held in self._registered
        )

    # ---- through staging buffers ----

    def _staging(self) -> queue.SimpleQueue[tuple[int, ...]] | None:
        """The lanes that are free; None where none could be pinned."""
        with self._changing:
            if self._lanes is None and not self._unstaged:
                try:
                    lanes = [
                        tuple(self._device.pinned(STAGING_BYTES) for _ in range(LANE_BUFFERS))
                        for _ in range(LANES)
                    ]
                except PinError as error:
                    self._unstaged = True
                    log.warning("nothing can be pinned (%s): swaps are slow", error)
                else:
                    self._lanes = queue.SimpleQueue()
                    for lane in lanes:
                        self._lanes.put(lane)
            return self._lanes

    def _staged(
        self,
        lanes: queue.SimpleQueue[tuple[int, ...]],
        way: Way,
        stream: int,
        spans: Sequence[Span],
        host: int,
    ) -> None:
        lane = lanes.get()
        under_way: deque[_Staged] = deque()
        try:
            for number, piece in enumerate(_pieces(spans)):
                if len(under_way) == len(lane):
                    self._arrive(way, under_way.popleft())
                buffer = lane[number % len(lane)]
                if way is Way.IN:
                    ctypes.memmove(buffer, host, piece.size)
                self._copy(way, stream, piece.address, buffer, piece.size)
                event = self._device.copies_event(way, stream)
                under_way.append(_Staged(event, buffer, host, piece.size))
                host += piece.size
            while under_way:
                self._arrive(way, under_way.popleft())
        finally:
            for staged in under_way:  # after an error: the buffers are somebody else's next
                self._device.synchronize(staged.event)
            lanes.put(lane)

    def _arrive(self, way: Way, staged: _Staged) -> None:
        self._device.synchronize(staged.event)
        if way is Way.OUT:
            ctypes.memmove(staged.host, staged.buffer, staged.size)


def _pieces(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans cut to the length of a staging buffer."""
    for address, size in spans:
        for begin in range(0, size, STAGING_BYTES):
            yield Span(address + begin, min(STAGING_BYTES, size - begin))


class CudaCopyDevice:
    """A CUDA device. Steps are on the stream that is current where this is made."""

    def __init__(self, device: torch.device) -> None:
        # Not torch's cudart: CuPy's clears the error of a call that is refused, so that the next
        # kernel is not blamed for it; and its copies take plain addresses.
        self._runtime: Any = importlib.import_module("cupy.cuda.runtime")
        self._steps = torch.cuda.current_stream(device)
        self._streams = {
            way: [
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(STREAMS)
            ]
            for way in Way
        }
        self._kinds = {
            Way.OUT: self._runtime.memcpyDeviceToHost,
            Way.IN: self._runtime.memcpyHostToDevice,
        }
        self._kept: list[torch.Tensor] = []

    def steps_event(self) -> Event:
        return self._event(self._steps)

    def wait_for(self, way: Way, stream: int, event: Event) -> None:
        self._streams[way][stream].wait_event(event)

    def copy(self, way: Way, stream: int, target: int, source: int, size: int) -> None:
        handle = self._streams[way][stream].cuda_stream
        self._runtime.memcpyAsync(target, source, size, self._kinds[way], handle)

    def copies_event(self, way: Way, stream: int) -> Event:
        return self._event(self._streams[way][stream])

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def register(self, address: int, size: int) -> None:
        try:
            self._runtime.hostRegister(address, size, self._runtime.hostAllocPortable)
        except self._runtime.CUDARuntimeError as error:
            raise PinError(str(error)) from error

    def unregister(self, address: int) -> None:
        self._runtime.hostUnregister(address)

    def pinned(self, size: int) -> int:
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise PinError(str(error).partition("\n")[0]) from error
        self._kept.append(memory)
        return memory.data_ptr()

    @staticmethod
    def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
