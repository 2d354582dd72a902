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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

Progress = Callable[[int, int], None]

_NAME: Final = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:/(?P<path>[^@:]+\.gguf))?(?:@(?P<revision>[^@:\s]+))?(?::(?P<tag>[\w./-]+))?",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_CONFIG_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_INDEX: Final = "model.safetensors.index.json"
_LISTED_MAX: Final = 12


class HubError(Exception):
    """The hub has no such model, or does not give it; says why and what to do."""


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
    hub = _Hub(name, environment)
    if (cached := hub.cached()) is not None:
        return cached
    if hub.offline:
        raise HubError(
            f"{name} is not in the cache, or not whole, and HF_HUB_OFFLINE forbids to fetch it; "
            "unset it, or give the path of a model"
        )
    report = progress or (lambda done, total: None)
    sizes = hub.sizes()
    choice = choose(name, tuple(sizes))
    total = sum(sizes[file] for file in (*choice.first, *choice.weights))
    folder: Path | None = None
    done = 0
    report(0, total)
    for files in (choice.first, choice.weights):
        if files:
            folder = hub.download(files, _shifted(report, done, total))
            done += sum(sizes[file] for file in files)
            report(done, total)
        if files is choice.first and files:
            _check_config(name, folder)
    assert folder is not None, "a choice is never empty"
    return folder if choice.gguf is None else folder / choice.gguf


class _Hub:
    """One model at one hub, through ``huggingface_hub``."""

    def __init__(self, name: HubName, environment: Mapping[str, str]) -> None:
        from huggingface_hub import constants

        self._name = name
        self._endpoint = environment.get("HF_ENDPOINT") or None
        self._token = environment.get("HF_TOKEN") or None
        self._cache = environment.get("HF_HUB_CACHE") or None
        if self._cache is None and (home := environment.get("HF_HOME")):
            self._cache = str(Path(home).expanduser() / "hub")
        said = environment.get("HF_HUB_OFFLINE", "")
        # The library has read its own environment, once and for all.
        self.offline = said.upper() in ("1", "ON", "YES", "TRUE") or constants.HF_HUB_OFFLINE

    def cached(self) -> Path | None:
        """The model, if the cache has all of it."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with self._plain_errors():
            try:
                folder = self._snapshot(["config.json"], None, local_files_only=True)
            except LocalEntryNotFoundError:
                return None
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        try:
            choice = choose(self._name, files)
        except HubError:
            return None  # the hub may have what is missing here
        if choice.gguf is not None:
            return folder / choice.gguf
        return folder if _is_whole(folder) else None

    def sizes(self) -> dict[str, int]:
        """Files of the repository with their bytes."""
        from huggingface_hub import HfApi

        with self._plain_errors():
            api = HfApi(endpoint=self._endpoint, token=self._token)
            info = api.model_info(
                self._name.repo, revision=self._name.revision, files_metadata=True, timeout=20
            )
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def download(self, files: Sequence[str], progress: Callable[[int], None]) -> Path:
        """Fetch ``files``; ``progress`` is given the bytes that have come."""
        with self._plain_errors():
            return self._snapshot(list(files), progress, local_files_only=False)

    def _snapshot(
        self, files: list[str], progress: Callable[[int], None] | None, *, local_files_only: bool
    ) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self._name.repo,
                revision=self._name.revision,
                allow_patterns=files,
                endpoint=self._endpoint,
                token=self._token,
                cache_dir=self._cache,
                tqdm_class=_bar_class(progress or (lambda done: None)),
                local_files_only=local_files_only,
            )
        )

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Turn what the library raises into one sentence that says what to do."""
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        name = self._name
        try:
            yield
        except GatedRepoError as error:
            raise HubError(
                f"{name.repo} is gated: accept its terms on its page, then set HF_TOKEN to a token "
                "of that account (or log in with `hf auth login`)"
            ) from error
        except RepositoryNotFoundError as error:
            raise HubError(
                f"the hub knows no model {name.repo} (a private one needs HF_TOKEN), and there is "
                "no such path here"
            ) from error
        except RevisionNotFoundError as error:
            raise HubError(f"{name.repo} has no revision {name.revision!r}") from error
        except HFValidationError as error:
            raise HubError(f"{name}: not a name of a hub: {_line(error)}") from error
        except LocalEntryNotFoundError as error:
            raise HubError(
                f"{name} is not in the cache, and the hub cannot be reached; check this machine's "
                "network, or give the path of a model"
            ) from error
        except HfHubHTTPError as error:
            raise HubError(f"{name} cannot be fetched: the hub says: {_line(error)}") from error
        except Exception as error:
            # Connection errors are those of the library's HTTP client, which changes with it.
            if not isinstance(error, OSError) and "httpx" not in type(error).__module__:
                raise
            raise HubError(
                f"{name} cannot be fetched ({_line(error)}); check this machine's network and "
                "disk, or give the path of a model"
            ) from error


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


def _check_config(name: HubName, folder: Path | None) -> None:
    from deepinfer.workers.model.config import UnsupportedModelError
    from deepinfer.workers.model.hf_config import config_json

    assert folder is not None
    try:
        config_json((folder / "config.json").read_text(encoding="utf-8"))
    except (UnsupportedModelError, UnicodeDecodeError) as error:
        raise HubError(f"{name}: config.json: {error}") from error


def _shifted(report: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: report(min(before + done, total), total)


def _bar_class(progress: Callable[[int], None]) -> type[Any]:
    """A progress bar for the library to drive, which shows nothing and tells ``progress``."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    most = 0  # bytes received and bytes written have a bar each

    class Bar(tqdm):  # type: ignore[misc]
        """Counts what is measured in bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            self.n += n or 0
            if self._in_bytes and self.n > most:
                most = int(self.n)
                progress(most)
            return None

    return Bar


def _line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
