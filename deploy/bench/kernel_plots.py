"""Pictures of what ``bench kernels`` measured, drawn from its JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot

_LABELS: Final = {"fp8": "fp8 E4M3", "fp8_e5m2": "fp8 E5M2"}


def can_draw() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_decode(found: dict[str, Any], path: Path) -> None:
    """Microseconds by batch, a panel for each context, everyone a line."""
    contexts = sorted({each["context"] for each in found["own"]})
    figure, panels = axes_in_a_row(len(contexts), (4.6 * len(contexts), 4.4), squeeze=False)
    lines: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for each in (*found["own"], *found["peers"]):
        if each["us"] is not None:
            own = each.get("kv_cache_dtype")
            name = _LABELS.get(own, own) if own else f"FlashInfer {each['mode']}"
            lines.setdefault(name, {}).setdefault(each["context"], []).append(
                (each["batch"], each["us"])
            )
    for panel, context in zip(panels[0], contexts, strict=True):
        for name, cells in lines.items():
            points = sorted(cells.get(context, ()))
            style = "--" if name.startswith("FlashInfer") else "-"
            panel.plot(*zip(*points, strict=True), style, marker="o", label=name) if points else ()
        _log_axis(panel, {each["batch"] for each in found["own"]})
        panel.set_yscale("log")
        panel.set_xlabel("sequences")
        panel.set_title(f"context {context:,}")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("µs a layer")
    panels[0][0].legend(fontsize="x-small")
    figure.suptitle(_title("paged decode attention", found))
    write_plot(figure, path)


def plot_prefill(found: dict[str, Any], path: Path) -> None:
    """TFLOP/s by shape, everyone a bar."""
    names = list(dict.fromkeys(each["shape"] for each in found["own"]))
    bars: dict[str, dict[str, float]] = {}
    for each in (*found["own"], *found["peers"]):
        if each["us"] is not None:
            own = each.get("kv_cache_dtype")
            peer = each.get("mode", "")
            name = own or (peer if peer.startswith("SDPA") else f"FlashInfer {peer}")
            bars.setdefault(_LABELS.get(name, name), {})[each["shape"]] = each["flop_per_s"] / 1e12
    _bars(_title("paged prefill attention", found), "TFLOP/s", names, bars, path)


def plot_linear(found: dict[str, Any], path: Path) -> None:
    """Microseconds by rows, a panel for each weight."""
    kinds = {
        "f16_us": "FP16",
        "w4_us": "W4A16",
        "cublas_us": "cuBLAS FP16",
        "int4pack_us": "torch int4pack",
    }
    _by_rows("linear layers", found, found["linears"], kinds, own=("f16_us", "w4_us"), path=path)


def plot_nested(found: dict[str, Any], path: Path) -> None:
    """Microseconds by rows, a panel for each weight."""
    kinds = {
        "nested_us": "nested, FP16 mode",
        "nested_fp8_us": "nested, FP8 mode",
        "f16_us": "FP16, same kernels",
        "cublas_us": "cuBLAS FP16",
        "expanded_us": "expanded, cuBLAS",
        "w8a8_us": "W8A8",
    }
    own = ("nested_us", "nested_fp8_us", "f16_us")
    _by_rows("nested linear layers", found, found["nested"], kinds, own=own, path=path)


def plot_pointwise(found: dict[str, Any], path: Path) -> None:
    """GB/s by rows."""
    rows = sorted({each["rows"] for each in found["kernels"]})
    bars: dict[str, dict[str, float]] = {}
    for each in found["kernels"]:
        name = f"{each['kernel']} {each.get('kv_cache_dtype', '')}".strip()
        bars.setdefault(name, {})[str(each["rows"])] = each["bytes_per_s"] / 1e9
    _bars(_title("pointwise kernels", found), "GB/s", [str(each) for each in rows], bars, path)


def plot_model(found: dict[str, Any], path: Path) -> None:
    """Tokens a second by context, a panel for each form of the weights and number of sequences."""
    batches = sorted({cell["batch"] for each in found["models"] for cell in each["decode"]})
    figure, panels = axes_in_a_row(len(batches), (3.8 * len(batches), 4.4), squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=True):
        for model in found["models"]:
            points = [
                (cell["context"], cell["tokens_per_s"])
                for cell in model["decode"]
                if cell["batch"] == batch
            ]
            label = f"{model['weights']}, {model['kv_cache_dtype']} KV"
            style = "-" if model["weights"] == "fp16" else "--"
            panel.plot(*zip(*points, strict=True), style, marker="o", label=label) if points else ()
        contexts = {cell["context"] for each in found["models"] for cell in each["decode"]}
        _log_axis(panel, contexts)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("context")
        panel.set_title(f"{batch} sequences" if batch > 1 else "1 sequence")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens/s")
    panels[0][0].legend(fontsize="x-small")
    figure.suptitle(_title("decode of the whole model", found))
    write_plot(figure, path)


def plot_transformers(found: dict[str, Any], path: Path) -> None:
    """Tokens a second of each way by the number of sequences."""
    batches = sorted({each["batch"] for each in found["ways"]})
    bars: dict[str, dict[str, float]] = {}
    for each in found["ways"]:
        if each["tokens_per_s"] is not None:
            bars.setdefault(each["way"], {})[str(each["batch"])] = each["tokens_per_s"]
    names = [str(batch) for batch in batches]
    _bars(_title("transformers, decode", found), "tokens/s", names, bars, path)


PLOTS: Final[Mapping[str, Callable[[dict[str, Any], Path], None]]] = {
    "decode": plot_decode,
    "prefill": plot_prefill,
    "linear": plot_linear,
    "nested": plot_nested,
    "pointwise": plot_pointwise,
    "model": plot_model,
    "transformers": plot_transformers,
}
"""By the part whose JSON it draws."""


def _by_rows(
    title: str,
    found: dict[str, Any],
    records: list[dict[str, Any]],
    kinds: dict[str, str],
    *,
    own: tuple[str, ...],
    path: Path,
) -> None:
    """Microseconds by rows, a panel for each weight; ``own`` kinds are solid lines."""
    names = list(dict.fromkeys(each["weight"] for each in records))
    figure, panels = axes_in_a_row(len(names), (3.6 * len(names), 4.2), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        rows = [each for each in records if each["weight"] == name]
        for kind, label in kinds.items():
            points = [(each["rows"], each[kind]) for each in rows if each.get(kind) is not None]
            style = "-" if kind in own else "--"
            panel.plot(*zip(*points, strict=True), style, marker="o", label=label) if points else ()
        _log_axis(panel, {each["rows"] for each in rows})
        panel.set_yscale("log")
        panel.set_xlabel("rows")
        panel.set_title(f"{name} {rows[0]['n']}x{rows[0]['k']}", fontsize="small")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("µs")
    panels[0][0].legend(fontsize="x-small")
    figure.suptitle(_title(title, found))
    write_plot(figure, path)


def _bars(
    title: str, unit: str, groups: list[str], bars: dict[str, dict[str, float]], path: Path
) -> None:
    figure, axes = axes_in_a_row(1, (max(7.0, 2.2 * len(groups)), 4.4))
    width = 0.8 / max(1, len(bars))
    for at, (name, values) in enumerate(bars.items()):
        places = [group + (at - len(bars) / 2 + 0.5) * width for group in range(len(groups))]
        axes.bar(places, [values.get(group, 0.0) for group in groups], width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="x-small", ncols=2)
    figure.suptitle(title)
    write_plot(figure, path)


def _log_axis(panel: Any, values: set[int]) -> None:
    """A logarithmic x axis with these numbers on it."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(values), [str(value) for value in sorted(values)], fontsize="x-small")


def _title(what: str, found: dict[str, Any]) -> str:
    return f"{what}, {found['shape']} on {found['gpu']['name']}"
