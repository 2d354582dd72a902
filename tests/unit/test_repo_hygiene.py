"""No tracked file names a place on somebody's machine, and the pins can be installed anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

BINARY_SUFFIXES = frozenset({".png", ".jpg", ".gif", ".gz", ".safetensors", ".gguf", ".npz"})

# A folder that belongs to one machine or one person, at the start of an absolute path. The parts
# are joined here so that this file passes its own test. "/tmp" alone is fine, and so is a path
# that goes on from something else, as in "$HOME/work/" or "example.com/root/".
_PRIVATE_FOLDERS = "|".join(("work", "root", "home/[a-z][a-z0-9_-]*", "Users/[A-Za-z]+", "tmp/w"))
PRIVATE_PATH = re.compile(rf"(?<![\w./$~{{}}<>*+?)\]-])/(?:{_PRIVATE_FOLDERS})(?=[/\s\"'`):,;]|$)")
# Containers have homes of their own, which are no one's machine.
CONTAINER_HOME = "/home/" + "deepinfer"


def private_paths(text: str) -> list[tuple[int, str]]:
    """Return (line, path) for each absolute path in ``text`` into a developer's folders."""
    return [
        (number, match.group())
        for number, line in enumerate(text.splitlines(), start=1)
        for match in PRIVATE_PATH.finditer(line)
        if match.group() != CONTAINER_HOME
    ]


def tracked_text_files(root: Path) -> list[Path]:
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    files = [root / path for path in listed.split("\0") if path]
    return [f for f in files if f.is_file() and f.suffix not in BINARY_SUFFIXES]


def test_no_file_names_a_private_path(repo_root: Path) -> None:
    found = [
        f"{file.relative_to(repo_root)}:{line}: {path}"
        for file in tracked_text_files(repo_root)
        for line, path in private_paths(file.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_text_files_end_lines_alike(repo_root: Path) -> None:
    """Unix line ends, a final newline, and no merge conflict left in."""
    found = []
    for file in tracked_text_files(repo_root):
        content = file.read_bytes()
        if b"\r" in content or (content and not content.endswith(b"\n")):
            found.append(f"{file.relative_to(repo_root)}: line ends")
        if re.search(rb"^(<{7}|>{7}) ", content, re.MULTILINE):
            found.append(f"{file.relative_to(repo_root)}: conflict marker")
    assert not found, "\n".join(found)


def pins(root: Path) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text("utf-8").splitlines()
    names = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_normal(name): version for name, version in names}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pins_are_exact_and_name_no_machine(repo_root: Path) -> None:
    for line in (repo_root / "constraints.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line), line


def test_every_direct_dependency_is_pinned(repo_root: Path) -> None:
    with (repo_root / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["bench"]]
    names = {_normal(re.split(r"[\[<>=! ]", one)[0]) for one in wanted} - {project["name"]}
    assert names <= pins(repo_root).keys(), names - pins(repo_root).keys()


@pytest.mark.parametrize(
    "text",
    [
        "open('/" + "work/main/x')",
        "see /" + "root/.cache",
        "PATH=/" + "home/ann/bin",
        '"/' + 'Users/Ann/x"',
        "cd /" + "tmp/w && ls",
        "in /" + "work",
    ],
)
def test_planted_private_path_is_found(text: str) -> None:
    assert len(private_paths(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "mktemp -d /tmp/x.XXXX",
        "deepinfer.workers/working/",
        "the client/work/split",
        "$HOME/work/x",
        "https://example.com/root/x",
        "prefill/work ratio",
        "/workers/0",
        "/rootless",
        "USER home " + CONTAINER_HOME + "/cache",
    ],
)
def test_other_path_passes(text: str) -> None:
    assert private_paths(text) == []
