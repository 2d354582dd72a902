"""Opens a checkpoint by path, whatever its format."""

from __future__ import annotations

from pathlib import Path

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.gguf_loader import load_gguf
from deepinfer.workers.model.safetensors_loader import load_folder
from deepinfer.workers.model.weights import (
    CheckpointError,
    LoadedModel,
    Progress,
    WeightSource,
    open_model,
)


def load_model(path: str | Path, *, progress: Progress | None = None) -> LoadedModel:
    """Open a Hugging Face folder or a ``.gguf`` file, and check that it is whole.

    Only headers and samples are read here. Tensors are read, one at a time, when a ``Decoder``
    packs them; ``progress(bytes_read, bytes_total)`` is called then.

    Raises CheckpointError (damaged or incomplete) or UnsupportedModelError (not computed here),
    both ValueErrors, naming file and field; OSError when the path cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"model {path} does not exist")
    config: ModelConfig
    weights: WeightSource
    if path.is_dir():
        config, weights = load_folder(path, progress=progress)
    elif path.suffix == ".gguf":
        config, weights = load_gguf(path, progress=progress)
    else:
        raise CheckpointError(f"{path.name} is neither a folder nor a .gguf file")
    return open_model(config, weights)
