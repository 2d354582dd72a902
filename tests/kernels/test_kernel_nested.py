"""NestedFP weights against arithmetic that is done another way: no kernel runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels import nested
from deepinfer.kernels.linear import interleave_gate_up
from deepinfer.kernels.nested import NestedWeight, NestError, encode


def every_half() -> torch.Tensor:
    """All finite halves, in the order of their bits."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return halves[halves.isfinite()]


def e4m3_value(code: int) -> float:
    """What an E4M3 code below 0x7F means, by the format's definition."""
    exponent, mantissa = code >> 3, code & 7
    return (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)


def nearest_e4m3(magnitudes: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest E4M3 values, ties to the even one, by looking at all of them."""
    values = torch.tensor([e4m3_value(code) for code in range(0x7F)], dtype=torch.float64)
    distance = (magnitudes.double()[:, None] - values).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    return (2 * nearest.long() - (nearest & (torch.arange(0x7F) % 2 == 1)).long()).argmax(1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def gaussian(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype).to(torch.float16)


def planted(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """40 rows of a Gaussian; of some, one or three weights are as large as 2, 7 or 60,000."""
    weight = gaussian(40, 96, dtype)
    weight[3, 5], weight[17, 0], weight[17, 40], weight[17, 95] = 2.0, -7.0, 3.5, 1.7509765625
    weight[39, 95] = 60000.0
    return weight


def test_every_half_up_to_the_limit_comes_back_and_its_upper_byte_is_e4m3() -> None:
    halves = every_half()
    halves = halves[halves.abs() <= nested.W_MAX]
    assert len(halves) == 32_258
    weight = encode(halves[None])
    assert weight.row_shift is None
    assert weight.outliers == 0
    assert same_bits(weight.decode(), halves[None])
    assert torch.equal(encode(halves[None], row_scaling=False).upper, weight.upper)
    codes = weight.upper[0].long()
    assert torch.equal(codes & 0x7F, nearest_e4m3(256 * halves.abs().double()))
    assert torch.equal(codes >> 7 == 1, halves.signbit())
    as_float8 = weight.upper.view(torch.float8_e4m3fn).float() / 256
    assert torch.equal(weight.decode_fp8().float(), as_float8)
    assert torch.equal(as_float8[0].signbit(), halves.signbit())


def test_every_larger_half_comes_back_too() -> None:
    halves = every_half()
    large = halves[halves.abs() > nested.W_MAX]
    alone = encode(large[:, None])  # rows of one weight: a shift always does
    assert same_bits(alone.decode(), large[:, None])
    fp8 = alone.decode_fp8().float().flatten()
    assert bool((fp8 - large.float()).abs().le(large.float().abs() / 16).all())
    assert alone.row_shift is not None
    scaled = large.abs().float() * torch.exp2(-alone.row_shift.float())
    kept = alone.upper.flatten() != 0
    assert bool((scaled[kept] <= nested.W_MAX).all())
    assert bool((scaled[kept] > nested.W_MAX / 2).all())  # no smaller shift would do
    # FP8 rounds the others up to 65,536, which is no half.
    assert bool((large[~kept].abs() >= 63488).all())
    together = encode(large[None])
    assert same_bits(together.decode(), large[None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gaussian_with_planted_outliers_is_exact(dtype: torch.dtype) -> None:
    weight = planted(dtype)
    coded = encode(weight)
    assert same_bits(coded.decode(), weight)
    shift = torch.zeros(40) if coded.row_shift is None else coded.row_shift
    listed = {row for row in range(40) if coded.row_range(row, row + 1).outliers}
    assert listed | {int(row) for row in shift.nonzero()} == {3, 17, 39}
    assert not any(shift[row] for row in listed)
    if 17 in listed:
        assert coded.row_range(17, 18).outlier_columns.tolist() == [0, 40, 95]  # type: ignore[union-attr]
    fp8 = coded.decode_fp8()
    error = (fp8.float() - weight.float()).abs()
    # Half of the last of four bits, or of E4M3's subnormal step 2**-17.
    step = torch.exp2(shift.float() - 17)[:, None]
    assert bool((error <= weight.float().abs() / 16 + step / 2).all())
    with pytest.raises(NestError, match=r"value of 6e\+04 in absolute value in row 39"):
        encode(weight, row_scaling=False)


def test_a_row_is_shifted_where_that_is_exact_and_lists_its_outliers_where_it_is_not() -> None:
    coarse = torch.tensor([[3.0, -0.5, 0.0, -0.0, 2.0**-14]]).half()
    shifted = encode(coarse)
    assert shifted.row_shift is not None
    assert shifted.row_shift.tolist() == [1]
    assert shifted.outliers == 0
    fine = coarse.clone()
    fine[0, 4] = 2.0**-24  # the smallest half: half of it is none
    listed = encode(fine)
    assert listed.row_shift is None
    assert listed.outlier_starts is not None
    assert listed.outlier_columns is not None
    assert listed.outlier_values is not None
    assert listed.outlier_starts.tolist() == [0, 1]
    assert listed.outlier_columns.tolist() == [0]
    assert listed.outlier_values.tolist() == [3.0]
    assert int(listed.upper[0, 0]) == 0
    assert listed.lower is not None
    assert int(listed.lower[0, 0]) == 0
    for weight, coded in ((coarse, shifted), (fine, listed)):
        assert same_bits(coded.decode(), weight)
        coded.check()


halves_lists = st.lists(
    st.one_of(
        st.floats(width=16, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1.75, -1.75, 1.7509765625, 2.0**-24, -(2.0**-24), 65504.0]),
        st.floats(-0.0625, 0.0625, width=16),
    ),
    min_size=12,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(halves_lists, st.integers(0, 2), st.integers(0, 3))
def test_any_matrix_survives_all_that_is_done_to_it(
    values: list[float], rows: int, columns: int
) -> None:
    weight = torch.tensor(values, dtype=torch.float16).view(4, 3)
    coded = encode(weight)
    coded.check()
    assert same_bits(coded.decode(), weight)
    assert bool(coded.decode_fp8().isfinite().all())
    parts = [coded.row_range(0, 1), coded.row_range(1, 4)]
    assert same_bits(torch.cat([part.decode() for part in parts]), weight)
    whole = nested.pad(nested.stack([parts[1], parts[0], coded]), rows, columns)
    whole.check()
    wanted = torch.cat((weight[1:], weight[:1], weight))
    assert same_bits(whole.decode(), torch.nn.functional.pad(wanted, (0, columns, 0, rows)))


def test_fused_weights_are_those_of_fused_matrices() -> None:
    gate, up = planted()[8:24], planted().flip(0)[:16]  # the outliers change places
    bias = torch.arange(16).float()
    coded = [encode(gate, bias=bias), encode(up, bias=-bias)]
    both = nested.interleave(*coded)
    assert same_bits(both.decode(), interleave_gate_up(gate, up))
    assert torch.equal(both.decode_fp8(), interleave_gate_up(*(c.decode_fp8() for c in coded)))
    assert both.bias is not None
    assert torch.equal(both.bias, interleave_gate_up(bias, -bias))
    both.check()
    shed = nested.stack([NestedWeight(c.upper, None, bias=c.bias) for c in coded])
    assert shed.lower is None
    assert nested.pad(shed, 1, 1).rows == 33


def test_large_matrices_are_coded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = planted()
    whole = encode(weight)
    monkeypatch.setattr(nested, "_ELEMENTS_AT_ONCE", 7 * 96)
    sliced = encode(weight)
    for name, tensor in whole.tensors().items():
        assert torch.equal(getattr(sliced, name), tensor), name
    assert same_bits(sliced.decode(), weight)
    assert torch.equal(sliced.decode_fp8(), whole.decode_fp8())
    with pytest.raises(NestError, match="in row 17"):
        encode(weight[8:30].roll(8, 0), row_scaling=False)
    weight[30, 1] = torch.nan
    with pytest.raises(ValueError, match=r"weight \[30, 1\] = nan"):
        encode(weight)


def test_bfloat16_is_rounded_to_half_once_and_float32_must_be_exact() -> None:
    wide = torch.tensor([[0.1, 2.0**-17, 2.0**-24 * 0.75, -3.0]])
    coded = encode(wide.bfloat16())
    assert same_bits(coded.decode(), wide.bfloat16().half())
    assert same_bits(encode(wide.half().float()).decode(), wide.half())
    assert encode(wide.half()).nbytes == 2 * 4 + 8 + 4 + 2


def test_signed_powers_of_two_on_rows_are_shifts() -> None:
    """What key scales do: shifts below zero, and added to those that are there."""
    weight = planted()
    coded = encode(weight)
    factors = torch.arange(40).remainder(9).sub(4).to(torch.int8)
    scaled = nested.scale_rows(coded, factors)
    scaled.check()
    wanted = weight.float() * torch.exp2(factors.float())[:, None]
    assert torch.equal(scaled.decode(), wanted.half())


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def with_value(value: float, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    weight = torch.zeros(4, 8, dtype=dtype)
    weight[2, 7] = value
    return weight


def damaged(**changes: list[int]) -> NestedWeight:
    coded = encode(torch.tensor([[2.0**-24, 3.0, 4.0], [0.0, 0.0, 0.0]]).half())
    parts = coded.tensors()
    for name, values in changes.items():
        parts[name] = torch.tensor(values, dtype=parts[name].dtype if name in parts else torch.int8)
    return NestedWeight(parts.pop("upper"), parts.pop("lower"), **parts)


byte = torch.uint8
REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "nan": (lambda: encode(with_value(float("nan"))), r"weight \[2, 7\] = nan"),
    "inf": (lambda: encode(with_value(float("-inf"))), r"weight \[2, 7\] = -inf is no finite"),
    "range": (
        lambda: encode(with_value(70000.0, torch.bfloat16)),
        r"weight \[2, 7\] = 70144 is beyond FP16's range",
    ),
    "float32": (lambda: encode(with_value(0.1, torch.float32)), r"float32 and holds values"),
    "integers": (lambda: encode(half(2, 2).to(byte)), r"torch.uint8: only float16"),
    "vector": (lambda: encode(half(2)), r"shape \[2\], it must have rows and columns"),
    "planes": (
        lambda: NestedWeight(half(2, 8).to(byte), half(2, 4).to(byte)),
        r"NestedWeight.lower has shape \[2, 4\], it must be \[2, 8\]",
    ),
    "plane type": (lambda: NestedWeight(half(2, 8), None), r"NestedWeight.upper is torch.float16"),
    "some of the list": (
        lambda: NestedWeight(half(1, 1).to(byte), None, outlier_values=half(1)),
        r"outlier_starts, outlier_columns and outlier_values must be there together",
    ),
    "bias": (lambda: encode(half(2, 8), bias=half(3)), r"NestedWeight.bias has shape \[3\]"),
    "shed": (lambda: NestedWeight(half(1, 1).to(byte), None).decode(), r"lower is None"),
    "stacked columns": (
        lambda: nested.stack([encode(half(1, 8)), encode(half(1, 4))]),
        r"have \[8, 4\] columns",
    ),
    "stacked biases": (
        lambda: nested.stack([encode(half(1, 8)), encode(half(1, 8), bias=half(1))]),
        r"some have a bias, others none",
    ),
    "odd gate": (lambda: nested.interleave(encode(half(4, 1)), encode(half(4, 1))), r"4 rows"),
    "unlike gate": (lambda: nested.interleave(encode(half(8, 1)), encode(half(16, 1))), r"up 16:"),
    "starts": (damaged(outlier_starts=[0, 3, 2]).check, r"must rise from 0 to the 2 outliers"),
    "columns": (damaged(outlier_columns=[1, 3]).check, r"outlier_columns must be 0 to 2"),
    "order": (damaged(outlier_columns=[2, 1]).check, r"outlier_columns must rise within each row"),
    "not zero": (damaged(outlier_columns=[0, 1]).check, r"an outlier is not zero in the planes"),
    "shift": (damaged(row_shift=[0, 25]).check, r"row_shift goes from 0 to 25, beyond ±24"),
    "nan code": (NestedWeight(half(1, 2).to(byte) + 255, None).check, r"code that is NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_nested_weights_are_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()
