"""NestedFP: FP16 weights as two planes of bytes, of which the upper alone is the weight in FP8.

A half is ``s e4 e3 e2 e1 e0 m9 ... m0``, and for ``|w| <= 1.75`` e4 is 0. ``lower`` keeps m7...m0;
``upper`` keeps s, e3...e0 and m9 m8 m7 rounded to nearest even over the seven bits below, which as
E4M3 is ``256 * w`` correctly rounded. Both together give the half back, bit for bit:

    high byte = upper & 0x80 | (upper - (lower >> 7)) >> 1 & 0x3F;    low byte = lower

and the upper plane alone gives the rounded weight as the half ``s << 15 | (upper & 0x7F) << 7``.

A row with larger weights is stored times ``2**-row_shift``, if that gives every weight of it back
exactly; otherwise its weights above 1.75 are *outliers*: zero in both planes, their values in a
list by rows. So every finite matrix nests, and ``decode`` is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.linear_checks import check_tensor, float32_bias

W_MAX: Final = 1.75
"""The largest absolute value that the two planes hold."""

SHIFT_MAX: Final = 24
"""``row_shift`` is within plus and minus this."""

_ELEMENTS_AT_ONCE: Final = 1 << 22
"""Temporary tensors are of about this many elements, however large the matrix is."""


class NestError(ValueError):
    """A matrix that the published rule, without row scaling, cannot nest."""


@dataclass(frozen=True, slots=True, eq=False)
class NestedWeight:
    """A weight ``[N, K]`` as ``upper`` and ``lower``, both uint8 ``[N, K]``.

    ``lower`` is None after shedding: then only the FP8 values are left. ``row_shift`` int8 ``[N]``
    (None: all 0): a row's values are those of its planes times ``2**row_shift``. ``encode`` gives
    0 to 16; scaling the rows of a weight by powers of two may make it anything within
    ``SHIFT_MAX``.

    Outliers (all None: there are none) are in the order of rows and, within a row, of columns: row
    n's are ``outlier_columns`` and ``outlier_values`` ``[outlier_starts[n] : outlier_starts[n +
    1]]``; starts int32 ``[N + 1]``, columns int32, values half, to which no shift applies. ``bias``
    half or float32 ``[N]`` (kept as float32). All tensors are contiguous, on one device.
    """

    upper: Tensor
    lower: Tensor | None
    row_shift: Tensor | None = None
    outlier_starts: Tensor | None = None
    outlier_columns: Tensor | None = None
    outlier_values: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("NestedWeight.upper", self.upper, torch.uint8, (None, None))
        rows, columns = self.upper.shape
        device = self.device
        if self.lower is not None:
            shape = (rows, columns)
            check_tensor("NestedWeight.lower", self.lower, torch.uint8, shape, device)
        if self.row_shift is not None:
            check_tensor("NestedWeight.row_shift", self.row_shift, torch.int8, (rows,), device)
        starts, places, values = self.outlier_starts, self.outlier_columns, self.outlier_values
        if starts is None or places is None or values is None:
            if not (starts is places is values is None):
                raise ValueError(
                    "NestedWeight: outlier_starts, outlier_columns and outlier_values must be "
                    "there together"
                )
        else:
            name = "NestedWeight.outlier"
            check_tensor(f"{name}_starts", starts, torch.int32, (rows + 1,), device)
            check_tensor(f"{name}_columns", places, torch.int32, (None,), device)
            check_tensor(f"{name}_values", values, torch.float16, (places.shape[0],), device)
        object.__setattr__(self, "bias", float32_bias("NestedWeight.bias", self.bias, self.upper))

    @property
    def rows(self) -> int:
        """N."""
        return self.upper.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.upper.shape[1]

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.upper.device

    @property
    def outliers(self) -> int:
        """How many weights are in the list."""
        return 0 if self.outlier_columns is None else self.outlier_columns.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the bias too."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def decode(self) -> Tensor:
        """The weight as it was encoded, half ``[N, K]``, bit for bit. Needs ``lower``.

        (Of a weight whose rows were scaled further: rounded to half.)
        """
        if self.lower is None:
            raise ValueError("NestedWeight.lower is None: the FP16 values cannot be decoded")
        out = torch.empty(self.upper.shape, dtype=torch.float16, device=self.device)
        halves = out.view(torch.uint8).view(self.rows, self.columns, 2)
        for part in _slices(self.rows, self.columns):
            upper, lower = self.upper[part], self.lower[part]
            halves[part][..., 0] = lower
            high = upper.sub(lower >> 7).bitwise_right_shift_(1).bitwise_and_(0x3F)
            halves[part][..., 1] = high.bitwise_or_(upper & 0x80)
            self._finish(out, part)
        return self._with_outliers(out)

    def decode_fp8(self) -> Tensor:
        """What FP8 mode computes with, half ``[N, K]``: ``upper``'s values, shifted; outliers."""
        out = torch.empty(self.upper.shape, dtype=torch.float16, device=self.device)
        halves = out.view(torch.uint8).view(self.rows, self.columns, 2)
        for part in _slices(self.rows, self.columns):
            upper = self.upper[part]
            halves[part][..., 0] = upper << 7
            halves[part][..., 1] = (upper & 0x80).bitwise_or_((upper & 0x7F) >> 1)
            self._finish(out, part)
        return self._with_outliers(out)

    def row_range(self, start: int, stop: int) -> NestedWeight:
        """Rows ``start`` to ``stop``; planes and shifts are views."""
        starts = places = values = None
        if self.outlier_starts is not None:
            assert self.outlier_columns is not None
            assert self.outlier_values is not None
            first, last = (int(self.outlier_starts[row]) for row in (start, stop))
            if first < last:
                starts = self.outlier_starts[start : stop + 1] - first
                places = self.outlier_columns[first:last]
                values = self.outlier_values[first:last]
        return NestedWeight(
            self.upper[start:stop],
            None if self.lower is None else self.lower[start:stop],
            None if self.row_shift is None else self.row_shift[start:stop],
            starts,
            places,
            values,
            None if self.bias is None else self.bias[start:stop],
        )

    def to(self, device: torch.device | str) -> NestedWeight:
        """The same weight on ``device``."""
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    def check(self) -> None:
        """Raise ValueError for contents that ``encode`` cannot give: a damaged file.

        Looks at every byte of ``upper``; not at ``lower``, of which any byte can be right.
        """
        for part in _slices(self.rows, self.columns):
            upper = self.upper[part]
            if upper.numel() and int((upper & 0x7F).max()) == 0x7F:
                raise ValueError("upper holds a code that is NaN")
        if self.row_shift is not None and self.rows:
            low, high = int(self.row_shift.min()), int(self.row_shift.max())
            if low < -SHIFT_MAX or high > SHIFT_MAX:
                raise ValueError(f"row_shift goes from {low} to {high}, beyond ±{SHIFT_MAX}")
        if self.outlier_starts is not None:
            self._check_outliers(self.outlier_starts)

    def _check_outliers(self, starts: Tensor) -> None:
        assert self.outlier_columns is not None
        assert self.outlier_values is not None
        counts = starts.diff()
        if int(starts[0]) or int(starts[-1]) != self.outliers or bool((counts < 0).any()):
            raise ValueError(
                f"outlier_starts must rise from 0 to the {self.outliers} outliers that there are"
            )
        if not self.outliers:
            return
        if int(self.outlier_columns.min()) < 0 or int(self.outlier_columns.max()) >= self.columns:
            raise ValueError(f"outlier_columns must be 0 to {self.columns - 1}")
        places = self.outlier_rows() * self.columns + self.outlier_columns
        if bool((places.diff() <= 0).any()):
            raise ValueError("outlier_columns must rise within each row")
        if not bool(self.outlier_values.isfinite().all()):
            raise ValueError("outlier_values holds NaN or inf")
        planes = [self.upper] if self.lower is None else [self.upper, self.lower]
        if any(bool(plane.view(-1)[places].any()) for plane in planes):
            raise ValueError("an outlier is not zero in the planes")

    def outlier_rows(self) -> Tensor:
        """Row of each outlier, int64."""
        assert self.outlier_starts is not None
        rows = torch.arange(self.rows, device=self.device)
        return rows.repeat_interleave(self.outlier_starts.diff())

    def _finish(self, out: Tensor, part: slice) -> None:
        """Undo the shift of some rows of ``out``."""
        if self.row_shift is not None:
            shift = self.row_shift[part]
            shifted = shift.nonzero().flatten()
            wide = out[part][shifted].float() * torch.exp2(shift[shifted].float())[:, None]
            out[part][shifted] = wide.half()

    def _with_outliers(self, out: Tensor) -> Tensor:
        if self.outlier_columns is not None and self.outlier_values is not None:
            out[self.outlier_rows(), self.outlier_columns.long()] = self.outlier_values
        return out

    def tensors(self) -> dict[str, Tensor]:
        """All that there are, by their field's name."""
        pairs = {name: getattr(self, name) for name in self.__slots__}
        return {name: tensor for name, tensor in pairs.items() if tensor is not None}


def encode(weight: Tensor, row_scaling: bool = True, bias: Tensor | None = None) -> NestedWeight:
    """Nest ``weight`` ``[N, K]``, half, bfloat16 or float32, on its device.

    bfloat16 is rounded to half first (exact from 2**-17 up); float32 must hold half values.
    ``row_scaling=False`` is the published rule: no shift, no outliers.

    Raises:
        ValueError: NaN or inf, values beyond half's range, float32 values that are no halves.
        NestError: a weight above ``W_MAX`` and no ``row_scaling``.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}, it must have rows and columns")
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"weight is {weight.dtype}: only float16, bfloat16 and float32 nest")
    rows, columns = weight.shape
    upper = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    lower = torch.empty_like(upper)
    shift = torch.zeros(rows, dtype=torch.int8, device=weight.device)
    counts = torch.zeros(rows, dtype=torch.int64, device=weight.device)
    places: list[Tensor] = []
    values: list[Tensor] = []
    for part in _slices(rows, columns):
        halves = _halves(weight[part], part.start)
        largest = halves.abs().amax(1) if columns else halves.new_zeros(len(halves))
        over = (largest > W_MAX).nonzero().flatten()
        if len(over):
            if not row_scaling:
                raise NestError(
                    f"weight has a value of {float(largest.max()):.4g} in absolute value in row "
                    f"{part.start + int(largest.argmax())}: without row scaling the limit is "
                    f"{W_MAX}"
                )
            halves = halves.clone()
            found = _fit(halves, over)
            shift[part][over] = found.shift
            counts[part][over] = found.counts
            places.append(found.columns)
            values.append(found.values)
        bits = halves.view(torch.int16)
        magnitude = bits & 0x7FFF
        # Half of the last place that is kept, less one where that place is even: nearest even.
        rounding = magnitude.bitwise_right_shift(7).bitwise_and_(1).add_(0x3F)
        codes = rounding.add_(magnitude).bitwise_right_shift_(7)
        halves_bytes = halves.view(torch.uint8).view(*halves.shape, 2)
        upper[part] = codes.to(torch.uint8).bitwise_or_(halves_bytes[..., 1] & 0x80)
        lower[part] = halves_bytes[..., 0]
    listed = bool(counts.any())
    return NestedWeight(
        upper,
        lower,
        shift if bool(shift.any()) else None,
        _starts(counts) if listed else None,
        torch.cat(places) if listed else None,
        torch.cat(values) if listed else None,
        bias,
    )


def stack(weights: Sequence[NestedWeight]) -> NestedWeight:
    """One weight with the rows of all, one below the other. All have the same K.

    Raises ValueError where some have a bias, or a lower plane, and others do not.
    """
    first = weights[0]
    for name in ("bias", "lower"):
        if len({getattr(weight, name) is None for weight in weights}) > 1:
            raise ValueError(f"weights to stack: some have a {name}, others none")
    if {weight.columns for weight in weights} != {first.columns}:
        raise ValueError(f"weights to stack have {[w.columns for w in weights]} columns")
    starts = places = values = None
    if any(weight.outlier_columns is not None for weight in weights):
        counts = torch.cat([_outlier_counts(weight) for weight in weights])
        starts = _starts(counts)
        places = torch.cat([w.outlier_columns for w in weights if w.outlier_columns is not None])
        values = torch.cat([w.outlier_values for w in weights if w.outlier_values is not None])
    return NestedWeight(
        torch.cat([weight.upper for weight in weights]),
        None
        if first.lower is None
        else torch.cat([weight.lower for weight in weights if weight.lower is not None]),
        None
        if all(weight.row_shift is None for weight in weights)
        else torch.cat([_shift(weight) for weight in weights]),
        starts,
        places,
        values,
        None
        if first.bias is None
        else torch.cat([weight.bias for weight in weights if weight.bias is not None]),
    )


def pad(weight: NestedWeight, rows: int = 0, columns: int = 0) -> NestedWeight:
    """``weight`` with so many rows and columns of zeros after its own."""
    edges = (0, columns, 0, rows)
    more = torch.nn.functional.pad
    starts = weight.outlier_starts
    return NestedWeight(
        more(weight.upper, edges),
        None if weight.lower is None else more(weight.lower, edges),
        None if weight.row_shift is None else more(weight.row_shift, (0, rows)),
        None if starts is None else torch.cat((starts, starts[-1:].expand(rows))),
        weight.outlier_columns,
        weight.outlier_values,
        None if weight.bias is None else more(weight.bias, (0, rows)),
    )


def interleave(gate: NestedWeight, up: NestedWeight) -> NestedWeight:
    """Eight rows of ``gate``, eight of ``up``, and so on, as ``interleave_gate_up`` does."""
    if gate.rows != up.rows:
        raise ValueError(f"gate has {gate.rows} rows, up {up.rows}: they must be alike")
    if gate.rows % 8:
        raise ValueError(f"gate has {gate.rows} rows, which is no multiple of 8")
    order = torch.arange(2 * gate.rows, device=gate.device).view(2, -1, 8).transpose(0, 1)
    return take_rows(stack([gate, up]), order.flatten())


def scale_rows(weight: NestedWeight, exponents: Tensor) -> NestedWeight:
    """Row n times ``2**exponents[n]``, integers ``[N]``: more shift; outliers and bias take it too.

    Outliers that leave half's range become inf.
    """
    shift = _shift(weight) + exponents.to(weight.device, torch.int8)
    factors = torch.exp2(exponents.to(weight.device, torch.float32))
    values = weight.outlier_values
    if values is not None:
        values = (values.float() * factors[weight.outlier_rows()]).half()
    bias = None if weight.bias is None else weight.bias * factors
    return replace(weight, row_shift=shift, outlier_values=values, bias=bias)


def take_rows(weight: NestedWeight, order: Tensor) -> NestedWeight:
    """The rows of ``weight`` whose numbers are in ``order`` int64 ``[n]``."""
    starts = places = values = None
    if weight.outlier_columns is not None and weight.outlier_values is not None:
        assert weight.outlier_starts is not None
        counts = _outlier_counts(weight)[order]
        starts = _starts(counts)
        moved = weight.outlier_starts[:-1][order].long() - starts[:-1]
        at = torch.arange(weight.outliers, device=weight.device) + moved.repeat_interleave(counts)
        places, values = weight.outlier_columns[at], weight.outlier_values[at]
    return NestedWeight(
        weight.upper[order],
        None if weight.lower is None else weight.lower[order],
        None if weight.row_shift is None else weight.row_shift[order],
        starts,
        places,
        values,
        None if weight.bias is None else weight.bias[order],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """Of each large row: its shift int8, or its outliers (counts int64, columns, values)."""

    shift: Tensor
    counts: Tensor
    columns: Tensor
    values: Tensor


def _fit(halves: Tensor, large: Tensor) -> _Fit:
    """Bring the rows ``large`` of ``halves`` within ``W_MAX``, in place."""
    wide = halves[large].float()
    mantissa, exponent = torch.frexp(wide.abs().amax(1))
    shift = torch.where(mantissa <= W_MAX / 2, exponent - 1, exponent)
    scaled = (wide * torch.exp2(-shift.float())[:, None]).half()
    back = scaled.float() * torch.exp2(shift.float())[:, None]
    # FP8's rounding up must not pass half's range either once the shift is undone: from 63,488 on.
    fits = (back == wide).all(1) & (wide.abs().amax(1) < 63488)
    outlying = (wide.abs() > W_MAX) & ~fits[:, None]
    places = outlying.nonzero()
    values = wide[outlying].half()
    halves[large] = torch.where(fits[:, None], scaled, wide.masked_fill(outlying, 0.0).half())
    return _Fit(
        (shift * fits).to(torch.int8), outlying.sum(1), places[:, 1].to(torch.int32), values
    )


def _halves(weight: Tensor, row0: int) -> Tensor:
    """Some rows of a weight as halves; refuses what is no finite half."""
    halves = weight.to(torch.float16).contiguous()
    if not bool(halves.isfinite().all()):
        where = (~halves.isfinite()).nonzero()[0].tolist()
        found = float(weight[tuple(where)])
        fault = "beyond FP16's range" if abs(found) < torch.inf else "no finite number"
        raise ValueError(f"weight [{row0 + where[0]}, {where[1]}] = {found:g} is {fault}")
    if weight.dtype == torch.float32 and not torch.equal(halves.float(), weight):
        raise ValueError("weight is float32 and holds values that float16 cannot: round it first")
    return halves


def _slices(rows: int, columns: int) -> list[slice]:
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, columns))
    return [slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]


def _shift(weight: NestedWeight) -> Tensor:
    if weight.row_shift is not None:
        return weight.row_shift
    return torch.zeros(weight.rows, dtype=torch.int8, device=weight.device)


def _outlier_counts(weight: NestedWeight) -> Tensor:
    """Outliers of each row, int64 ``[N]``."""
    if weight.outlier_starts is None:
        return torch.zeros(weight.rows, dtype=torch.int64, device=weight.device)
    return weight.outlier_starts.diff().long()


def _starts(counts: Tensor) -> Tensor:
    """``outlier_starts`` of rows that have so many: int32 ``[N + 1]``."""
    starts = counts.new_zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    return starts
