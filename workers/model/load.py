"""Opens a checkpoint by path, whatever its format."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.folder import load_folder
from deepinfer.workers.model.gguf_loader import load_gguf
from deepinfer.workers.model.levels import WEIGHTS
from deepinfer.workers.model.nested import NestedWeights, nest
from deepinfer.workers.model.weights import (
    CheckpointError,
    LoadedModel,
    Progress,
    WeightSource,
    open_model,
)

log = logging.getLogger(__name__)


def load_model(
    path: str | Path, *, progress: Progress | None = None, weights: str = "auto"
) -> LoadedModel:
    """Open a Hugging Face folder or a ``.gguf`` file, and check that it is whole.

    ``weights="nested"``: those of a plain checkpoint are nested as they are read (``nested``); a
    nested checkpoint is so either way.

    Only headers and samples are read here. Tensors are read, one at a time, when a ``Decoder``
    packs them; ``progress(bytes_read, bytes_total)`` is called then. A context that is shorter
    than the checkpoint's own is logged as a warning.

    Raises CheckpointError (damaged, incomplete or not a model) or UnsupportedModelError (not
    computed here), both ValueErrors, naming file and field; OSError when the path cannot be read.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights = {weights!r}: must be {' or '.join(WEIGHTS)}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"model {path} does not exist")
    config: ModelConfig
    source: WeightSource
    config, source = load_folder(path) if path.is_dir() else load_gguf(path)
    try:
        model = open_model(config, source, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    if isinstance(source, NestedWeights):
        model = replace(model, nested=True, layer_order=source.format.layer_order)
    elif weights == "nested":
        try:
            model = nest(model)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path.name}: {error}") from error
    if config.positions_limit is not None:
        log.warning(
            "%s: contexts are limited to %d tokens: %s, and what lies beyond is not implemented",
            path.name,
            config.max_positions,
            config.positions_limit,
        )
    return model
