"""docs/limits.md says what the program does."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from deepinfer.deploy.config import ClusterConfig

ROW = re.compile(r"^\| `([a-z_.]+)\.([A-Z][A-Z_]+)` \| ([0-9,]+) \|", re.MULTILINE)
SETTING = re.compile(r"^\| [^|]+\| [^|]+\| `([a-z_]+)` \|", re.MULTILINE)


def test_every_value_is_the_programs(repo_root: Path) -> None:
    text = (repo_root / "docs/limits.md").read_text("utf-8")
    rows = ROW.findall(text)
    assert len(rows) == sum(line.startswith("| `") for line in text.splitlines()) > 30
    wrong = []
    for module, name, said in rows:
        value = getattr(import_module(f"deepinfer.{module}"), name)
        if value != int(said.replace(",", "")):
            wrong.append(f"{module}.{name} is {value:,}, not {said}")
    assert not wrong, wrong


def test_every_setting_is_one(repo_root: Path) -> None:
    text = (repo_root / "docs/limits.md").read_text("utf-8")
    settings = set(SETTING.findall(text))
    assert len(settings) >= 5
    assert settings <= ClusterConfig.model_fields.keys()
