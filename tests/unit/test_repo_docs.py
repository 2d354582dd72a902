"""The documents say what the code says: messages, sizes, settings, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer.deploy.config import ClusterConfig
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from support.docs_blocks import ROOT, documents

PACKAGES = (
    "client",
    "controller",
    "deploy",
    "gateway",
    "kernels",
    "kvstore",
    "proto",
    "text",
    "workers",
)
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.M)
FRAGMENT_MIN = 6


def _source() -> str:
    """All of the code, with strings that go on in the next line in one piece."""
    files = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_each_message_that_is_explained_exists() -> None:
    source = _source()
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = MESSAGE.findall(text)
    assert len(messages) > 25
    unknown = [
        f"{message}: {fragment!r}"
        for message in messages
        for fragment in message.removeprefix("warning: ").split("…")
        if len(fragment.strip()) >= FRAGMENT_MIN and fragment.strip() not in source
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("model", "layers", "kv_heads", "head_dim"),
    [(0, 30, 3, 64), (1, 28, 8, 128), (2, 36, 2, 128)],
    ids=["SmolLM2-135M", "Llama-3.2-3B", "Qwen2.5-3B"],
)
def test_the_block_sizes_are_right(model: int, layers: int, kv_heads: int, head_dim: int) -> None:
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)`[^|]*\| [^|]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.M
    )
    assert [row[0] for row in rows] == ["fp16", "k16v8", "int8", "fp8"]
    for name, *sizes in rows:
        layout = KvLayout(resolve_kv_dtype(name), layers, kv_heads, head_dim, 16)
        assert int(sizes[model].replace(",", "")) == layout.block_bytes, name


def test_the_worked_examples_are_right() -> None:
    text = " ".join((ROOT / "docs" / "sizing.md").read_text(encoding="utf-8").split())
    fp16, int8 = (KvLayout(resolve_kv_dtype(n), 28, 8, 128, 16) for n in ("fp16", "int8"))
    for layout in (fp16, int8):
        blocks = 2**30 // layout.block_bytes
        assert f"{blocks:,}" in text
        assert f"({blocks * 16:,} tokens)" in text
    assert fp16.blocks_for(1500) == 94
    assert (585 // 94, 1152 // 94) == (6, 12)
    assert f"{round(20 * 94 * int8.block_bytes / 2**20):,} MiB at most" in text
    small = KvLayout(resolve_kv_dtype("fp16"), 30, 3, 64, 16)
    assert 16 * 64 * small.block_bytes == 360 * 2**20
    assert f"holds {512 * 2**20 // small.block_bytes:,} FP16 blocks" in text


def test_settings_that_are_named_exist() -> None:
    """`--flag` and `key` in the documents for operators."""
    names = [name.replace("_", "-") for name in ClusterConfig.model_fields]
    flags = {prefix + name for name in names for prefix in ("--", "--no-")}
    others = {"--config", "--endpoint", "--json", "--once", "--interval", "--events"}
    others |= {"--connect-timeout", "--install-completion", "--show-completion", "--down"}
    others |= {"--all"}
    others |= {"--index-url"}  # pip's
    others |= {"--budget", "--jobs", "--output", "--pause", "--point"}  # deepinfer chaos
    for name in ("operating.md", "sizing.md", "troubleshooting.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        named = set(re.findall(r"`(--[a-z-]+)", text))
        assert named - flags - others == set(), name


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text):
        if "://" not in link:
            assert (document.parent / link).exists(), link
