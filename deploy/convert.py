"""`deepinfer convert`: a model folder with 4-bit weights, made from a 16-bit or a GGUF model."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.models import ModelUnavailableError, check_model

if TYPE_CHECKING:
    from deepinfer.workers.model.weights import LoadedModel

FORMATS: Final = ("w4a16",)
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


def run_convert(
    *, source: str, target: Path, weights: str, group_size: int | None, console: Console
) -> list[str]:
    """Write ``target``: config, weights and tokenizer, whole or not at all; tell what was done.

    ``console`` shows the progress.

    Raises:
        ConfigError: ``target`` is there or cannot be written, an unknown format of weights, a
            group size that the model cannot have.
        ModelUnavailableError: no such model, or not one that can be converted.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights = {weights!r}: must be {', '.join(FORMATS)}")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already: nothing is overwritten")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target.absolute().parent} is no folder")
    path = get_model(source, console=console)
    group = _group(path, group_size)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    try:
        with bar:
            return _convert(path, target.absolute(), group, bar)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error


def _group(path: Path, wanted: int | None) -> int:
    """Refuse what cannot be converted; the group size otherwise."""
    from deepinfer.workers.model.convert import GroupSizeError, group_size_for, linear_names
    from deepinfer.workers.model.load import load_model

    config = check_model(path, threads=None)
    weights = load_model(path).weights
    for name in linear_names(config):
        if weights.read_quantized(name) is not None:
            raise ModelUnavailableError(
                f"{path}: {name} has 4 bits already: convert the model that it was made from"
            )
    try:
        return group_size_for(config, wanted)
    except GroupSizeError as error:
        raise ConfigError(str(error)) from error


def _convert(path: Path, target: Path, group: int, bar: Progress) -> list[str]:
    from deepinfer.workers.model.convert import linear_names, write_w4a16
    from deepinfer.workers.model.load import load_model

    task = bar.add_task(f"converting {path.name}", total=None)
    model = load_model(path, progress=lambda done, total: _show(bar, task, done, total))
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        try:
            _write_others(path, folder, model, group)
            write_w4a16(model, folder / "model.safetensors", group)
        except ValueError as error:  # a checkpoint's, or a tokenizer's
            raise ModelUnavailableError(f"{path}: {error}") from error
        check_model(folder, threads=None)
        size = (folder / "model.safetensors").stat().st_size
        folder.rename(target)
    layers = len(linear_names(model.config))
    return [
        f"{target}: {layers} linear layers in 4 bits, rounded to nearest, symmetric, a scale "
        f"for every {group} weights; embedding and head in 16 bits; {size / 1e6:,.1f} MB",
        "Rounding to nearest knows no calibration data: compare with `deepinfer bench quality`.",
    ]


def _show(bar: Progress, task: Any, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _write_others(path: Path, folder: Path, model: LoadedModel, group: int) -> None:
    """Everything but the weights."""
    from deepinfer.text.load import load_tokenizer
    from deepinfer.text.to_huggingface import write_huggingface_tokenizer
    from deepinfer.workers.model.convert import quantization_config
    from deepinfer.workers.model.hf_config_writer import hf_config

    if path.is_dir():
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        for name in _COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
    else:
        config = hf_config(model.config)
        write_huggingface_tokenizer(load_tokenizer(path), folder)
    config["quantization_config"] = quantization_config(group)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
