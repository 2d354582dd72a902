"""The model that a validation is about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from deepinfer.deploy.bench.random_weights import SHAPES, random_model
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.models import check_model
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.weights import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is validated: a checkpoint at ``path``, or random weights of a named ``shape``."""

    shape: str
    path: Path | None = None

    @property
    def name(self) -> str:
        """For people."""
        return self.shape if self.path is None else self.path.name

    @property
    def arguments(self) -> str:
        """Of the command that is about it."""
        return f"--shape {self.shape}" if self.path is None else self.path.name

    def load(self) -> LoadedModel:
        """The checkpoint, or random weights drawn on the current card."""
        if self.path is not None:
            return load_model(self.path)
        return random_model(SHAPES[self.shape], device="cuda")

    def config(self) -> ModelConfig:
        """Without reading weights."""
        return SHAPES[self.shape] if self.path is None else load_model(self.path).config

    def ids(self, count: int) -> tuple[int, ...]:
        """Text of ours as the checkpoint's tokenizer has it, or random ids."""
        if self.path is None:
            return random_ids(SHAPES[self.shape], count)
        from deepinfer.deploy.bench.prompts import make_prompts
        from deepinfer.text.load import load_tokenizer

        return make_prompts(load_tokenizer(self.path), 1, count)[0]


def make_subject(model: str | None, shape: str, *, console: Console) -> Subject:
    """A model by its name or path, which is fetched if need be, or random weights of ``shape``.

    Raises:
        ConfigError: no such shape.
        ModelUnavailableError: no such model here, and it cannot be fetched.
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape = {shape!r}: must be {' or '.join(SHAPES)}")
    if model is None:
        return Subject(shape=shape)
    path = get_model(model, console=console)
    check_model(path, threads=None)
    return Subject(shape=shape, path=path)


def random_ids(config: ModelConfig, count: int) -> tuple[int, ...]:
    """Token ids, always the same."""
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, config.vocab_size, (count,), generator=random).tolist())
