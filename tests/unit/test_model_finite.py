"""NaN and infinities in a checkpoint are refused by name before anything is served from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model import finite
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.finite import check_rows, finite_read
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.weights import CheckpointError
from support.tiny_model import write_tiny_llama

LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("model.embed_tokens.weight", (200, 3), float("nan")),
        ("lm_head.weight", (7, 63), float("inf")),
        ("model.norm.weight", (5,), float("-inf")),
        (f"{LAYER}.self_attn.k_proj.weight", (1, 2), float("nan")),
        (f"{LAYER}.mlp.down_proj.weight", (63, 127), float("inf")),
        (f"{LAYER}.input_layernorm.weight", (0,), float("nan")),
    ],
)
def test_a_plain_checkpoint_is_refused_on_the_cpu(
    name: str, place: tuple[int, ...], value: float, tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[name][place] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as refused:
        Decoder(load_model(tmp_path), CpuBackend())
    assert (
        str(refused.value) == f"tensor {name}: {list(place)} = {value:g}: must be a finite number"
    )


def test_a_good_one_is_not(tmp_path: Path) -> None:
    Decoder(load_model(write_tiny_llama(tmp_path)), CpuBackend())


def test_large_tensors_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_AT_ONCE", 8)
    matrix = torch.zeros(9, 3)
    tensors = {"m": matrix, "v": torch.zeros(30), "s": torch.tensor(1.0), "e": torch.zeros(0, 4)}
    read = finite_read(tensors.__getitem__)
    assert all(read(name) is tensor for name, tensor in tensors.items())
    check_rows("m", lambda numbers: matrix[numbers], (9, 3))
    matrix[8, 1] = torch.nan
    for look in (lambda: read("m"), lambda: check_rows("m", lambda n: matrix[n], (9, 3))):
        with pytest.raises(CheckpointError, match=r"tensor m: \[8, 1\] = nan"):
            look()
    tensors["v"][29] = torch.inf
    with pytest.raises(CheckpointError, match=r"tensor v: \[29\] = inf"):
        read("v")
    tensors["s"].fill_(torch.nan)
    with pytest.raises(CheckpointError, match=r"tensor s: \[\] = nan"):
        read("s")
