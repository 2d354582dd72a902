"""Attention of others in the same run: torch's SDPA, and FlashInfer where it is installed.

FlashInfer compiles on first use, for a minute or more: ``Builds`` does that in processes of their
own while other things are measured, and gives up on those that take too long.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepinfer.deploy.bench.kernel_attention import (
    BLOCK_SIZE,
    PREFILLS,
    AttentionShape,
    prefill_flops,
)
from deepinfer.deploy.bench.kernel_timing import graph_us, rotations

DECODE_MODES: Final = {
    "fp16 CUDA cores": (torch.float16, False),
    "fp16 tensor cores": (torch.float16, True),
    "fp8 CUDA cores": (torch.float8_e4m3fn, False),
    "fp8 tensor cores": (torch.float8_e4m3fn, True),
}
PREFILL_MODES: Final = ("fa2", "auto")
_WORDS_MAX: Final = 300


def flashinfer_version() -> str | None:
    """None: it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    return str(flashinfer.__version__)


class Builds:
    """FlashInfer's compilations, each in a process."""

    def __init__(self, modes: Sequence[str], shape: str) -> None:
        self._processes = {
            mode: subprocess.Popen(
                [sys.executable, "-m", __name__, mode, shape],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for mode in modes
        }

    def ready(self, mode: str, until: float) -> str | None:
        """Wait for one until the monotonic time; None: it is there, else what went wrong."""
        process = self._processes[mode]
        try:
            code = process.wait(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "its compilation took too long"
        return None if code == 0 else f"its compilation ended with code {code}"

    def close(self) -> None:
        """End those that are still at it."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def time_flashinfer_decode(
    shape: AttentionShape, mode: str, cells: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """As ``time_decode``, by FlashInfer in one of ``DECODE_MODES``."""
    config, device = shape.config, shape.card.device
    dtype, _ = DECODE_MODES[mode]
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    for batch, context in cells:
        found: dict[str, Any] = {"mode": mode, "batch": batch, "context": context, "us": None}
        try:
            blocks = batch * context // BLOCK_SIZE
            size = (blocks, config.kv_heads, BLOCK_SIZE, config.head_dim)
            read = 2 * torch.Size(size).numel() * dtype.itemsize
            count = rotations(read, most=64, least=3)
            pages = [_pages(size, dtype, device) for _ in range(count)]
            wrapper = _decode_wrapper(shape, mode, scratch, batch, context)
            q = torch.randn(batch, config.heads, config.head_dim, device=device).half()
            us = graph_us([functools.partial(wrapper.run, q, each) for each in pages])
            found |= {"us": us, "bytes": read, "bytes_per_s": read / us * 1e6}
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            found["error"] = str(error)[:_WORDS_MAX]
        yield found


def time_flashinfer_prefill(shape: AttentionShape, mode: str, name: str) -> dict[str, Any]:
    """As ``time_prefill`` in FP16, by FlashInfer; ``auto`` takes FA3 on Hopper."""
    config, device = shape.config, shape.card.device
    parts = PREFILLS[name]
    found: dict[str, Any] = {"mode": mode, "shape": name, "us": None}
    try:
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper, blocks = _prefill_wrapper(shape, mode, scratch, parts)
        rows = sum(new for _, new in parts)
        size = (blocks, config.kv_heads, BLOCK_SIZE, config.head_dim)
        moved = 4 * (torch.Size(size).numel() + rows * config.heads * config.head_dim)
        count = rotations(moved, most=24, least=3)
        pages = [_pages(size, torch.float16, device) for _ in range(count)]
        q = torch.randn(rows, config.heads, config.head_dim, device=device).half()
        outs = [torch.empty_like(q) for _ in range(count)]
        calls = [
            functools.partial(wrapper.run, q, each, out=out)
            for each, out in zip(pages, outs, strict=True)
        ]
        us = graph_us(calls)
        found |= {
            "ran": getattr(wrapper, "_backend", None),
            "us": us,
            "flop_per_s": prefill_flops(config, parts) / us * 1e6,
        }
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        found["error"] = str(error)[:_WORDS_MAX]
    return found


def time_sdpa(shape: AttentionShape, name: str) -> Iterator[dict[str, Any]]:
    """Torch's attention over dense FP16 K and V of the same lengths, equal requests in a batch."""
    config, device = shape.config, shape.card.device
    parts = PREFILLS[name]
    (start, new), *_ = parts
    if start:
        return  # causal over a longer K: not what its flag means
    for label, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        found: dict[str, Any] = {"mode": f"SDPA {label}", "shape": name, "us": None}
        try:
            sizes = [
                (len(parts), heads, new, config.head_dim)
                for heads in (config.heads, config.kv_heads, config.kv_heads)
            ]
            count = rotations(4 * torch.Size(sizes[0]).numel(), most=12)
            sets = [[torch.randn(s, device=device).half() for s in sizes] for _ in range(count)]
            with sdpa_kernel(backend):
                us = graph_us([functools.partial(_sdpa, *each) for each in sets])
            found |= {"us": us, "flop_per_s": prefill_flops(config, parts) / us * 1e6}
        except RuntimeError as error:
            found["error"] = str(error)[:_WORDS_MAX]
        yield found


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def _pages(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(size, device=device, dtype=torch.float16).to(dtype) for _ in range(2))
    return k, v


def _decode_wrapper(
    shape: AttentionShape, mode: str, scratch: Tensor, batch: int, context: int
) -> Any:
    import flashinfer

    config, device = shape.config, shape.card.device
    dtype, tensor_cores = DECODE_MODES[mode]
    blocks = context // BLOCK_SIZE
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        scratch, "HND", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        torch.arange(0, batch * blocks + 1, blocks, device=device, dtype=torch.int32),
        torch.randperm(batch * blocks, device=device).int(),
        torch.full((batch,), BLOCK_SIZE, device=device, dtype=torch.int32),
        config.heads,
        config.kv_heads,
        config.head_dim,
        BLOCK_SIZE,
        q_data_type=torch.float16,
        kv_data_type=dtype,
    )
    return wrapper


def _prefill_wrapper(
    shape: AttentionShape, mode: str, scratch: Tensor, parts: Sequence[tuple[int, int]]
) -> tuple[Any, int]:
    import flashinfer

    config, device = shape.config, shape.card.device
    own = [-(-(start + new) // BLOCK_SIZE) for start, new in parts]
    blocks = sum(own)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "HND", backend=mode)
    wrapper.plan(
        ints([sum(new for _, new in parts[:at]) for at in range(len(parts) + 1)]),
        ints([sum(own[:at]) for at in range(len(parts) + 1)]),
        torch.randperm(blocks, device=device).int(),
        ints([(start + new - 1) % BLOCK_SIZE + 1 for start, new in parts]),
        config.heads,
        config.kv_heads,
        config.head_dim,
        BLOCK_SIZE,
        causal=True,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    )
    return wrapper, blocks


def main(mode: str, shape_name: str) -> None:
    """Run one mode once, so that what it compiles is cached."""
    from deepinfer.deploy.bench.random_weights import SHAPES
    from deepinfer.workers.gpu.card import find_card

    shape = AttentionShape(config=SHAPES[shape_name], card=find_card())
    if mode in DECODE_MODES:
        (found,) = time_flashinfer_decode(shape, mode, [(1, 512)])
    else:
        found = time_flashinfer_prefill(shape, mode, "2k")
    torch.cuda.synchronize()
    if found["us"] is None:
        raise SystemExit(str(found.get("error")))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
