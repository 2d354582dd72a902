"""What workers are told about the KV quality gate: the built-in text in a model's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.models import cache_folder

if TYPE_CHECKING:
    from deepinfer.workers.quality_settings import QualitySettings

TOKENS: Final = 256
"""Of the text: two passes over them take SmolLM2 two seconds of one core, and KL's mean over them
was within a tenth of that over twice as many."""


def quality_settings(config: ClusterConfig, model: Path, dtype: str) -> QualitySettings | None:
    """The gate for a pool of ``dtype`` (canonical); None: there is nothing to find out."""
    from deepinfer.text.load import load_tokenizer
    from deepinfer.text.probe_text import PROBE_TEXT
    from deepinfer.workers.core.quality import candidates
    from deepinfer.workers.quality_settings import QualitySettings

    if config.kv_quality == "off" or not candidates(dtype):
        return None
    tokenizer = load_tokenizer(model)
    ids = (*tokenizer.prefix_ids, *tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    return QualitySettings(
        mode=config.kv_quality,
        token_ids=ids[:TOKENS],
        cache_folder=str(cache_folder() / "kv-quality"),
    )
