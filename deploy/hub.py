"""Models by their name on a Hugging Face hub: what is fetched, and what is used from the cache.

A name is ``org/name``, with ``@revision`` for a branch, tag or commit other than ``main``. Of a
repository of GGUF files one is named: ``org/name:Q4_K_M`` (as for llama.cpp and vLLM),
``org/name:file.gguf`` or ``org/name/file.gguf``.

A copy that the cache holds whole is used as it is and the network is left alone, so that a
restart serves the same model: ``hf download org/name`` or another revision brings a newer one.
The library's own settings count: ``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE``, ``HF_TOKEN``,
``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from deepinfer.deploy.hub_library import HubError, Library
from deepinfer.deploy.hub_process import Downloads

Progress = Callable[[int, int], None]

_NAME: Final = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:/(?P<path>[^@:]+\.gguf))?(?:@(?P<revision>[^@:\s]+))?(?::(?P<tag>[\w./-]+))?",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_CONFIG_FILES: Final = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_INDEX: Final = "model.safetensors.index.json"
_LISTED_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of a hub: ``file`` is a GGUF file or what names one of several (``Q4_K_M``)."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """``None`` for what cannot be a name of a hub, a path for instance."""
        match = _NAME.fullmatch(text)
        if match is None or (match["path"] and match["tag"]):
            return None
        return cls(match["repo"], match["revision"], match["path"] or match["tag"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}" + ("" if self.file is None else f":{self.file}")


class Choice(NamedTuple):
    """What of a repository is needed."""

    first: tuple[str, ...]
    """Small files, which tell whether the others are worth fetching."""
    weights: tuple[str, ...]
    gguf: str | None
    """The model is this file; None: it is the folder."""


def choose(name: HubName, files: Sequence[str]) -> Choice:
    """Choose among the ``files`` of a repository. Raises HubError if no model can be made of it."""
    ggufs = sorted(file for file in files if file.lower().endswith(".gguf"))
    if name.file is not None:
        return _one_gguf(name, [file for file in ggufs if _is_named(file, name.file)], ggufs)
    if "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return _folder(name, files)
    if ggufs:
        return _one_gguf(name, ggufs, ggufs)
    pickled = any(file.endswith((".bin", ".pt", ".pth")) for file in files)
    hint = "; its pickled weights are not read" if pickled else ""
    raise HubError(f"{name} holds neither config.json with safetensors nor a GGUF file{hint}")


def fetch(
    name: HubName, *, progress: Progress | None = None, environment: Mapping[str, str]
) -> Path:
    """Return the folder or GGUF file of a model, fetching what the cache lacks.

    A model that is not supported is refused before its weights are fetched. Raises HubError.
    """
    library = Library.of(name.repo, name.revision, environment)
    if (cached := _cached(name, library)) is not None:
        return cached
    if library.offline:
        raise HubError(
            f"{name} is not in the cache, or not whole, and HF_HUB_OFFLINE forbids to fetch it; "
            "unset it, or give the path of a model"
        )
    report = progress or (lambda done, total: None)
    sizes = library.sizes()
    choice = choose(name, tuple(sizes))
    total = sum(sizes[file] for file in (*choice.first, *choice.weights))
    done = 0
    report(0, total)
    with Downloads(library) as downloads:
        if choice.first:
            folder = downloads.fetch(choice.first, _shifted(report, done, total))
            done += sum(sizes[file] for file in choice.first)
            report(done, total)
            _check_config(name, folder)
        folder = downloads.fetch(choice.weights, _shifted(report, done, total))
    report(total, total)
    return folder if choice.gguf is None else folder / choice.gguf


def _cached(name: HubName, library: Library) -> Path | None:
    """The model, if the cache has all of it."""
    folder = library.cached()
    if folder is None:
        return None
    files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        choice = choose(name, files)
    except HubError:
        return None  # the hub may have what is missing here
    if choice.gguf is not None:
        return folder / choice.gguf
    return folder if _is_whole(folder) else None


def _one_gguf(name: HubName, found: Sequence[str], all_of_them: Sequence[str]) -> Choice:
    if len(found) != 1:
        shown = ", ".join(all_of_them[:_LISTED_MAX]) or "none"
        left = len(all_of_them) - _LISTED_MAX
        more = f" and {left} more" if left > 0 else ""
        which = "several GGUF files" if name.file is None else f"{len(found)} files {name.file!r}"
        raise HubError(
            f"{name.repo} has {which}; name one, as in {name.repo}:file.gguf, of: {shown}{more}"
        )
    if _PART.search(found[0]):
        raise HubError(f"{name.repo}: {found[0]} is one of several parts: not supported")
    return Choice((), (found[0],), found[0])


def _is_named(file: str, wanted: str) -> bool:
    """Whether ``wanted`` is the file, or a word of its name such as ``Q4_K_M``."""
    if wanted.lower().endswith(".gguf"):
        return wanted in (file, file.rpartition("/")[2])
    words = re.escape(wanted.lower())
    stem = file.lower().removesuffix(".gguf").rpartition("/")[2]
    return re.search(rf"(?:^|[-._]){words}(?:-\d{{5}}-of-\d{{5}})?$", stem) is not None


def _folder(name: HubName, files: Sequence[str]) -> Choice:
    if "tokenizer.json" not in files:
        raise HubError(
            f"{name} has no tokenizer.json, which is needed (transformers' save_pretrained writes "
            "one)"
        )
    if "model.safetensors" in files:
        weights = ["model.safetensors"]
    elif _INDEX in files:
        weights = [file for file in files if re.fullmatch(r"model-[^/]*\.safetensors", file)]
    else:
        raise HubError(f"{name} has neither model.safetensors nor {_INDEX}")
    first = [file for file in (*_CONFIG_FILES, _INDEX) if file in files]
    if "model.safetensors" in files and _INDEX in first:
        first.remove(_INDEX)
    return Choice(tuple(first), tuple(sorted(weights)), None)


def _is_whole(folder: Path) -> bool:
    """Whether every file of weights that ``folder`` needs is there."""
    if (folder / "model.safetensors").is_file():
        return True
    try:
        shards = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)


def _check_config(name: HubName, folder: Path) -> None:
    from deepinfer.workers.model.config import UnsupportedModelError
    from deepinfer.workers.model.hf_config import config_json

    try:
        config_json((folder / "config.json").read_text(encoding="utf-8"))
    except (UnsupportedModelError, UnicodeDecodeError) as error:
        raise HubError(f"{name}: config.json: {error}") from error


def _shifted(report: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: report(min(before + done, total), total)
