"""All that touches ``huggingface_hub``: one repository, and each error in one sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from deepinfer.proto.redaction import hide

_TIMEOUT_S = 20


class HubError(Exception):
    """The hub has no such model, or does not give it; says why and what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """One repository at one hub. Every method raises HubError."""

    repo: str
    revision: str | None
    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    cache: str | None = None
    offline: bool = False

    @classmethod
    def of(cls, repo: str, revision: str | None, environment: Mapping[str, str]) -> Self:
        """With the settings that ``environment`` gives."""
        from huggingface_hub import constants

        cache = environment.get("HF_HUB_CACHE") or None
        if cache is None and (home := environment.get("HF_HOME")):
            cache = str(Path(home).expanduser() / "hub")
        hide(environment.get("HF_TOKEN"))
        said = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return cls(
            repo,
            revision,
            endpoint=environment.get("HF_ENDPOINT") or None,
            token=environment.get("HF_TOKEN") or None,
            cache=cache,
            # The library has read its own environment, once and for all.
            offline=said or constants.HF_HUB_OFFLINE,
        )

    def cached(self) -> Path | None:
        """The folder in the cache, whole or not."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with self._plain_errors():
            try:
                return self._snapshot(["config.json"], lambda done: None, local_files_only=True)
            except LocalEntryNotFoundError:
                return None

    def sizes(self) -> dict[str, int]:
        """Files of the repository with their bytes."""
        from huggingface_hub import HfApi

        with self._plain_errors():
            api = HfApi(endpoint=self.endpoint, token=self.token)
            info = api.model_info(
                self.repo, revision=self.revision, files_metadata=True, timeout=_TIMEOUT_S
            )
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def download(self, files: Sequence[str], progress: Callable[[int], None]) -> Path:
        """Fetch ``files`` into the cache; ``progress`` is given the bytes that have come.

        The library's threads cannot be interrupted: see ``hub_process``.
        """
        with self._plain_errors():
            return self._snapshot(list(files), progress, local_files_only=False)

    def _snapshot(
        self, files: list[str], progress: Callable[[int], None], *, local_files_only: bool
    ) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.repo,
                revision=self.revision,
                allow_patterns=files,
                endpoint=self.endpoint,
                token=self.token,
                cache_dir=self.cache,
                tqdm_class=_bar_class(progress),
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

        repo = self.repo
        try:
            yield
        except GatedRepoError as error:
            raise HubError(
                f"{repo} is gated: accept its terms on its page, then set HF_TOKEN to a token "
                "of that account (or log in with `hf auth login`)"
            ) from error
        except RepositoryNotFoundError as error:
            raise HubError(
                f"the hub knows no model {repo} (a private one needs HF_TOKEN), and there is "
                "no such path here"
            ) from error
        except RevisionNotFoundError as error:
            raise HubError(f"{repo} has no revision {self.revision!r}") from error
        except HFValidationError as error:
            raise HubError(f"{repo}: not a name of a hub: {_line(error)}") from error
        except LocalEntryNotFoundError as error:
            raise HubError(
                f"{repo} is not in the cache, and the hub cannot be reached; check this machine's "
                "network, or give the path of a model"
            ) from error
        except HfHubHTTPError as error:
            raise HubError(f"{repo} cannot be fetched: the hub says: {_line(error)}") from error
        except Exception as error:
            # Connection errors are those of the library's HTTP client, which changes with it.
            if not isinstance(error, OSError) and "httpx" not in type(error).__module__:
                raise
            raise HubError(
                f"{repo} cannot be fetched ({_line(error)}), and there is no such path here; "
                "check this machine's network and disk, or give the path of a model"
            ) from error


def _bar_class(progress: Callable[[int], None]) -> type[Any]:
    """A progress bar for the library to drive, which shows nothing and tells ``progress``."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    most = 0  # bytes received and bytes written have a bar each
    lock = threading.Lock()  # the library fetches in several threads; progress never goes back

    class Bar(tqdm):  # type: ignore[misc]
        """Counts what is measured in bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            with lock:
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
