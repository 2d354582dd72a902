"""The wheel holds every tracked source file of the packages once, and nothing else."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

SHIPPED_SUFFIXES = frozenset({".py", ".pyi", ".proto", ".cu", ".cuh", ".txt"})
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def tracked_files(root: Path) -> list[str]:
    """Return the tracked paths that exist in the checkout, skipping where git knows nothing."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    return [path for path in listed.split("\0") if path and (root / path).exists()]


def shipped(path: str, folders: frozenset[str]) -> bool:
    file = Path(path)
    if file.parts[0] not in folders or len(file.parts) < 2:
        return False
    return file.suffix in SHIPPED_SUFFIXES or file.name == "py.typed"


@pytest.fixture(scope="module")
def tracked(repo_root: Path) -> list[str]:
    return tracked_files(repo_root)


@pytest.fixture(scope="module")
def folders(repo_root: Path) -> frozenset[str]:
    """The package folders: those that src/deepinfer links to."""
    return frozenset(link.name for link in (repo_root / "src/deepinfer").iterdir())


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a clean copy of the tracked files, with no network."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for path in tracked:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repo_root / path, copy / path, follow_symlinks=False)
    build = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (made,) = out.glob("*.whl")
    return made


def test_wheel_holds_the_tracked_sources_and_nothing_else(
    wheel: Path, tracked: list[str], folders: frozenset[str]
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    packed = Counter(name for name in names if name not in metadata)
    wanted = Counter(f"deepinfer/{path}" for path in tracked if shipped(path, folders))
    assert not wanted - packed, f"missing: {sorted(wanted - packed)}"
    assert not packed - wanted, f"too much: {sorted(packed - wanted)}"
    for folder in folders:
        assert f"deepinfer/{folder}/py.typed" in packed, f"{folder} has no py.typed"
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


def test_wheel_holds_the_same_bytes(wheel: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("deepinfer/"):
                source = repo_root / name.removeprefix("deepinfer/")
                assert archive.read(name) == source.read_bytes(), name


def test_every_module_of_the_wheel_compiles(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".pyi")):
                ast.parse(archive.read(name), filename=name)


def test_wheel_names_itself_and_its_command(wheel: Path) -> None:
    assert wheel.name.startswith("deepinfer_cluster-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert "deepinfer = deepinfer.deploy.cli:main" in archive.read(entry_points).decode()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("kernels/csrc/attention.cu", True),
        ("proto/kvstore_pb2.pyi", True),
        ("text/py.typed", True),
        ("deploy/k8s/worker.yaml", False),
        ("tests/unit/test_x.py", False),
        ("setup.py", False),
    ],
)
def test_what_ships(path: str, expected: bool, folders: frozenset[str]) -> None:
    assert shipped(path, folders) is expected
