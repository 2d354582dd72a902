"""The card that ``copying`` copies from and to: CUDA's streams, events and pinned memory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.pointwise import copy_blocks
from deepinfer.workers.gpu.copying import STREAMS, Event, Pairs, PinError, Way
from deepinfer.workers.gpu.inputs import on_card


class CudaCopyDevice:
    """A CUDA device. Steps are on the stream that is current where this is made."""

    def __init__(self, device: torch.device) -> None:
        # Not torch's cudart: CuPy's clears the error of a call that is refused, so that the next
        # kernel is not blamed for it; and its copies take plain addresses.
        self._runtime: Any = importlib.import_module("cupy.cuda.runtime")
        self._device = device
        self._steps = torch.cuda.current_stream(device)
        self._streams = {
            way: [
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(STREAMS)
            ]
            for way in Way
        }
        # Not behind other copies: what is gathered next waits for them.
        self._tables = {
            way: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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

    def pairs(self, way: Way, pairs: Sequence[tuple[int, int]]) -> Pairs:
        with torch.cuda.stream(self._tables[way]):
            table = on_card(pairs, torch.int32, self._device)
        written = self._event(self._tables[way])
        for stream in self._streams[way]:
            stream.wait_event(written)
        return table

    def copy_rows(self, way: Way, stream: int, memory: Tensor, pairs: Pairs, some: range) -> None:
        with torch.cuda.stream(self._streams[way][stream]):
            copy_blocks(memory, pairs[some.start : some.stop])

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
