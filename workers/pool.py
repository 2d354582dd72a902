"""The paged KV pool of one device: bytes, typed views of them, and block copies.

It allocates no blocks (``workers.core`` decides which id belongs to whom) and quantises nothing
(the backend does). Everything here is bit-exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kvstore.core.layout import SCALE_BYTES, KvLayout, StorageType

Buffer = Tensor | memoryview | bytearray | bytes
"""A flat byte buffer: a contiguous uint8 tensor or anything with the buffer protocol."""

Wait = Callable[[], None]
"""Returns when a copy has ended; to be called by whoever began it."""
Fence = Any
"""Behind every step that was launched before ``PagedPool.fence`` was asked for it."""

TORCH_DTYPES: Final[dict[StorageType, torch.dtype]] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """``count`` blocks with adjacent ids from ``first``: one copy."""

    first: int
    count: int


def merge_runs(block_ids: Sequence[int]) -> Iterator[BlockRun]:
    """Merge neighbours that are adjacent and ascending; the order of ``block_ids`` is kept."""
    first = count = 0
    for block_id in block_ids:
        if count and block_id == first + count:
            count += 1
            continue
        if count:
            yield BlockRun(first, count)
        first, count = block_id, 1
    if count:
        yield BlockRun(first, count)


class BlockCopies(Protocol):
    """Copies beside the steps: ``workers.gpu.copying.CardCopies``."""

    def fence(self) -> Fence: ...

    def register(self, address: int, size: int) -> Callable[[], None] | None: ...

    def ring_rows(self, block_bytes: int) -> int: ...

    def start_out(
        self, memory: Tensor, block_ids: Sequence[int], host: int, fence: Fence
    ) -> Wait | None: ...

    def start_in(
        self, memory: Tensor, block_ids: Sequence[int], host: int, fence: Fence
    ) -> Wait | None: ...


class PagedPool:
    """``num_blocks`` blocks of ``layout`` on one device.

    ``storage`` is uint8 ``[num_blocks, block_bytes]``, zeroed. Owner: the worker's engine thread;
    copies may run elsewhere only for blocks that no step reads or writes meanwhile.

    Index operations on torch's CPU do not know float8, so gathers and scatters go through integer
    *word* views of the same bytes (``words``, ``k_words``, ``v_words``): bits are copied, never
    converted.

    ``copies`` copies blocks beside the steps, and has ``ring_rows`` of memory behind the blocks for
    itself; without it, blocks are copied where and when it is asked for.

    Raises ValueError for a ``num_blocks`` below 1.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        copies: BlockCopies | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"PagedPool.num_blocks must be at least 1, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.copies = copies
        self._copied_in = itertools.count(1)  # in one go whatever thread asks
        self.copies_in = 0
        """Changes with every copy into sequences' blocks, before the first byte is written."""
        ring = 0 if copies is None else copies.ring_rows(layout.block_bytes)
        self._memory = torch.zeros(
            (num_blocks + ring, layout.block_bytes), dtype=torch.uint8, device=self.device
        )
        self.storage = self._memory[:num_blocks]
        dtype = layout.dtype
        self._k = [
            self._typed(dtype.k_storage, layout.k_offset(layer)) for layer in range(layout.layers)
        ]
        self._v = [
            self._typed(dtype.v_storage, layout.v_offset(layer)) for layer in range(layout.layers)
        ]
        self._scales = (
            [self._scale_view(layer) for layer in range(layout.layers)] if dtype.scaled else []
        )
        self._layer_words = [
            self._words(layout.k_offset(layer), layout.layer_stride)
            for layer in range(layout.layers)
        ]
        self._k_words = [
            self._row_words(layout.k_offset(layer), dtype.k_bytes) for layer in range(layout.layers)
        ]
        self._v_words = [
            self._row_words(layout.v_offset(layer), dtype.v_bytes) for layer in range(layout.layers)
        ]

    def k(self, layer: int) -> Tensor:
        """K of one layer, a view ``[num_blocks, kv_heads, block_size, head_dim]`` as stored."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """V of one layer, a view ``[num_blocks, kv_heads, block_size, head_dim]`` as stored."""
        return self._v[layer]

    def scales(self, layer: int) -> Tensor:
        """Scales of one layer, a float16 view ``[num_blocks, 2 (K, V), kv_heads, block_size]``.

        Raises ValueError when the dtype stores no scales.
        """
        if not self._scales:
            raise ValueError(f"KV dtype {self.layout.dtype.name} stores no scales")
        return self._scales[layer]

    def layer_words(self, layer: int) -> Tensor:
        """K and V of one layer as integer words, a view ``[num_blocks, words]`` to gather from."""
        return self._layer_words[layer]

    def k_words(self, layer: int) -> Tensor:
        """K of one layer as words, a view ``[num_blocks, kv_heads, block_size, words a row]``."""
        return self._k_words[layer]

    def v_words(self, layer: int) -> Tensor:
        """V of one layer as words, a view ``[num_blocks, kv_heads, block_size, words a row]``."""
        return self._v_words[layer]

    def block(self, block_id: int) -> Tensor:
        """The bytes of one block over all layers, a uint8 view ``[block_bytes]``."""
        self._check_ids((block_id,))
        return self.storage[block_id]

    def fence(self) -> Fence:
        """What copies that are begun later on must wait for: every step launched so far.

        To be asked for once a block's last step was launched and before the copy is begun; steps
        that are launched after it hold no copy up.
        """
        return None if self.copies is None else self.copies.fence()

    def copy_out(self, block_ids: Sequence[int], target: Buffer) -> None:
        """Copy whole blocks, in the order given, into ``target``.

        ``target`` must hold exactly ``layout.payload_bytes(len(block_ids))`` bytes and be
        writable. Raises ValueError naming both sizes, or an id outside the pool.
        """
        _finish(self.begin_out(block_ids, target, self.fence()))

    def copy_in(self, block_ids: Sequence[int], source: Buffer) -> None:
        """Copy ``source`` into whole blocks, in the order given; the inverse of ``copy_out``.

        Raises ValueError as ``copy_out``, and for a block named twice.
        """
        _finish(self.begin_in(block_ids, source, self.fence()))

    def begin_out(self, block_ids: Sequence[int], target: Buffer, fence: Fence) -> Wait | None:
        """``copy_out`` behind ``fence``; returns what waits until it has ended, None if it has."""
        flat = self._flat(target, len(block_ids), "target", writable=True)
        self._check_ids(block_ids)
        if self.copies is not None:
            return _holding(
                flat, self.copies.start_out(self._memory, block_ids, flat.data_ptr(), fence)
            )
        at = 0
        for run in merge_runs(block_ids):
            span = self.storage[run.first : run.first + run.count].reshape(-1)
            flat[at : at + span.numel()].copy_(span)
            at += span.numel()
        return None

    def begin_in(
        self, block_ids: Sequence[int], source: Buffer, fence: Fence, *, of_sequences: bool = True
    ) -> Wait | None:
        """``copy_in`` behind ``fence``; returns what waits until it has ended, None if it has.

        Blocks that are not ``of_sequences`` change nothing that a step has computed.
        """
        if of_sequences:
            self.copies_in = next(self._copied_in)
        flat = self._flat(source, len(block_ids), "source", writable=False)
        self._check_ids(block_ids)
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"block_ids names a block twice: {list(block_ids)}")
        if self.copies is not None:
            return _holding(
                flat, self.copies.start_in(self._memory, block_ids, flat.data_ptr(), fence)
            )
        at = 0
        for run in merge_runs(block_ids):
            span = self.storage[run.first : run.first + run.count].reshape(-1)
            span.copy_(flat[at : at + span.numel()])
            at += span.numel()
        return None

    def check(self) -> None:
        """Assert that views, layout and storage still describe the same bytes."""
        assert self.storage.shape == (self.num_blocks, self.layout.block_bytes)
        assert self.storage.is_contiguous()
        base = self.storage.data_ptr()
        for layer in range(self.layout.layers):
            assert self._k[layer].data_ptr() == base + self.layout.k_offset(layer)
            assert self._v[layer].data_ptr() == base + self.layout.v_offset(layer)
            if self._scales:
                assert self._scales[layer].data_ptr() == base + self.layout.k_scale_offset(layer)

    def _typed(self, storage: StorageType, offset: int) -> Tensor:
        layout = self.layout
        dtype = TORCH_DTYPES[storage]
        size = dtype.itemsize
        head = layout.block_size * layout.head_dim
        return self._elements(dtype).as_strided(
            (self.num_blocks, layout.kv_heads, layout.block_size, layout.head_dim),
            (layout.block_bytes // size, head, layout.head_dim, 1),
            offset // size,
        )

    def _scale_view(self, layer: int) -> Tensor:
        layout = self.layout
        return self._elements(torch.float16).as_strided(
            (self.num_blocks, 2, layout.kv_heads, layout.block_size),
            (layout.block_bytes // SCALE_BYTES, layout.scale_elements, layout.block_size, 1),
            layout.k_scale_offset(layer) // SCALE_BYTES,
        )

    def _words(self, offset: int, size: int) -> Tensor:
        stride = self.layout.block_bytes
        dtype = _widest_word(offset, size, stride)
        width = dtype.itemsize
        return self._elements(dtype).as_strided(
            (self.num_blocks, size // width), (stride // width, 1), offset // width
        )

    def _row_words(self, offset: int, element_bytes: int) -> Tensor:
        layout = self.layout
        row = layout.head_dim * element_bytes
        dtype = _widest_word(offset, row, layout.block_bytes)
        words = row // dtype.itemsize
        return self._elements(dtype).as_strided(
            (self.num_blocks, layout.kv_heads, layout.block_size, words),
            (layout.block_bytes // dtype.itemsize, layout.block_size * words, words, 1),
            offset // dtype.itemsize,
        )

    def _elements(self, dtype: torch.dtype) -> Tensor:
        """The whole storage as elements of ``dtype`` (a tail too short for one is left out)."""
        flat = self.storage.view(-1)
        return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)

    def _flat(self, buffer: Buffer, blocks: int, name: str, *, writable: bool) -> Tensor:
        flat = _as_bytes(buffer, name, writable=writable)
        expected = self.layout.payload_bytes(blocks)
        if flat.numel() != expected:
            raise ValueError(
                f"{name} has {flat.numel()} bytes, {blocks} blocks need exactly {expected}"
            )
        return flat

    def _check_ids(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id {block_id} is outside 0..{self.num_blocks - 1}")


def _finish(wait: Wait | None) -> None:
    if wait is not None:
        wait()


def _holding(memory: Tensor, wait: Wait | None) -> Wait | None:
    """The wait, with the memory that the copy needs until then."""
    if wait is None:
        return None
    held = [memory]

    def waited() -> None:
        wait()
        held.clear()

    return waited


def _widest_word(*extents: int) -> torch.dtype:
    """The widest integer type whose size divides all of ``extents`` (bytes)."""
    return next(word for word in _WORDS if all(extent % word.itemsize == 0 for extent in extents))


def _as_bytes(buffer: Buffer, name: str, *, writable: bool) -> Tensor:
    if isinstance(buffer, Tensor):
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"{name} must be a contiguous uint8 tensor, got {buffer.dtype}")
        return buffer.view(-1)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name} must be a contiguous buffer")
    if writable and view.readonly:
        raise ValueError(f"{name} is read-only")
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch has no read-only tensors and warns about aliasing one, so such a source is copied.
    array: npt.NDArray[np.uint8] = np.frombuffer(view, dtype=np.uint8)
    return torch.from_numpy(array.copy() if view.readonly else array)
