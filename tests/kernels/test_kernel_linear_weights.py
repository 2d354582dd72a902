"""Packed weights, plans and refusals of ``kernels.linear``: no kernel runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer.kernels import linear, linear_plans, reference_linear
from deepinfer.kernels.linear import F16Weight, Plan, TiledPlan, W4Weight, Workspace


def codes(n: int, k: int) -> torch.Tensor:
    return torch.randint(
        0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def scales(n: int, groups: int) -> torch.Tensor:
    return torch.linspace(0.01, 0.02, n * groups).reshape(n, groups).half()


def w4(n: int = 16, k: int = 64) -> W4Weight:
    return linear.pack_w4(codes(n, k), scales(n, k // 32))


def f16(n: int = 16, k: int = 64) -> F16Weight:
    return F16Weight(torch.ones(n, k).half())


def test_packing_is_undone_by_unpacking_and_pads_rows_to_128() -> None:
    for k in (32, 96, 128, 576):
        weight = linear.pack_w4(codes(8, k), scales(8, k // 32))
        assert weight.codes.shape == (8, -(-k // 128) * 16)
        assert (weight.rows, weight.columns, weight.group) == (8, k, 32)
        assert torch.equal(linear.unpack_w4(weight), codes(8, k))


def test_packed_words_are_laid_out_as_documented() -> None:
    k = 256
    q = codes(3, k)
    words = linear.pack_w4(q, scales(3, 2)).codes.long() & 0xFFFFFFFF
    place = (0, 4, 1, 5, 2, 6, 3, 7)
    for n, at in ((0, 0), (1, 77), (2, 130), (2, 255)):
        block, chunk, lane, element = at // 128, at % 128 // 32, at % 32 // 8, at % 8
        word = int(words[n, 16 * block + 4 * lane + chunk])
        assert word >> 4 * place[element] & 15 == int(q[n, at])


def test_values_are_scale_times_code_minus_zero() -> None:
    zeros = torch.tensor([[0, 16], [3, 8]])
    weight = linear.pack_w4(codes(2, 64), scales(2, 2), zeros)
    dense = reference_linear.dense(weight)
    for n, k in ((0, 0), (0, 40), (1, 31), (1, 63)):
        wanted = float(scales(2, 2)[n, k // 32]) * (
            int(codes(2, 64)[n, k]) - int(zeros[n, k // 32])
        )
        assert float(dense[n, k]) == wanted


def test_gate_and_up_alternate_in_eights() -> None:
    gate, up = torch.arange(16), torch.arange(100, 116)
    both = linear.interleave_gate_up(gate, up)
    assert both.tolist() == [*range(8), *range(100, 108), *range(8, 16), *range(108, 116)]
    packed = [linear.pack_w4(codes(16, 64)[i:], scales(16, 2)[i:]) for i in (0, 8)]
    halves = [linear.interleave_gate_up(p.codes[:8], p.codes[:8]) for p in packed]
    assert torch.equal(halves[0][8:], packed[0].codes[:8])
    assert not torch.equal(halves[0], halves[1])


@pytest.mark.parametrize("sm_count", [28, 82, 132])
def test_every_plan_is_compiled_and_fits_the_workspace(sm_count: int) -> None:
    known = set(linear.specs())
    workspace = Workspace.allocate("cpu")
    for n, k in ((576, 576), (960, 576), (3072, 1536), (2048, 2048), (2048, 11008), (22016, 2048)):
        f16_weight = F16Weight(torch.empty(n, k, dtype=torch.float16))
        words = torch.empty(n, -(-k // 128) * 16, dtype=torch.int32)
        w4_weight = W4Weight(words, torch.empty(n, k // 64, dtype=torch.float16), 64)
        warps = set()
        for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 1024):
            plan = linear.plan_for(f16_weight, m, sm_count)
            assert (linear_plans.f16_spec(plan) in known) == (m <= linear.max_rows(f16_weight))
            plan = linear.plan_for(w4_weight, m, sm_count)
            assert linear_plans.w4_spec(64, plan) in known
            if isinstance(plan, TiledPlan):
                blocks = plan.blocks(n, m)
                if plan.splits > 1:
                    floats = blocks * plan.splits * plan.rows * plan.columns
                    assert floats <= workspace.sums.numel()
                    assert blocks <= workspace.tickets.numel()
                alone = linear.plan_for(w4_weight, m, sm_count, split=False)
                assert isinstance(alone, TiledPlan)
                assert alone.splits == 1
            else:
                assert isinstance(plan, Plan)
                warps.add(plan.warps)
        assert len(warps) == 1  # the order of the sums is that of every batch


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "weight type": (lambda: F16Weight(torch.ones(8, 32)), r"F16Weight.weight is torch.float32"),
    "weight width": (lambda: F16Weight(half(8, 40)), r"F16Weight.weight has 40 columns.* 32"),
    "weight stride": (lambda: F16Weight(half(32, 8).T), r"F16Weight.weight has strides \(1, 8\)"),
    "bias shape": (lambda: F16Weight(half(8, 32), half(7)), r"F16Weight.bias has shape \[7\]"),
    "bias type": (lambda: F16Weight(half(8, 32), torch.ones(8).int()), r"F16Weight.bias is"),
    "group": (lambda: W4Weight(half(8, 16).int(), half(8, 1), 96), r"group must be .* got 96"),
    "codes": (lambda: W4Weight(half(8, 8).int(), half(8, 2), 32), r"codes has shape \[8, 8\]"),
    "code range": (lambda: linear.pack_w4(codes(8, 32) + 1, half(8, 1)), r"codes must be 0..15"),
    "groups": (lambda: linear.pack_w4(codes(8, 64), half(8, 3)), r"scales has 3 groups.* 64"),
    "zero range": (
        lambda: linear.pack_w4(codes(8, 32), half(8, 1), torch.full((8, 1), 17)),
        r"zeros must be integers from 0 to 16",
    ),
    "fractional zero": (
        lambda: linear.pack_w4(codes(8, 32), half(8, 1), torch.full((8, 1), 7.5)),
        r"zeros must be integers",
    ),
    "zeros shape": (
        lambda: linear.pack_w4(codes(8, 64), half(8, 2), torch.zeros(8, 1)),
        r"zeros is \[8, 1\] on cpu, scales \[8, 2\]",
    ),
    "x type": (lambda: linear.linear_norm(half(1, 16), torch.ones(1, 64), f16()), r"x is torch.f"),
    "x width": (lambda: linear.linear_norm(half(1, 16), half(1, 32), f16()), r"x has shape"),
    "no rows": (lambda: linear.linear_norm(half(0, 16), half(0, 64), f16()), r"x has 0 rows"),
    "1025 rows": (
        lambda: linear.linear_norm(half(1025, 16), half(1025, 64), w4()),
        r"x has 1025 .* to 1024",
    ),
    "out": (lambda: linear.linear_norm(half(2, 16), half(1, 64), f16()), r"out has .* \[1, 16\]"),
    "logits": (lambda: linear.linear_logits(half(1, 16), half(1, 64), f16()), r"out is .*float16"),
    "sumsq": (
        lambda: linear.linear_norm(half(1, 16), half(1, 64), f16(), sumsq=torch.ones(2, 4)),
        r"sumsq has shape \[2, 4\], it must be \[1, any\]",
    ),
    "swiglu rows": (
        lambda: linear.linear_swiglu(half(1, 12), half(1, 64), f16(24)),
        r"weight has 24 rows",
    ),
    "residual": (
        lambda: linear.linear_residual(
            half(1, 16), half(1, 16), torch.ones(1, 1), half(1, 64), f16(), half(16)
        ),
        r"residual is torch.float16",
    ),
    "gamma": (
        lambda: linear.linear_residual(
            half(1, 16), torch.ones(1, 16), torch.ones(1, 1), half(1, 64), f16(), half(8)
        ),
        r"gamma has shape \[8\]",
    ),
    "sums of squares": (
        lambda: linear.linear_residual(
            half(1, 16), torch.ones(1, 16), torch.ones(1, 2), half(1, 64), f16(), half(16)
        ),
        r"sumsq_out has shape \[1, 2\], it must be \[1, 1\]",
    ),
    "held": (
        lambda: linear.linear_norm(
            half(1, 16), half(1, 1024), f16(16, 1024), plan=Plan(1, 8, 2, 1)
        ),
        r"plan holds 1 steps of x in each of 8 warps; weight has 16",
    ),
    "no workspace": (
        lambda: linear.linear_norm(
            half(1, 16), half(1, 64), f16(), plan=TiledPlan(2, 1, 2, splits=3)
        ),
        r"plan splits K over 3 CTAs",
    ),
    "small workspace": (
        lambda: linear.linear_norm(
            half(1, 16),
            half(1, 64),
            f16(),
            workspace=Workspace(torch.zeros(8), torch.zeros(8).int()),
            plan=TiledPlan(2, 1, 2, splits=3),
        ),
        r"workspace has 8 floats and 8 tickets; plan needs 1536 and 1",
    ),
    "expand range": (lambda: linear.expand_w4(half(10, 64), w4(), 7), r"row0 = 7 and the 10 rows"),
    "gate and up": (
        lambda: linear.interleave_gate_up(half(8, 2), half(16, 2)),
        r"gate is .*\[8, 2\], up .*\[16, 2\]",
    ),
    "odd gate": (lambda: linear.interleave_gate_up(half(4, 2), half(4, 2)), r"gate has 4 rows"),
    "no GPU": (
        lambda: linear.linear_norm(half(1, 16), half(1, 64), f16()),
        r"linear_f16.* is a tensor on cpu",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()
