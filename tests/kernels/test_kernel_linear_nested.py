"""Linears, expansion and embedding of nested weights, emulated or on a card."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import linear_cases
from deepinfer.deploy.validate import nested_cases as cases
from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.kernels import linear, nested
from deepinfer.kernels.linear import F16Weight, NestedWeight, Plan
from deepinfer.kernels.linear_plans import HOPPER_TARGET, f16_spec, nested_spec
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


def holds(results: Iterator[Accuracy]) -> None:
    for result in results:
        assert result.problem is None


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "m"),
    [
        (48, 96, 1),  # K ends inside a step
        (40, 672, 11),  # N ends inside a tile, K inside FP8's step
        (32, 2144, 3),  # x is read for every tile
    ],
)
def test_linears_equal_the_reference(
    rows: int, columns: int, m: int, fp8: bool, device: str
) -> None:
    weight = cases.nested_weight(rows, columns, bias=True, device=device)
    holds(linear_cases.check_epilogues(weight, m, fp8=fp8))


@pytest.mark.parametrize(("rows", "columns", "m"), [(64, 608, 3), (40, 96, 16), (16, 2144, 1)])
def test_fp16_mode_has_the_bits_of_plain_weights(
    rows: int, columns: int, m: int, device: str
) -> None:
    plain, weight = cases.shifted_pair(rows, columns, device=device)
    assert weight.row_shift is not None
    assert weight.outliers == 0
    assert int(weight.row_shift.min()) < 0 < int(weight.row_shift.max())
    holds(cases.check_same_bits(plain, weight, m))


def test_x_in_the_ring_changes_no_bit(device: str) -> None:
    """Plans of Hopper cards; steps that end within K, tiles within N, rows that are not there."""
    m = 13
    plain, weight = cases.shifted_pair(40, 1120, device=device)
    x = linear_cases.inputs(m, 1120, "normal", device)

    def logits(source: F16Weight | NestedWeight, held: int, fp8: bool = False) -> torch.Tensor:
        out = torch.full((m, 40), torch.nan, device=device)
        linear.linear_logits(out, x, source, fp8=fp8, plan=Plan(2, 8, 2, held))
        return out

    wanted = logits(plain, 0)
    assert torch.equal(logits(plain, -1), wanted)
    assert torch.equal(logits(weight, -1), wanted)
    assert torch.equal(logits(weight, -1, fp8=True), logits(weight, 0, fp8=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_gets_the_same_bits_in_every_batch(fp8: bool, device: str) -> None:
    weight = cases.nested_weight(24, 672, bias=False, device=device)
    holds(linear_cases.check_batches(weight, fp8=fp8))


def test_every_half_is_expanded_to_its_bits(device: str) -> None:
    """All halves up to 1.75, in both modes; a product with 1 is the weight."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = patterns[patterns.abs() <= nested.W_MAX].to(device)
    columns = 992
    values = torch.nn.functional.pad(halves, (0, -len(halves) % columns)).view(-1, columns)
    weight = nested.encode(values)
    for fp8, expected in ((False, values), (True, weight.decode_fp8())):
        out = torch.empty_like(values)
        for row in range(0, len(values), 11):
            linear.expand_nested(out[row : row + 11], weight, row, fp8=fp8)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    x = torch.eye(columns, device=device).half()[:: columns // 16][:16].contiguous()
    for fp8, expected in ((False, values), (True, weight.decode_fp8())):
        out = torch.empty(16, len(values), device=device)
        linear.linear_logits(out, x, weight, fp8=fp8)
        assert torch.equal(out, expected[:, :: columns // 16].T[:16].float())


def test_expansion_undoes_shifts_and_places_outliers(device: str) -> None:
    cases.check_expand(cases.nested_weight(40, 96, bias=False, device=device))


@pytest.mark.parametrize("columns", [64, 1048])
def test_embedding(columns: int, device: str) -> None:
    cases.check_embed(columns, device=device)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def test_bad_input_is_refused_by_name() -> None:
    weight = nested.encode(half(16, 64))
    shed = NestedWeight(weight.upper, None)
    out, x = half(1, 16), half(1, 64)
    with pytest.raises(ValueError, match=r"weight.lower is None.*FP8 mode only"):
        linear.linear_norm(out, x, shed)
    with pytest.raises(ValueError, match=r"weight.lower is None"):
        linear.expand_nested(half(16, 64), shed, 0)
    with pytest.raises(ValueError, match=r"fp8 is True: weight is F16Weight"):
        linear.linear_norm(out, x, F16Weight(half(16, 64)), fp8=True)
    with pytest.raises(ValueError, match=r"weight has 40 columns, which is no multiple of 32"):
        linear.linear_norm(out, half(1, 40), nested.encode(half(16, 40)))
    shifted = torch.zeros(16 * 64 + 1, dtype=torch.uint8)[1:].view(16, 64)
    with pytest.raises(ValueError, match=r"weight.upper starts at an address"):
        linear.linear_norm(out, x, NestedWeight(shifted, None), fp8=True)
    with pytest.raises(ValueError, match=r"row0 = 7 and the 10 rows"):
        linear.expand_nested(half(10, 64), weight, 7)
    wide = nested.encode(half(16, 1024))
    with pytest.raises(ValueError, match=r"plan holds 1 steps of x in each of 8 warps.* has 16"):
        linear.linear_norm(out, half(1, 1024), wide, plan=Plan(1, 8, 2, 1))


@pytest.mark.parametrize("hopper", [False, True])
def test_plans_are_among_the_specs_and_sum_as_plain_weights_do(hopper: bool) -> None:
    known = set(linear.specs_for(HOPPER_TARGET if hopper else "sm_86"))
    plan_for = functools.partial(linear.plan_for, sm_count=132, hopper=hopper)
    for n, k in ((576, 576), (2560, 2048), (2048, 11008), (151936, 2048)):
        plane = torch.empty(n, k, dtype=torch.uint8)
        weight = NestedWeight(plane, plane)
        plain = F16Weight(torch.empty(n, k, dtype=torch.float16))
        for m in (1, 8, 9, 16):
            f16, fp16_mode = plan_for(plain, m), plan_for(weight, m)
            assert isinstance(f16, Plan)
            assert isinstance(fp16_mode, Plan)
            assert f16.warps == fp16_mode.warps
            assert f16_spec(f16) in known
            assert nested_spec(False, fp16_mode) in known
            assert nested_spec(True, plan_for(weight, m, fp8=True)) in known
