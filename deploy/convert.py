"""`deepinfer convert`: a folder with 4-bit or nested weights, from a 16-bit or a GGUF model."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.models import ModelUnavailableError, check_model

if TYPE_CHECKING:
    from deepinfer.workers.model.nested_writer import NestReport
    from deepinfer.workers.model.weights import LoadedModel

FORMATS: Final = ("w4a16", "nested")
"""What ``--weights`` may be."""

_COPIED: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the weights become.

    ``group_size`` is of 4-bit weights (None: the most that fits), the others of nested ones:
    ``row_scaling`` False is the published rule; ``measure_order`` finds out which layers suffer
    least from FP8.

    Raises:
        ConfigError: an unknown format, an option that the format does not have.
    """

    weights: str = "w4a16"
    group_size: int | None = None
    row_scaling: bool = True
    measure_order: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        if self.weights not in FORMATS:
            raise ConfigError(f"weights = {self.weights!r}: must be {' or '.join(FORMATS)}")
        if self.nested and self.group_size is not None:
            raise ConfigError(f"group_size = {self.group_size}: nested weights have no groups")
        if not self.nested and not self.row_scaling:
            raise ConfigError("row_scaling = False: only nested weights have it")
        if not self.nested and self.measure_order:
            raise ConfigError("measure_order = True: only nested weights have an order of layers")
        if self.threads < 1:
            raise ConfigError(f"threads = {self.threads}: must be 1 or more")

    @property
    def nested(self) -> bool:
        """Whether it is not the 4 bits."""
        return self.weights == "nested"


def run_convert(*, source: str, target: Path, recipe: Recipe, console: Console) -> list[str]:
    """Write ``target``: config, weights and tokenizer, whole or not at all; tell what was done.

    ``console`` shows the progress.

    Raises:
        ConfigError: ``target`` is there or cannot be written, a group size that the model cannot
            have.
        ModelUnavailableError: no such model, or not one that can be converted.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already: nothing is overwritten")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target.absolute().parent} is no folder")
    path = get_model(source, console=console)
    group = _check(path, recipe)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    try:
        with bar:
            return _convert(path, target.absolute(), recipe, group, bar)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error


def _check(path: Path, recipe: Recipe) -> int:
    """Refuse what cannot be converted; the group size otherwise."""
    from deepinfer.workers.model.convert import GroupSizeError, group_size_for, linear_names
    from deepinfer.workers.model.load import load_model

    config = check_model(path, threads=None)
    model = load_model(path)
    for name in linear_names(config):
        if model.weights.read_quantized(name) is not None:
            raise ModelUnavailableError(
                f"{path}: {name} has 4 bits already: convert the model that it was made from"
            )
    if recipe.nested:
        if model.nested:
            raise ModelUnavailableError(f"{path}: its weights are nested already")
        return 0
    try:
        return group_size_for(config, recipe.group_size)
    except GroupSizeError as error:
        raise ConfigError(str(error)) from error


def _convert(path: Path, target: Path, recipe: Recipe, group: int, bar: Progress) -> list[str]:
    from deepinfer.workers.model.load import load_model

    task = bar.add_task(f"converting {path.name}", total=None)
    model = load_model(path, progress=lambda done, total: _show(bar, task, done, total))
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        try:
            config = _write_others(path, folder, model)
            write = _write_nested if recipe.nested else _write_w4a16
            said = write(model, folder, config, recipe, group)
        except ValueError as error:  # a checkpoint's, or a tokenizer's
            raise ModelUnavailableError(f"{path}: {error}") from error
        check_model(folder, threads=None)
        if recipe.measure_order:
            said.append(_measure_order(folder, config, recipe, bar))
        folder.rename(target)
    return [f"{target}: {said[0]}", *said[1:]]


def _write_w4a16(
    model: LoadedModel, folder: Path, config: dict[str, Any], recipe: Recipe, group: int
) -> list[str]:
    from deepinfer.workers.model.convert import linear_names, quantization_config, write_w4a16

    _write_config(folder, config, quantization_config(group))
    write_w4a16(model, folder / "model.safetensors", group)
    layers = len(linear_names(model.config))
    return [
        f"{layers} linear layers in 4 bits, rounded to nearest, symmetric, a scale for every "
        f"{group} weights; embedding and head in 16 bits; {_megabytes(folder)} MB",
        "Rounding to nearest knows no calibration data: compare with `deepinfer bench quality`.",
    ]


def _write_nested(
    model: LoadedModel, folder: Path, config: dict[str, Any], recipe: Recipe, group: int
) -> list[str]:
    from deepinfer.workers.model.nested_writer import write_nested
    from deepinfer.workers.model.quantization import NestedFormat

    reports = write_nested(model, folder / "model.safetensors", row_scaling=recipe.row_scaling)
    plain = [one.name.removesuffix(".weight") for one in reports if not one.nested]
    form = NestedFormat(row_scaling=recipe.row_scaling, plain=tuple(plain))
    _write_config(folder, config, form.to_hf())
    return [*_summary(reports, _megabytes(folder)), *_by_layer(reports)]


def _summary(reports: Sequence[NestReport], megabytes: str) -> list[str]:
    nested = [one for one in reports if one.nested]
    over = sum(one.nbytes for one in reports) / sum(2 * one.weights for one in reports) - 1
    left_out = sum(not one.published for one in reports)
    shifted = sum(one.rows_shifted for one in reports)
    shares = f"{left_out} of {len(reports)} weights ({left_out / len(reports):.1%})"
    if len(nested) < len(reports):
        rows = f"{shares} have values above 1.75 and stay as they were"
    else:
        rows = (
            f"{shifted:,} of {sum(one.rows for one in reports):,} rows shifted, "
            f"{sum(one.outliers for one in reports):,} outliers listed; without either, {shares} "
            "would stay as they were"
        )
    lines = [
        f"{len(nested)} of {len(reports)} weights nested, each bit of FP16 kept; {megabytes} MB, "
        f"the weights {over:+.2%} beside 16 bits",
        rows,
    ]
    if rounded := sum(one.rounded for one in reports):
        lines.append(
            f"{rounded:,} of {sum(one.weights for one in reports):,} values are no FP16 numbers "
            "in the source and were rounded to the nearest first"
        )
    return lines


def _by_layer(reports: Sequence[NestReport]) -> list[str]:
    """A line for each decoder layer, and for the head."""
    groups: dict[str, list[NestReport]] = {}
    for one in reports:
        found = re.match(r"model\.layers\.(\d+)\.", one.name)
        place = f"layer {found[1]}" if found else one.name.removesuffix(".weight")
        groups.setdefault(place, []).append(one)
    lines = []
    for place, ones in groups.items():
        plain = [one.name.split(".")[-2] for one in ones if not one.nested]
        kept = f"; {', '.join(plain)} stay as they were" if plain else ""
        lines.append(
            f"  {place}: {sum(one.rows_shifted for one in ones):,} of "
            f"{sum(one.rows for one in ones):,} rows shifted, "
            f"{sum(one.outliers for one in ones):,} outliers, "
            f"max |w| {max(one.w_max for one in ones):.4g}{kept}"
        )
    return lines


def _measure_order(folder: Path, config: dict[str, Any], recipe: Recipe, bar: Progress) -> str:
    """Find the order of layers on the built-in text, and write it into the config."""
    from deepinfer.deploy.bench.sensitivity import measured_order

    layers = config["num_hidden_layers"]
    task = bar.add_task("measuring layers", total=layers)
    found = measured_order(folder, threads=recipe.threads, advance=lambda: bar.advance(task))
    _write_config(
        folder, config, config["quantization_config"] | {"layer_order": list(found.order)}
    )
    return (
        f"layers from the least to the most sensitive to FP8: {', '.join(map(str, found.order))}; "
        f"alone in FP8 they cost {min(found.kl_nats):.2g} to {max(found.kl_nats):.2g} nats of KL "
        f"on {found.positions} tokens"
    )


def _write_config(folder: Path, config: dict[str, Any], quantization: dict[str, Any]) -> None:
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _megabytes(folder: Path) -> str:
    return f"{(folder / 'model.safetensors').stat().st_size / 1e6:,.1f}"


def _show(bar: Progress, task: Any, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _write_others(path: Path, folder: Path, model: LoadedModel) -> dict[str, Any]:
    """Everything but the weights and the config, which is returned."""
    from deepinfer.text.load import load_tokenizer
    from deepinfer.text.to_huggingface import write_huggingface_tokenizer
    from deepinfer.workers.model.hf_config_writer import hf_config

    if path.is_dir():
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        for name in _COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
    else:
        config = hf_config(model.config)
        write_huggingface_tokenizer(load_tokenizer(path), folder)
    return config
