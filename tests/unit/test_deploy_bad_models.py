"""What `deepinfer up` and `deepinfer model get` say about a model that cannot be served.

One line that names the file, the field and its value, exit code 1, and nothing was started.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deepinfer.deploy.cli import app
from deepinfer.deploy.models import check_model
from deepinfer.deploy.rays import OwnRay
from support.tiny_model import write_tiny_llama

Damage = Callable[[Path], object]


def edit_config(**changes: object) -> Damage:
    def edit(folder: Path) -> None:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


def edit_weights(change: Callable[[dict[str, Any]], object]) -> Damage:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def foreign_tokenizer(folder: Path) -> None:
    edit_config(vocab_size=200)(folder)
    edit_weights(
        lambda tensors: tensors.update(
            {name: tensors[name][:200] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        )
    )(folder)


def cut_in_half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


CASES: dict[str, tuple[Damage, str]] = {
    "empty": (emptied, "holds neither config.json nor exactly one GGUF file (0 found)"),
    "architecture": (
        edit_config(architectures=["BertModel"]),
        "config.json: architecture 'BertModel' is not supported; known: LlamaForCausalLM, Mistral",
    ),
    "missing key": (edit_config(hidden_size=None), "config.json: hidden_size is missing"),
    "absurd value": (
        edit_config(num_hidden_layers=10**9),
        "config.json: layers must be a whole number from 1 to 4096, got 1000000000",
    ),
    "no JSON": (write("config.json", b"{"), "config.json: it is not JSON"),
    "no UTF-8": (write("config.json", b'{"a": "\xff"}'), "config.json is not UTF-8"),
    "huge header": (
        write("model.safetensors", struct.pack("<Q", 1 << 30) + b"{}"),
        "model.safetensors: header claims 1073741824 bytes, the limit is 100000000",
    ),
    "header beyond the file": (
        write("model.safetensors", struct.pack("<Q", 1000) + b"{}"),
        "model.safetensors: truncated: header claims 1000 bytes, the file has 10",
    ),
    "cut in half": (cut_in_half, "truncated: ends at byte"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "missing shard": (missing_shard, "names model-00002-of-00002.safetensors, which is missing"),
    "missing tensor": (
        edit_weights(lambda tensors: tensors.pop("model.norm.weight")),
        "missing tensors: model.norm.weight",
    ),
    "wrong shape": (
        edit_weights(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 259)})),
        "tensor lm_head.weight has shape [64, 259], config asks for [259, 64]",
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "holds no tokenizer (no tokenizer.json)",
    ),
    "damaged tokenizer": (write("tokenizer.json", b"\xff\xfe"), "tokenizer.json: not UTF-8"),
    "foreign tokenizer": (foreign_tokenizer, "its tokenizer has ids up to 258, the model only up"),
    "damaged template": (
        write("chat_template.jinja", b"\xff"), "chat_template.jinja: not UTF-8",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Ray was started for a model that cannot be served")

    monkeypatch.setattr(OwnRay, "start", start)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def said(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    error = result.stderr.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    return error


def assert_refused(model: Path | str, words: str) -> None:
    assert words in said(["model", "get", str(model)])
    assert words in said(["up", "--port", "0", "--model", str(model)])


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_served(case: str, tmp_path: Path) -> None:
    damage, words = CASES[case]
    folder = write_tiny_llama(tmp_path / "m")
    damage(folder)
    assert_refused(folder, words)


def test_a_padding_token_that_the_model_lacks_is_no_obstacle(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    file = folder / "tokenizer_config.json"
    added = {"added_tokens_decoder": {"259": {"content": "<pad>", "special": True}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    result = CliRunner().invoke(app, ["model", "get", str(folder)])
    assert (result.exit_code, result.stdout) == (0, f"{folder}\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    assert_refused(folder, "its tokenizer has ids up to 259, the model only up to 258")


def test_heads_that_no_padding_suits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which they are depends on the processor: here one that suits none of 16 elements."""
    folder = write_tiny_llama(tmp_path / "m")
    threads = torch.get_num_threads()

    def independent(kernel: object, width: int, multiple: int, factors: object) -> bool:
        return width != 16

    monkeypatch.setattr("deepinfer.workers.backends.cpu.rows_are_independent", independent)
    assert_refused(folder, f"model {str(folder)!r}: head_dim = 16: batching would change answers")
    assert "scores of head_dim 16 and 96 keys; multiples of 8 are known to do" in said(
        ["up", "--port", "0", "--model", str(folder), "--block-size", "48"]
    )
    assert torch.get_num_threads() == threads
    assert check_model(folder, threads=None).head_dim == 16, "no matter of other devices"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF file"),
        (b"plain text, and no model at all", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQ", 3, 1), "m.gguf: too short for a GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1 << 40), "truncated: 1099511627776 bytes"),
    ],
)
def test_a_file_that_is_no_model(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert_refused(tmp_path / "m.gguf", words)


def test_names_of_nothing(tmp_path: Path) -> None:
    assert_refused("dmeo", "no such file or folder, nor a known name (demo, smollm2-135m-instruct)")
    assert_refused(tmp_path / "nowhere", "no such file or folder")
    assert_refused("org/name", "org/name is not in the cache, or not whole, and HF_HUB_OFFLINE")
    assert_refused("a\0b", "model 'a\\x00b': no such file or folder")
