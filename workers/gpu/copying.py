"""Copies between blocks on a card and host memory, beside the steps that go on meanwhile.

*Side streams* carry them, so that what leaves and what comes in share the bus and neither waits for
a step: in each direction two, in turn, for between two copies of one stream the bus idles as long
as a quarter of a block takes. Many short runs of blocks therefore cross the bus together: a kernel
gathers them in a *ring buffer* on the card, or scatters them from there, in a small part of the
time that the bus takes, and beside it. Each side stream has a buffer of its own, and what a thread
launches for one load of it is not mixed with another thread's: so the order of the stream keeps a
gather from a buffer that is still read. What keeps a copy and the steps apart:

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
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from deepinfer.workers.pool import BlockRun, Wait, merge_runs

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 1 << 20
"""Of one staging buffer."""
LANE_BUFFERS: Final = 2
LANES: Final = 2
"""Copies that may be staged at once; others wait for their turn."""
STREAMS: Final = 2
"""In each direction."""
FEW_RUNS: Final = 8
"""More are spread over the streams and gathered; so few are worth neither."""
RING_BYTES: Final = 4 << 20
"""Of one ring buffer, at most. Longer ones move faster (97% of one copy's rate instead of 95% at
8 MiB) and hold the steps beside them up more (7% instead of 4%), measured on an H200."""

COPY_BYTES_MULTIPLE: Final = 16
"""Of rows that the device can copy on the card."""

Event = Any
"""What a device's events are is its own business."""
Pairs = Any
"""So is how it holds pairs of block ids."""


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

    def pairs(self, way: Way, pairs: Sequence[tuple[int, int]]) -> Pairs:
        """(from, to) rows, for ``copy_rows`` on that way's streams from now on.

        Whoever asks keeps them until the last such copy has ended.
        """
        ...

    def copy_rows(self, way: Way, stream: int, memory: Tensor, pairs: Pairs, some: range) -> None:
        """Start copying rows of ``memory``, which is the card's: ``some`` of the pairs."""
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


class Span(NamedTuple):
    """Adjacent bytes of a pool, by their address."""

    address: int
    size: int


class _Load(NamedTuple):
    """What crosses the bus as one copy."""

    stream: int
    span: Span
    """Blocks, or a ring buffer."""
    gathered: range
    """The call's pairs that fill the buffer, or empty it; none for blocks."""


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
        self._launching = {
            (way, stream): threading.Lock() for way in Way for stream in range(STREAMS)
        }

    def fence(self) -> Event:
        """Behind every step launched so far."""
        return self._device.steps_event()

    def settle(self) -> None:
        """Return when every step launched so far has ended."""
        self._device.synchronize(self._device.steps_event())

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
                    "%.0f MiB of host memory cannot be pinned (%s): copies of it are staged, and "
                    "slower",
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

    def ring_rows(self, block_bytes: int) -> int:
        """Rows that a pool of such blocks has behind its own, for the ring buffers.

        None for blocks that are too long to be worth gathering, or of a length that the kernel does
        not take.
        """
        return len(self._launching) * _buffer_rows(block_bytes)

    def start_out(
        self, memory: Tensor, block_ids: Sequence[int], host: int, fence: Event
    ) -> Wait | None:
        """Copy rows of ``memory``, in the order given, to the address ``host``.

        ``memory`` is uint8 ``[blocks + ring_rows, block_bytes]``. Returns what waits until that is
        done; None: it is. Whoever is given a wait must call it, and keep the host memory until
        then.
        """
        return self._start(Way.OUT, memory, block_ids, host, fence)

    def start_in(
        self, memory: Tensor, block_ids: Sequence[int], host: int, fence: Event
    ) -> Wait | None:
        """As ``start_out``, the other way. No block may be named twice."""
        return self._start(Way.IN, memory, block_ids, host, fence)

    def _start(
        self, way: Way, memory: Tensor, block_ids: Sequence[int], host: int, fence: Event
    ) -> Wait | None:
        device = self._device
        turn = next(self._turns) % STREAMS
        runs = list(merge_runs(block_ids))
        if not self._is_registered(host, len(block_ids) * memory.shape[1]):
            lanes = self._staging()
            if lanes is not None:
                device.wait_for(way, turn, fence)
                self._staged(lanes, way, turn, [_span(memory, run) for run in runs], host)
                return None
        streams = [(turn + n) % STREAMS for n in range(STREAMS if len(runs) > FEW_RUNS else 1)]
        loads, pairs = _plan(way, memory, runs, streams)
        for stream in streams:
            device.wait_for(way, stream, fence)
        table: Pairs = None
        try:
            if pairs:
                table = device.pairs(way, pairs)
            for load in loads:
                self._launch(way, memory, load, table, host)
                host += load.span.size
        except BaseException:
            for stream in streams:
                device.synchronize(device.copies_event(way, stream))
            raise
        events = [device.copies_event(way, stream) for stream in streams]

        def wait(_kept: Pairs = table) -> None:
            for event in events:
                device.synchronize(event)

        return wait

    def _launch(self, way: Way, memory: Tensor, load: _Load, table: Pairs, host: int) -> None:
        stream, (address, size), gathered = load
        with self._launching[way, stream]:
            if gathered and way is Way.OUT:
                self._device.copy_rows(way, stream, memory, table, gathered)
            self._copy(way, stream, address, host, size)
            if gathered and way is Way.IN:
                self._device.copy_rows(way, stream, memory, table, gathered)

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


def _buffer_rows(block_bytes: int) -> int:
    """Blocks of one ring buffer; 0: such blocks are not gathered."""
    rows = RING_BYTES // block_bytes
    return 0 if rows < 2 or block_bytes % COPY_BYTES_MULTIPLE else rows


def _span(memory: Tensor, run: BlockRun) -> Span:
    size = memory.shape[1]
    return Span(memory.data_ptr() + run.first * size, run.count * size)


def _plan(
    way: Way, memory: Tensor, runs: Sequence[BlockRun], streams: Sequence[int]
) -> tuple[list[_Load], list[tuple[int, int]]]:
    """How the runs cross the bus, in their order; and the pairs of rows to copy on the card."""
    loads: list[_Load] = []
    pairs: list[tuple[int, int]] = []
    rows = _buffer_rows(memory.shape[1])
    ring = len(memory) - len(Way) * STREAMS * rows + (STREAMS * rows if way is Way.IN else 0)
    for number, group in enumerate(_groups(runs, rows if len(runs) > FEW_RUNS else 0)):
        stream = streams[number % len(streams)]
        begin = len(pairs)
        if len(group) == 1:
            span = _span(memory, group[0])
        else:
            blocks = [run.first + at for run in group for at in range(run.count)]
            buffer = ring + stream * rows
            span = _span(memory, BlockRun(buffer, len(blocks)))
            there = enumerate(blocks, buffer)
            pairs += [(block, row) if way is Way.OUT else (row, block) for row, block in there]
        loads.append(_Load(stream, span, range(begin, len(pairs))))
    return loads, pairs


def _groups(runs: Sequence[BlockRun], most: int) -> Iterator[list[BlockRun]]:
    """Neighbours of at most ``most`` blocks together; a run that is longer, by itself."""
    group: list[BlockRun] = []
    blocks = 0
    for run in runs:
        if group and blocks + run.count > most:
            yield group
            group, blocks = [], 0
        group.append(run)
        blocks += run.count
    if group:
        yield group


def _pieces(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans cut to the length of a staging buffer."""
    for address, size in spans:
        for begin in range(0, size, STAGING_BYTES):
            yield Span(address + begin, min(STAGING_BYTES, size - begin))
