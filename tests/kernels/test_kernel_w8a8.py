"""FP8 throughout: quantised rows and outliers, emulated or on a card; the product on a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import nested_cases
from deepinfer.kernels import linear_w8a8, nested
from deepinfer.kernels.linear_w8a8 import Scratch, W8A8Weight
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: in the emulator, or on a card."""
    device: str = request.param
    with emulator() if device == "cpu" else nullcontext():
        yield device


def test_rows_are_codes_times_a_scale(device: str) -> None:
    nested_cases.check_quantize(5, 2600, device=device)


def test_outliers_are_added_to_the_product(device: str) -> None:
    nested_cases.check_outliers(48, 96, 19, device=device)


@pytest.mark.gpu
def test_the_product() -> None:
    nested_cases.check_w8a8(256, 512, 33, device="cuda")


def test_bad_input_is_refused_by_name() -> None:
    scratch = Scratch.allocate(2, 64, "cpu")
    half = torch.zeros(4, 64).half()
    with pytest.raises(ValueError, match=r"scratch has 128 codes and 2 scales; x is \[4, 64\]"):
        linear_w8a8.quantize_rows(half, scratch)
    with pytest.raises(ValueError, match=r"x has 20 columns, which is no multiple of 8"):
        linear_w8a8.quantize_rows(half[:2, :20].contiguous()[:, :20].contiguous(), scratch)
    with pytest.raises(ValueError, match=r"weight has 24 rows, which is no multiple of 16"):
        W8A8Weight.of(nested.encode(torch.zeros(24, 64).half()))
    weight = W8A8Weight.of(nested.encode(torch.zeros(16, 64).half()))
    assert torch.equal(weight.scales, torch.full((1, 16), 2.0**-8))
    with pytest.raises(ValueError, match=r"out has shape \[4, 8\], it must be \[4, 16\]"):
        linear_w8a8.linear_w8a8(torch.zeros(4, 8).half(), half, weight, scratch)
