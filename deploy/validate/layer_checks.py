"""Checks of everything beside attention: linear layers and the pointwise kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final

from deepinfer.deploy.validate import linear_cases, nested_cases, pointwise_cases
from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.deploy.validate.checks import Check
from deepinfer.deploy.validate.linear_cases import Kind
from deepinfer.deploy.validate.scope import Scope
from deepinfer.kernels import linear, linear_w8a8, pointwise
from deepinfer.kernels.linear import NestedWeight, W4Weight, Weight

_ROWS: Final = (1, 2, 3, 5, 8, 9, 16, 17, 33, 40, 64, 65, 200)
_SOME_ROWS: Final = (1, 9, 17)
_NESTED_ROWS: Final = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 200)
_SOME_NESTED_ROWS: Final = (1, 9)
_HEAD_ROWS_MAX: Final = 65536
"""Rows of the LM head that are checked: float64 copies of all of it would not fit small cards."""
_KINDS: Final[tuple[Kind, ...]] = ("outliers", "tiny", "saturating")

# (rows, columns, bias) and (rows, columns, group, zero points, bias): ends inside every tile.
_F16_ODD: Final = ((40, 96, True), (1536, 576, False), (968, 1120, True))
_W4_ODD: Final = (
    (40, 96, 32, True, True),
    (576, 1536, 64, False, False),
    (3080, 576, 32, True, False),
    (208, 1152, 128, True, True),
    (2048, 2048, 256, True, False),
    (4408, 640, 128, True, True),
)


def linear_checks(scope: Scope) -> Iterator[Check]:
    """The four linears with FP16, 4-bit and nested weights, and what unpacks the latter two."""
    for rows, columns, bias in _F16_ODD:
        if scope.fits(rows * columns):
            yield from _linears(scope, "f16", _f16(scope, rows, columns, bias))
    for rows, columns, group, zeros, bias in _W4_ODD:
        if scope.fits(rows * columns):
            yield from _linears(scope, "w4", _w4(scope, rows, columns, group, zeros, bias))
    for rows, columns, bias in _F16_ODD:
        if scope.fits(rows * columns):
            yield from _nested(scope, rows, columns, bias)
    yield from _w8a8(scope)
    for name, rows, columns in scope.linears:
        rows = min(rows, _HEAD_ROWS_MAX)
        yield from _linears(scope, "f16", _f16(scope, rows, columns, name == "qkv"), name)
        yield from _nested(scope, rows, columns, name == "qkv", name)
        if name != "head":
            group = next(each for each in (128, 64, 32) if columns % each == 0)
            weight = _w4(scope, rows, columns, group, True, name == "qkv")
            yield from _linears(scope, "w4", weight, name)


Source = tuple[str, Callable[[], Weight]]
"""A weight's description, and the weight when it is wanted."""


def _f16(scope: Scope, rows: int, columns: int, bias: bool) -> Source:
    name = f"{rows}x{columns}{' bias' if bias else ''}"
    return name, lambda: linear_cases.f16_weight(rows, columns, bias=bias, device=scope.device)


def _w4(scope: Scope, rows: int, columns: int, group: int, zeros: bool, bias: bool) -> Source:
    name = f"{rows}x{columns} group {group}{' zeros' if zeros else ''}{' bias' if bias else ''}"
    return name, lambda: linear_cases.w4_weight(
        rows, columns, group, zeros=zeros, bias=bias, device=scope.device
    )


def _linears(scope: Scope, form: str, source: Source, name: str = "") -> Iterator[Check]:
    label, make = source[0], functools.cache(source[1])  # one weight for all of its checks
    label = f"{name} {label}".strip()
    specs = tuple(spec for spec in linear.specs() if f"_{form}" in spec.source + spec.name)

    def check(what: str, run: Callable[[], Iterator[Accuracy]]) -> Check:
        return Check("linear", form, f"{label}: {what}", run, specs)

    def epilogues(rows: int, kind: Kind) -> Iterator[Accuracy]:
        return linear_cases.check_epilogues(make(), rows, kind=kind)

    def expand() -> Iterator[Accuracy]:
        weight = make()
        assert isinstance(weight, W4Weight)
        return linear_cases.check_expand(weight)

    for rows in _ROWS if scope.thorough else _SOME_ROWS:
        yield check(f"{rows} rows", functools.partial(epilogues, rows, "normal"))
    for kind in _KINDS if not name else ():
        yield check(f"5 rows, {kind}", functools.partial(epilogues, 5, kind))
    yield check("any batch, the same bits", lambda: linear_cases.check_batches(make()))
    if form == "w4":
        yield check("expanded", expand)


def _nested(scope: Scope, rows: int, columns: int, bias: bool, name: str = "") -> Iterator[Check]:
    """Both modes of nested weights; FP16 mode beside plain weights of the same values."""
    label = f"{name} {rows}x{columns}{' bias' if bias else ''}".strip()
    forms = ("_nested", "_f16")
    specs = tuple(s for s in linear.specs() if any(f in s.source + s.name for f in forms))

    @functools.cache
    def make() -> NestedWeight:
        return nested_cases.nested_weight(rows, columns, bias=bias, device=scope.device)

    def epilogues(m: int, kind: Kind, fp8: bool) -> Iterator[Accuracy]:
        return linear_cases.check_epilogues(make(), m, kind=kind, fp8=fp8)

    def batches(fp8: bool) -> Iterator[Accuracy]:
        return linear_cases.check_batches(make(), fp8=fp8)

    def same_bits(m: int) -> Iterator[Accuracy]:
        pair = nested_cases.shifted_pair(rows, columns, device=scope.device)
        return nested_cases.check_same_bits(*pair, m)

    counts = _NESTED_ROWS if scope.thorough else _SOME_NESTED_ROWS
    for fp8, form in ((False, "nested"), (True, "nested fp8")):

        def check(what: str, run: Callable[[], Iterator[Accuracy]], form: str = form) -> Check:
            return Check("linear", form, f"{label}: {what}", run, specs)

        for m in counts:
            yield check(f"{m} rows", functools.partial(epilogues, m, "normal", fp8))
        for kind in _KINDS if not name else ():
            yield check(f"5 rows, {kind}", functools.partial(epilogues, 5, kind, fp8))
        yield check("any batch, the same bits", functools.partial(batches, fp8))
        if not fp8:
            for m in counts:
                yield check(f"{m} rows, the same bits as FP16", functools.partial(same_bits, m))
            expand = functools.partial(_by_itself, lambda: nested_cases.check_expand(make()))
            yield check("expanded, both modes", expand)


def _w8a8(scope: Scope) -> Iterator[Check]:
    """FP8 throughout: what is ours of it, and on a card that multiplies FP8 the product."""
    specs = tuple(linear_w8a8.specs())

    def check(name: str, run: Callable[[], None]) -> Check:
        return Check("linear", "w8a8", name, functools.partial(_by_itself, run), specs)

    quantize = functools.partial(nested_cases.check_quantize, 5, 2600, device=scope.device)
    yield check("rows quantised", quantize)
    outliers = functools.partial(nested_cases.check_outliers, 48, 96, 19, device=scope.device)
    yield check("outliers added", outliers)
    if scope.hopper:
        for rows, columns, m in ((256, 512, 33), (2048, 2048, 200)):
            product = functools.partial(
                nested_cases.check_w8a8, rows, columns, m, device=scope.device
            )
            yield check(f"{rows}x{columns}: {m} rows", product)


def _by_itself(run: Callable[[], None]) -> Iterator[Accuracy]:
    """A check whose own rules are stricter than those of accuracy; it raises what is broken."""
    run()
    yield from ()


def pointwise_checks(scope: Scope) -> Iterator[Check]:
    """Embedding, norms, SwiGLU, block copies, and RoPE with the KV write."""
    device, wide = scope.device, scope.thorough
    specs = tuple(pointwise.specs())

    def check(kernel: str, variant: str, name: str, run: Callable[[], None]) -> Check:
        return Check(kernel, variant, name, functools.partial(_by_itself, run), specs)

    for rows, columns in ((1, 64), (3, 576), (2, 1048), *(((37, 2048),) if wide else ())):
        yield check(
            "embed",
            "",
            f"{rows}x{columns}",
            functools.partial(pointwise_cases.check_embed, rows, columns, device=device),
        )
    for columns in (64, 1048, *((2048,) if wide else ())):
        yield check(
            "embed",
            "nested",
            f"{columns} columns",
            functools.partial(nested_cases.check_embed, columns, device=device),
        )
    for rows, columns in ((1, 64), (3, 1028), (2, 8192), *(((37, 2048),) if wide else ())):
        yield check(
            "norms",
            "",
            f"{rows}x{columns}",
            functools.partial(pointwise_cases.check_norms, rows, columns, device=device),
        )
    for rows, width in ((1, 8), (3, 1544), *(((33, 11008),) if wide else ())):
        yield check(
            "swiglu",
            "",
            f"{rows}x{width}",
            functools.partial(pointwise_cases.check_swiglu, rows, width, device=device),
        )
    for block_bytes in (16, 70000, *((589824,) if wide else ())):
        yield check(
            "copy_blocks",
            "",
            f"blocks of {block_bytes} bytes",
            functools.partial(pointwise_cases.check_copy_blocks, block_bytes, device=device),
        )
    for dtype in scope.kv_dtypes:
        for shape in pointwise_cases.ROPES:
            yield check(
                "rope_kv_write",
                dtype,
                str(shape),
                functools.partial(pointwise_cases.check_rope_kv_write, dtype, shape, device=device),
            )
