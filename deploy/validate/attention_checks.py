"""Checks of attention: paged decode and paged prefill, every KV dtype and kernel there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from deepinfer.deploy.validate import decode_cases, prefill_cases
from deepinfer.deploy.validate.accuracy import Accuracy, Miss
from deepinfer.deploy.validate.checks import Check
from deepinfer.deploy.validate.decode_cases import FORMATS, Kind
from deepinfer.deploy.validate.scope import Scope
from deepinfer.kernels import attention, prefill
from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.prefill import PrefillSpan

_KINDS: Final[tuple[Kind, ...]] = ("large_k", "saturated", "tiny", "scales")
_LENS: Final = (77, 0, 1, 16, 17, 333, 1000, 15, 640)
"""Partial tiles, a padding row, one token, whole tiles; beside a table of 1,024 tokens."""
_LONGEST: Final = 32768
_SPANS: Final = ((0, 200), (37, 18), (0, 1), (63, 66), (1000, 129), (511, 1), (16, 300))


def decode_checks(scope: Scope) -> Iterator[Check]:
    """Paged decode."""
    for dtype in scope.kv_dtypes:
        for at, (head_dim, group) in enumerate(scope.heads):
            kv_heads, block_size = 1 + at % 3, 16 << (at & 1)
            lens = scope.shortened(_LENS)
            yield _decode(
                scope, dtype, lens, head_dim, kv_heads, group, block_size, "normal", (64, 256, 1024)
            )
        for kind in _KINDS:
            if kind != "scales" or dtype == "int8":
                head_dim, group = scope.heads[-1]
                lens = scope.shortened((999, 33, 5000, 16))
                yield _decode(scope, dtype, lens, head_dim, 2, group, 16, kind, (256, 512))
        head_dim, group = scope.heads[-1]
        if scope.thorough:
            lens = (_LONGEST, 31007, 5)
            yield _decode(scope, dtype, lens, head_dim, 2, group, 16, "normal", (256, 1024, 32768))
        yield _decode_codes(scope, dtype, head_dim, group)


def _decode(
    scope: Scope,
    dtype: str,
    lens: Sequence[int],
    head_dim: int,
    kv_heads: int,
    group: int,
    block_size: int,
    kind: Kind,
    sizes: Sequence[int],
) -> Check:
    bulk = _bulk(scope)
    columns = None if max(lens) == _LONGEST else max(lens) // block_size + 4

    def run() -> Iterator[Accuracy]:
        case = decode_cases.make(
            dtype,
            list(lens),
            columns=columns,
            head_dim=head_dim,
            kv_heads=kv_heads,
            group=group,
            block_size=block_size,
            kind=kind,
            device=scope.device,
            seed=head_dim + group,
        )
        expected = case.expected()
        rows, heads, _ = case.q.shape
        context = case.block_tables.shape[1] * block_size
        for partition, copies in itertools.product(sizes, bulk):
            parts = attention.partitions(context, partition)
            workspace = attention.DecodeWorkspace.allocate(
                rows, heads, head_dim, parts, scope.device
            )
            workspace.partial_out.fill_(math.nan)  # what another launch may leave
            workspace.partial_ml.fill_(math.nan)
            out = case.run(partition, workspace, bulk=copies)
            yield decode_cases.judge(case, out, expected)
            if not torch.equal(case.run(partition, workspace, bulk=copies), out):
                raise Miss(f"{case.name}: two launches differ, partition {partition}")
            if bool(workspace.tickets.any()):
                raise Miss(f"{case.name}: a ticket was not given back, partition {partition}")

    name = f"{kind} d{head_dim} {kv_heads}x{group} block {block_size} lens {list(lens)}"
    return Check("paged_decode", dtype, name, run, _decode_specs(dtype, head_dim, group, bulk))


def _decode_codes(scope: Scope, dtype: str, head_dim: int, group: int) -> Check:
    """With one token the output is its V: every code of an 8-bit format must come out exactly."""
    bulk = _bulk(scope)

    def run() -> Iterator[Accuracy]:
        heads = -(-256 // head_dim)
        case = decode_cases.make(
            dtype, [1, 1], head_dim=head_dim, kv_heads=heads, group=group, device=scope.device
        )
        bytes_ = torch.arange(heads * head_dim * case.v.element_size(), device=scope.device)
        for row in range(2):
            codes = bytes_.roll(row).to(torch.uint8).view(case.v.dtype).view(heads, head_dim)
            wide = codes.float()
            stored = torch.where(wide.isfinite(), wide, 0.0).to(case.v.dtype)
            block = int(case.block_tables[row, 0])
            word = torch.int16 if case.v.dtype == torch.float16 else torch.uint8
            case.v.view(word)[block, :, 0] = stored.view(word)
            if case.scales is not None:
                case.scales[block, 1, :, 0] = 0.5
        expected = case.expected()
        for copies in bulk:
            out = case.run(16, bulk=copies)
            if not torch.equal(out.double(), expected):
                raise Miss("a single token's V does not come out as it is stored")
            yield decode_cases.judge(case, out, expected)

    name = f"every V code d{head_dim} group {group}"
    return Check("paged_decode", dtype, name, run, _decode_specs(dtype, head_dim, group, bulk))


def _decode_specs(
    dtype: str, head_dim: int, group: int, bulk: Sequence[bool | None]
) -> tuple[KernelSpec, ...]:
    return tuple(
        attention.decode_spec(FORMATS[dtype], head_dim, group, bulk=bool(each)) for each in bulk
    )


def _bulk(scope: Scope) -> tuple[bool | None, ...]:
    """Both ways to copy KV where Hopper has two."""
    return (False, True) if scope.hopper else (None,)


def prefill_checks(scope: Scope) -> Iterator[Check]:
    """Paged prefill, both tiles, and Hopper's own kernels where the target has them."""
    for dtype in scope.kv_dtypes:
        for at, (head_dim, group) in enumerate(scope.heads):
            parts = scope.shortened_spans(_SPANS)
            kv_heads, block_size = 1 + at % 3, 16 << (at & 1)
            yield _prefill(scope, dtype, head_dim, kv_heads, group, block_size, parts)
        head_dim, group = scope.heads[-1]
        parts = scope.shortened_spans(((0, 700), (333, 90)))
        yield _prefill(scope, dtype, head_dim, 2, group, 16, parts, gain=30.0)
        for kind in _KINDS:
            if kind != "scales" or dtype == "int8":
                parts = scope.shortened_spans(((0, 300), (401, 77)))
                yield _prefill(scope, dtype, head_dim, 2, group, 16, parts, kind=kind)
        if scope.thorough:
            yield _prefill(scope, dtype, head_dim, 2, group, 16, ((0, 2048),))
            yield _prefill(scope, dtype, head_dim, 2, group, 16, ((8192, 512),))
        yield _prefill_cuts(scope, dtype, head_dim, group)


def _prefill(
    scope: Scope,
    dtype: str,
    head_dim: int,
    kv_heads: int,
    group: int,
    block_size: int,
    parts: tuple[tuple[int, int], ...],
    *,
    gain: float = 1.0,
    kind: Kind = "normal",
) -> Check:
    variants = _prefill_variants(scope, head_dim)
    # Long contexts whole, and in parts that several CTAs attend to.
    longest = max(start + rows for start, rows in parts)
    cuts = [None, *(each for each in (256, 1024) if longest > each)]

    def run() -> Iterator[Accuracy]:
        case = prefill_cases.Case(
            dtype, head_dim, kv_heads, group, block_size, parts, gain, scope.device, kind
        )
        expected = case.expected()
        for (tile_rows, hopper), part in itertools.product(variants, cuts):
            out = case.run(tile_rows, hopper=hopper, part_tokens=part)
            yield case.judge(out, expected)
            if not torch.equal(case.run(tile_rows, hopper=hopper, part_tokens=part), out):
                raise Miss(
                    f"{case}: two launches differ, {tile_rows} rows, hopper {hopper}, parts of "
                    f"{part} tokens"
                )

    name = f"{kind} d{head_dim} {kv_heads}x{group} block {block_size} spans {list(parts)}"
    if gain != 1:
        name += f" scores times {gain:g}"
    return Check("paged_prefill", dtype, name, run, _prefill_specs(dtype, head_dim, variants))


def _prefill_cuts(scope: Scope, dtype: str, head_dim: int, group: int) -> Check:
    """The same bits however a prompt is cut, and whichever tile is chosen."""
    variants = _prefill_variants(scope, head_dim)

    def run() -> Iterator[Accuracy]:
        ends = [round(each * scope.prompt) for each in (0, 0.274, 0.275, 0.6, 1)]
        case = prefill_cases.Case(
            dtype, head_dim, 2, group, 16, ((0, scope.prompt),), 4.0, scope.device
        )
        cut = [
            PrefillSpan(1 + begin, end - begin, begin, 0)
            for begin, end in itertools.pairwise(ends)
            if end > begin
        ]
        expected = case.expected()
        for hopper in dict.fromkeys(each for _, each in variants):
            rows = [rows for rows, each in variants if each == hopper]
            whole = case.run(rows[-1], hopper=hopper)
            if not torch.equal(case.run(rows[0], cut, hopper=hopper), whole):
                raise Miss(f"{case}: a prompt that is cut has other bits, hopper {hopper}")
            yield case.judge(whole, expected)

    name = f"cut prompts d{head_dim} group {group}"
    return Check("paged_prefill", dtype, name, run, _prefill_specs(dtype, head_dim, variants))


def _prefill_variants(scope: Scope, head_dim: int) -> tuple[tuple[int, bool], ...]:
    variants = [(rows, False) for rows in prefill.TILE_ROWS]
    if scope.hopper and head_dim in prefill.HOPPER_HEAD_DIMS:
        variants.append((prefill.HOPPER_TILE_ROWS, True))
    return tuple(variants)


def _prefill_specs(
    dtype: str, head_dim: int, variants: Sequence[tuple[int, bool]]
) -> tuple[KernelSpec, ...]:
    return tuple(
        prefill.hopper_spec(FORMATS[dtype], head_dim)
        if hopper
        else prefill.prefill_spec(FORMATS[dtype], head_dim, tile_rows)
        for tile_rows, hopper in variants
    )
