"""No tracked file names a place on somebody's machine or leaves work for later, and the pins can
be installed anywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

# A folder that belongs to one machine or one person, at the start of an absolute path. The parts
# are joined here so that this file passes its own test. "/tmp" alone is fine, and so is a path
# that goes on from something else, as in "$HOME/work/" or "example.com/root/".
_PRIVATE_FOLDERS = "|".join(("work", "root", "home/[a-z][a-z0-9_-]*", "Users/[A-Za-z]+", "tmp/w"))
PRIVATE_PATH = re.compile(rf"(?<![\w./$~{{}}<>*+?)\]-])/(?:{_PRIVATE_FOLDERS})(?=[/\s\"'`):,;]|$)")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
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


@pytest.fixture(scope="module")
def texts(repo_root: Path) -> dict[str, str]:
    """Every tracked text file's content by its path; as git does, a NUL byte tells a binary."""
    if shutil.which("git") is None or not (repo_root / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repo_root, check=True, capture_output=True, text=True
    ).stdout
    # The corpus is input that broke something, byte for byte.
    listed_paths = [path for path in listed.split("\0") if not path.startswith("tests/corpus/")]
    files = {path: repo_root / path for path in listed_paths if path}
    contents = {path: file.read_bytes() for path, file in files.items() if file.is_file()}
    return {path: data.decode("utf-8") for path, data in contents.items() if b"\0" not in data}


def test_no_file_names_a_private_path(texts: dict[str, str]) -> None:
    found = [
        f"{name}:{line}: {path}"
        for name, text in texts.items()
        for line, path in private_paths(text)
    ]
    assert not found, "\n".join(found)


def test_no_file_leaves_work_for_later(texts: dict[str, str]) -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not found, "\n".join(found)


def test_text_files_end_lines_alike(texts: dict[str, str]) -> None:
    """Unix line ends, a final newline, and no merge conflict left in."""
    found = []
    for name, text in texts.items():
        if "\r" in text or (text and not text.endswith("\n")):
            found.append(f"{name}: line ends")
        if re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE):
            found.append(f"{name}: conflict marker")
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
    wanted = [*project["dependencies"], *extras["dev"], *extras["bench"], *extras["cuda12"]]
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
