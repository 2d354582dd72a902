"""Times of GPU work: medians of CUDA-graph replays over more memory than the L2 holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

L2_TIMES: Final = 4
"""Launches of one graph go through at least so many times the L2's bytes."""

_LAUNCHES: Final = 12
"""Calls of a graph at least: what its beginning and its end take would else be theirs."""

_ROUNDS: Final = 9
_WARM_S: Final = 0.3
_SETTLE_S: Final = 0.02
"""Whatever is timed first after its operands were made was seen to be 10% slow."""
_BENIGN_STEP: Final = 1 << 26
_COPY_BYTES: Final = (1 << 30, 1 << 33)


def graph_us(calls: Sequence[Callable[[], object]], rounds: int = _ROUNDS) -> float:
    """Median microseconds of one of ``calls``, which are captured together, in their order.

    Few calls come several times, one after the other as before.
    """
    calls = list(calls) * math.ceil(_LAUNCHES / len(calls))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[-1]):  # what is loaded or allocated on first use
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            graph.replay()
            stream.synchronize()
        times: list[float] = []
        for _ in range(rounds):
            begin, end = _event(), _event()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times)


def rotations(bytes_each: int, *, most: int = 800, least: int = 2) -> int:
    """Calls of ``bytes_each`` distinct bytes that together pass ``L2_TIMES`` times the L2."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(least, min(most, math.ceil(L2_TIMES * l2 / bytes_each)))


def warm_up() -> None:
    """Bring the clocks up: an idle card runs them low."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    until = time.monotonic() + _WARM_S
    while time.monotonic() < until:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def copy_rates() -> dict[str, float]:
    """Bytes read and written a second by a copy within the card, by the buffer's size in bytes."""
    warm_up()
    found = {}
    for size in _COPY_BYTES:
        if torch.cuda.mem_get_info()[0] < 3 * size:
            continue
        source = torch.ones(size, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)

        def copy(source: Tensor = source, target: Tensor = target) -> None:
            target.copy_(source)

        found[str(size)] = 2 * size / graph_us([copy] * 4) * 1e6
        del source, target
        torch.cuda.empty_cache()
    return found


def fill_with_numbers(storage: Tensor) -> None:
    """Fill a pool with codes that are small, finite numbers in every KV dtype."""
    random = torch.Generator(storage.device).manual_seed(0)
    flat = storage.view(-1)
    size = min(_BENIGN_STEP, flat.numel())
    drawn = torch.randint(
        0, 32, (size,), generator=random, dtype=torch.uint8, device=storage.device
    )
    codes = 0x30 + (drawn & 15) + ((drawn & 16) << 3)
    for begin in range(0, flat.numel(), size):
        part = flat[begin : begin + size]
        part.copy_(codes[: part.numel()])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
