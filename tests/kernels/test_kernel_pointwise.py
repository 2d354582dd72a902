"""The pointwise kernels, emulated or on a card, and the errors of their functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import pointwise_cases as cases
from deepinfer.kernels import pointwise
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: in the emulator, or on a card."""
    device: str = request.param
    with emulator(pointwise.specs()) if device == "cpu" else nullcontext():
        yield device


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 576), (2, 1048)])
def test_embed(rows: int, columns: int, device: str) -> None:
    cases.check_embed(rows, columns, device=device)


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 1028), (2, 8192)])
def test_norms(rows: int, columns: int, device: str) -> None:
    cases.check_norms(rows, columns, device=device)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1544)])
def test_swiglu(rows: int, width: int, device: str) -> None:
    cases.check_swiglu(rows, width, device=device)


@pytest.mark.parametrize("block_bytes", [16, 70000])
def test_copy_blocks(block_bytes: int, device: str) -> None:
    cases.check_copy_blocks(block_bytes, device=device)


@pytest.mark.parametrize("shape", cases.ROPES, ids=str)
@pytest.mark.parametrize("dtype", cases.FORMATS)
def test_rope_kv_write(dtype: str, shape: cases.Rope, device: str) -> None:
    cases.check_rope_kv_write(dtype, shape, device=device)


def test_empty_steps_launch_nothing() -> None:
    x, y = torch.zeros(0, 64), torch.zeros(0, 64).half()
    gamma = torch.zeros(64).half()
    pointwise.embed(
        x, None, None, torch.zeros(0, dtype=torch.int32), torch.zeros(3, 64).half(), None
    )
    pointwise.rms_norm(y, x, gamma, 1e-6)
    pointwise.residual_add_norm(y, x, y, gamma, 1e-6)
    pointwise.swiglu(y[:, :32].contiguous(), y)
    pointwise.copy_blocks(
        torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int32)
    )


def test_errors_name_the_argument() -> None:
    x, h, gamma = torch.zeros(2, 64), torch.zeros(2, 64).half(), torch.zeros(64).half()
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"token_ids must be contiguous torch.int32 \[2\]"):
        pointwise.embed(x, None, None, ids.long(), h, None)
    with pytest.raises(ValueError, match="hidden, sumsq and gamma must all be given"):
        pointwise.embed(x, h, None, ids, h, gamma)
    with pytest.raises(ValueError, match="multiple of 4 up to 8192 columns, got 66"):
        pointwise.rms_norm(h, torch.zeros(2, 66), gamma, 1e-6)
    with pytest.raises(ValueError, match=r"out must be .*\[2, 64\]"):
        pointwise.rms_norm(h.float(), x, gamma, 1e-6)
    with pytest.raises(ValueError, match="branch must be contiguous"):
        pointwise.residual_add_norm(h, x, h.expand(2, 64).mT.contiguous().mT, gamma, 1e-6)
    with pytest.raises(ValueError, match=r"gate_up must be .*\[2, 128\]"):
        pointwise.swiglu(h, h)
    with pytest.raises(ValueError, match="block_bytes must be multiples of 16"):
        pointwise.copy_blocks(torch.zeros(3, 24, dtype=torch.uint8), ids.view(1, 2))
