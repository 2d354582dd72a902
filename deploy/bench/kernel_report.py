"""Tables of what ``bench kernels`` measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table


def tables(part: str, found: dict[str, Any]) -> Iterator[Table]:
    """What one part's JSON says, for a terminal."""
    make = {
        "decode": _decode,
        "prefill": _prefill,
        "linear": _linear,
        "pointwise": _pointwise,
        "model": _model,
        "nested": _nested,
        "nested-model": _nested_model,
        "swap": _swap,
        "transformers": _transformers,
    }[part]
    yield from make(found)


def _decode(found: dict[str, Any]) -> Iterator[Table]:
    copy = max(found["copy_bytes_per_s"].values())
    cells = list(dict.fromkeys((each["batch"], each["context"]) for each in found["own"]))
    shown = _table(
        f"paged decode, µs a layer (GB/s; the card copies at {copy / 1e9:,.0f})",
        "KV or peer",
        *(f"b{batch} {context}" for batch, context in cells),
    )
    rows: dict[str, dict[tuple[int, int], str]] = {}
    for each in (*found["own"], *found["peers"]):
        name = each.get("kv_cache_dtype") or f"FlashInfer {each['mode']}"
        row = rows.setdefault(name, {})
        if each["us"] is not None:
            text = f"{each['us']:.1f} ({each['bytes_per_s'] / 1e9:,.0f})"
            row[each["batch"], each["context"]] = text
        elif "batch" not in each:
            row |= dict.fromkeys(cells[:1], each["error"])
    for name, row in rows.items():
        shown.add_row(name, *(row.get(cell, "") for cell in cells))
    yield shown


def _prefill(found: dict[str, Any]) -> Iterator[Table]:
    names = list(dict.fromkeys(each["shape"] for each in found["own"]))
    shown = _table(
        f"paged prefill, µs a layer (TFLOP/s; cuBLAS reaches {found['flop_per_s'] / 1e12:,.0f})",
        "KV or peer",
        *names,
    )
    rows: dict[str, dict[str, str]] = {}
    for each in (*found["own"], *found["peers"]):
        name = each.get("kv_cache_dtype")
        if name is None:
            ran = f" ({each['ran']})" if each.get("ran") else ""
            name = each["mode"] if each["mode"].startswith("SDPA") else f"FlashInfer {each['mode']}"
            name += ran
        row = rows.setdefault(name, {})
        if each["us"] is not None:
            row[each["shape"]] = f"{each['us']:.1f} ({each['flop_per_s'] / 1e12:,.0f})"
        else:
            row[each.get("shape", names[0])] = each.get("error", "")
    for name, row in rows.items():
        shown.add_row(name, *(row.get(each, "") for each in names))
    yield shown


def _linear(found: dict[str, Any]) -> Iterator[Table]:
    shown = _table(
        "linear layers, µs", "weight", "rows", "FP16", "W4A16", "cuBLAS FP16", "int4pack"
    )
    for each in found["linears"]:
        cublas = each.get("cublas_us")
        shown.add_row(
            f"{each['weight']} {each['n']}x{each['k']}",
            str(each["rows"]),
            _beside(each["f16_us"], cublas),
            _beside(each["w4_us"], cublas),
            _number(cublas),
            _number(each.get("int4pack_us")),
        )
    shown.caption = "in brackets: times as fast as cuBLAS"
    yield shown


def _nested(found: dict[str, Any]) -> Iterator[Table]:
    names = ("FP16 mode", "FP8 mode", "plain FP16", "expanded", "W8A8")
    shown = _table("nested linear layers, µs", "weight", "rows", *names, "cuBLAS FP16")
    for each in found["nested"]:
        cublas = each.get("cublas_us")
        keys = ("nested_us", "nested_fp8_us", "f16_us", "expanded_us", "w8a8_us")
        shown.add_row(
            f"{each['weight']} {each['n']}x{each['k']}",
            str(each["rows"]),
            *(_beside(each.get(key), cublas) for key in keys),
            _number(cublas),
        )
    shown.caption = "in brackets: times as fast as cuBLAS"
    yield shown


def _pointwise(found: dict[str, Any]) -> Iterator[Table]:
    shown = _table("pointwise kernels", "kernel", "rows", "µs", "GB/s", "torch µs")
    for each in found["kernels"]:
        shown.add_row(
            f"{each['kernel']} {each.get('kv_cache_dtype', '')}".strip(),
            str(each["rows"]),
            _number(each["us"]),
            f"{each['bytes_per_s'] / 1e9:,.0f}",
            _number(each.get("torch_us")),
        )
    yield shown


def _nested_model(found: dict[str, Any]) -> Iterator[Table]:
    plain, nested = found["plain"], found["nested"]
    shown = _table(
        f"decode of a nested model, context {found['context']:,}, tokens/s (beside plain FP16)",
        "batch",
        "plain FP16",
        "nested, FP16",
        "nested, FP8",
    )
    cells = zip(plain["decode"], nested["fp16"]["decode"], nested["fp8"]["decode"], strict=True)
    for cell, *others in cells:
        before = cell["tokens_per_s"]
        shown.add_row(
            str(cell["batch"]),
            f"{before:,.0f}",
            *(
                f"{each['tokens_per_s']:,.0f} ({each['tokens_per_s'] / before:.3f}x)"
                for each in others
            ),
        )
    yield shown
    shed, switches = nested["shed"], nested["switches"]
    facts = _table("nested model", "what", "")
    whole = nested["bytes"] / plain["bytes"]
    facts.add_row(
        "weights on the card, MiB", f"{nested['bytes'] / 2**20:,.0f} ({whole:.4f}x plain)"
    )
    facts.add_row(
        "shed, MiB",
        f"{shed['bytes'] / 2**20:,.0f} ({shed['bytes'] / plain['tensor_bytes']:.4f}x plain's "
        f"tensors, {shed['bytes'] / shed['tensor_bytes']:.4f}x its own)",
    )
    facts.add_row("KV blocks more when shed", f"{shed['tail_blocks']:,}")
    facts.add_row("restored in, ms", ", ".join(f"{ms:.0f}" for ms in shed["restore_ms"]))
    for name in ("to_fp16", "to_fp8"):
        each = switches[name]
        facts.add_row(
            f"first step {name.replace('_', ' ')}, beside later ones",
            f"{each['first']:.3f}x, p99 {each['first_p99']:.2f}x (of others "
            f"{each['steady_p99']:.2f}x)",
        )
    same = all((nested["bits"], switches["bits"], shed["bits"]))
    facts.add_row("FP16 logits are plain's bits", "yes" if same else "NO")
    yield facts


def _model(found: dict[str, Any]) -> Iterator[Table]:
    shown = _table(
        "decode of the whole model",
        "weights",
        "KV",
        "batch",
        "context",
        "tokens/s",
        "with sampling",
        "step ms",
        "of copy rate",
        "kernels",
        "host µs",
    )
    chunks = _table(
        "steps with a prompt", "weights", "tokens", "cached", "decodes", "step ms", "tokens/s"
    )
    for model in found["models"]:
        for cell in model["decode"]:
            shown.add_row(
                model["weights"],
                model["kv_cache_dtype"],
                str(cell["batch"]),
                f"{cell['context']:,}",
                f"{cell['tokens_per_s']:,.0f}",
                f"{cell['loop_tokens_per_s']:,.0f}",
                f"{cell['step_ms']:.3f}",
                f"{cell['roofline_share']:.0%}",
                f"{cell['kernels']:.0f}",
                f"{cell['host_us']:.0f}",
            )
        for each in model["chunks"]:
            chunks.add_row(
                model["weights"],
                str(each["tokens"]),
                str(each["cached"]),
                str(each["decodes"]),
                f"{each['step_ms']:.2f}",
                f"{each['prompt_tokens_per_s']:,.0f}",
            )
    yield shown
    yield chunks


def _swap(found: dict[str, Any]) -> Iterator[Table]:
    memcpy = found["memcpy_bytes_per_s"]
    shown = _table(
        f"swaps; one copy of pinned memory: {memcpy['out'] / 1e9:.1f} GB/s out, "
        f"{memcpy['in'] / 1e9:.1f} in",
        "blocks",
        "way",
        "µs",
        "GB/s",
        "of one copy",
    )
    for each in found["few"]:
        shown.add_row(f"{each['blocks']} {each['order']}", each["way"], f"{each['us']:.0f}")
    size = found["payload_bytes"] / 2**30
    for each in found["long"]:
        shown.add_row(
            f"{size:.2f} GiB {each['order']}, {each['asked']}",
            each["way"],
            "",
            f"{each['bytes_per_s'] / 1e9:.1f}",
            f"{each['of_memcpy']:.1%}",
        )
    yield shown
    steps = _table("decode steps", "beside", "median ms", "p99 ms", "growth", "GB/s")
    beside = found["beside"]
    steps.add_row(
        "nothing", f"{beside['alone']['median_ms']:.3f}", f"{beside['alone']['p99_ms']:.3f}"
    )
    for way in ("out", "in"):
        each = beside[way]
        steps.add_row(
            f"a swap {way}",
            f"{each['median_ms']:.3f}",
            f"{each['p99_ms']:.3f}",
            f"{each['mean_growth']:.1%}",
            f"{each['bytes_per_s'] / 1e9:.1f}",
        )
    yield steps


def _transformers(found: dict[str, Any]) -> Iterator[Table]:
    shown = _table("transformers, decode", "way", "batch", "tokens/s")
    for each in found["ways"]:
        rate = each["tokens_per_s"]
        text = each["error"] if rate is None else f"{rate:,.0f}"
        shown.add_row(each["way"], str(each["batch"]), text)
    yield shown


def _table(title: str, *headings: str) -> Table:
    shown = Table(title=title)
    for at, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if at == 0 else "right")
    return shown


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}"


def _beside(us: float | None, peer: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.2f}" if peer is None else f"{us:.2f} ({peer / us:.2f})"
