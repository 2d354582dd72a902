"""What the machine remembers of the clusters that `deepinfer up` started on it.

One small JSON file a cluster, under ``$XDG_STATE_HOME/deepinfer``; a file whose process is gone
is left over from a crash and is swept when seen.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

TOKEN_BYTES = 32


class TokenFileError(ValueError):
    """A token file that cannot be used; names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One cluster started here."""

    endpoints: tuple[str, ...]
    """host:port of each gateway."""
    pid: int
    started_ticks: int
    """The process's start time in clock ticks since boot: a reused pid has another."""
    token_file: str
    model: str
    tls_cert: str | None = None
    """The gateways' certificate, if they speak TLS."""
    tls_server_name: str | None = None
    """A name that it is for."""
    operator_token: str = field(default="", repr=False)
    """What its processes are drained and restarted with."""
    grace_s: float = 0.0
    """How long running requests may take to finish when it is stopped."""

    @property
    def name(self) -> str:
        return self.endpoints[0]


def state_dir() -> Path:
    """Where the files are: ``$XDG_STATE_HOME/deepinfer``, or ``~/.local/state/deepinfer``."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "deepinfer"


def default_token_file() -> Path:
    """Where `deepinfer up` keeps its token unless told otherwise."""
    return state_dir() / "token"


def process_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else int(fields[19])


def remember(running: Running) -> None:
    """Write the cluster's file, whole or not at all."""
    path = _file(running.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, asdict(running))


def write_private(path: Path, values: object) -> None:
    """Write JSON that only its owner can read: the file is there whole or not at all."""
    scratch = path.with_suffix(f".{os.getpid()}.part")
    mode = stat.S_IRUSR | stat.S_IWUSR
    scratch.unlink(missing_ok=True)
    with os.fdopen(
        os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
    ) as file:
        json.dump(values, file)
    scratch.replace(path)


def forget(name: str) -> None:
    _file(name).unlink(missing_ok=True)
    _wish(name).unlink(missing_ok=True)


def wish_grace(name: str, grace_s: float) -> None:
    """Tell a cluster's launcher how long running requests may take, before it is signalled."""
    write_private(_wish(name), grace_s)


def wished_grace(name: str) -> float | None:
    """What a launcher was told so; None if nothing, or nothing that can be read."""
    try:
        found = json.loads(_wish(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return float(found) if isinstance(found, int | float) and found >= 0 else None


def alive() -> tuple[Running, ...]:
    """The clusters whose launcher still lives, by name."""
    found = []
    for path in sorted(state_dir().glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["endpoints"] = tuple(values["endpoints"])
            running = Running(**values)
        except (OSError, ValueError, TypeError, KeyError):
            path.unlink(missing_ok=True)
            continue
        if process_ticks(running.pid) == running.started_ticks:
            found.append(running)
        else:
            path.unlink(missing_ok=True)
    return tuple(found)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        TokenFileError: unreadable, or not one line of 16 to 4,096 printable ASCII characters.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenFileError(f"token file {path}: cannot be read: {error}") from error
    printable = token.isascii() and token.isprintable() and " " not in token
    if not printable or not 16 <= len(token) <= 4096:
        raise TokenFileError(
            f"token file {path}: must hold one line of 16 to 4096 printable ASCII characters "
            f"without spaces, and has {len(token)} characters"
        )
    return token


def read_or_make_token(path: Path) -> str:
    """The token in a file that only its owner can read; made with a fresh one if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise TokenFileError(f"token file {path}: cannot be made: {error}") from error
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    return token


def exposed(path: Path) -> str | None:
    """What to tell of a token file that others can read; None if only its owner can."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH) == 0:
        return None
    return f"token file {path}: others can read it (mode {mode:o}): chmod 600 {path}"


def _file(name: str) -> Path:
    return state_dir() / (name.replace("/", "_").replace(":", "_") + ".json")


def _wish(name: str) -> Path:
    return _file(name).with_suffix(".grace")
