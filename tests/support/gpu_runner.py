"""The CUDA runner on CPU tensors: its kernels emulated, no graphs, a tiny random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kernels.attention import DecodeWorkspace
from deepinfer.kernels.linear_w8a8 import Scratch
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.gpu import decoder, steps
from deepinfer.workers.gpu import deterministic as row_steps
from deepinfer.workers.gpu.buffers import Buffers
from deepinfer.workers.gpu.copying import CardCopies
from deepinfer.workers.gpu.deterministic import fixed_workspace
from deepinfer.workers.gpu.graphs import StepGraph
from deepinfer.workers.gpu.limits import StepLimits
from deepinfer.workers.gpu.opening import make_runner
from deepinfer.workers.gpu.planes import GpuPlanes, ShelvedPlanes
from deepinfer.workers.gpu.reader import WeightForm
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.shapes import model_specs
from deepinfer.workers.gpu.weights import AS_STORED, linears, load_weights
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.levels import PrecisionLevels
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool
from kernels.simt.build import emulator, prebuild
from support.copy_device import LazyDevice


class ReplayRecorder:
    """Stands in for ``graphs.Recorder``: what was launched is launched again."""

    def record(self, step: Callable[[], None]) -> StepGraph:
        step()
        graph: Any = SimpleNamespace(replay=step)
        return StepGraph(graph, kernels=1)


@dataclass(slots=True)
class Shelf:
    """Where a runner's lower planes go: what copies them, and then what sheds them."""

    device: LazyDevice
    head: bool = False
    planes: GpuPlanes | None = None


CPU = torch.device("cpu")
BLOCK_SIZE = 16
FUSED_ROWS = 4


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Kernels run in the emulator; the one cuBLAS call that torch's CPU lacks is spelt out."""

    def multiply(out: Tensor, x: Tensor, weight: Tensor) -> None:
        torch.mm(x.float(), weight.float().t(), out=out)

    with emulator(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "multiply_into_float32", multiply)
        for module in (steps, row_steps):
            patch.setattr(module, "recording", lambda: nullcontext(ReplayRecorder()))
        yield


def cpu_runner(
    config: ModelConfig,
    *,
    model: LoadedModel | None = None,
    kv_cache_dtype: str = "fp16",
    blocks: int = 32,
    rows: int = 64,
    sequences: int = 8,
    ahead: bool = True,
    deterministic: bool = False,
    form: WeightForm = AS_STORED,
    levels: int = 1,
    w8a8_rows: int = 0,
    shelf: Shelf | None = None,
) -> GpuRunner:
    """A runner for ``model``, by default ``random_model(config)``, kept in ``form``.

    Up to 4 rows are fused (all of a ``deterministic`` one), steps have up to ``rows``.

    The pool has ``blocks`` and a spare one for each sequence, if it is to run ``ahead``. With a
    ``shelf`` the lower planes of a nested model lie in blocks between them.
    """
    weights = load_weights(model or random_model(config), CPU, config.max_positions, form)
    layout = kv_layout(config, resolve_kv_dtype(kv_cache_dtype), BLOCK_SIZE)
    first, shelved, copies = blocks, None, None
    if shelf is not None:
        copies = CardCopies(shelf.device)
        shelved = ShelvedPlanes(weights, layout, head=shelf.head, pin=copies.register)
        blocks += shelved.blocks
    pool = PagedPool(layout, blocks + sequences, copies=copies)
    if shelved is not None:
        weights = shelved.placed(shelved.taken_from(weights), pool.storage[first:blocks])
    prebuild(model_specs(weights, pool.layout, w8a8=w8a8_rows > 0))
    activations = None
    if w8a8_rows:
        columns = max(each.columns for each in linears(weights))
        activations = Scratch.allocate(rows, columns, CPU)
    fused_rows = rows if deterministic else FUSED_ROWS
    if deterministic:
        workspace = fixed_workspace(config, rows, CPU)
    else:
        workspace = DecodeWorkspace.allocate(sequences, config.heads, config.head_dim, 8, CPU)
    buffers = Buffers.allocate(config, rows, fused_rows, sequences, workspace, CPU)
    limits = StepLimits(rows=rows, sequences=sequences, context=config.max_positions)
    runner = make_runner(
        weights,
        pool,
        buffers,
        limits,
        fused_rows=fused_rows,
        multiprocessors=4,
        deterministic=deterministic,
        spares=range(blocks, blocks + sequences) if ahead else (),
        levels=PrecisionLevels(config.layers, levels, w8a8_rows=w8a8_rows),
        activations=activations,
        upper_head=form.upper_head or (shelf is not None and shelf.head),
        level_min=levels - 1 if form.upper_only else 0,
    )
    if shelf is not None and shelved is not None and copies is not None:
        shelf.planes = GpuPlanes(shelved, pool, first, runner, copies.settle)
    return runner
