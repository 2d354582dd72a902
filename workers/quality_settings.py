"""What a worker is told about the quality gate; without torch, for the launcher makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepinfer.workers.core.quality import Mode

TOKENS_MIN: Final = 2
"""Of a text; with less nothing attends to anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings:
    """What a worker is told about the gate; picklable.

    Raises ValueError for a text of fewer than ``TOKENS_MIN`` tokens.
    """

    mode: Mode = "strict"
    token_ids: tuple[int, ...]
    """The text that models are tried on."""
    cache_folder: str
    """Where findings are kept."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < TOKENS_MIN:
            raise ValueError(
                f"token_ids: {len(self.token_ids)} tokens, must be {TOKENS_MIN} or more"
            )
