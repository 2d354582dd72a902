"""What the launcher tells each process, seen without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.deploy.actors import Actors, Served
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.models import check_model
from deepinfer.deploy.nodes import HERE
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.model.decoder import kv_layout
from support.tiny_model import write_tiny_llama


@pytest.mark.parametrize(("asked", "named"), [("auto", "fp16"), ("e4m3", "fp8"), ("int8", "int8")])
def test_clients_and_metrics_are_told_what_the_dtype_comes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, named: str
) -> None:
    told: dict[str, Any] = {}

    def note(self: Actors, name: str, *about: object, **_: object) -> None:
        told[name] = about[2]  # after the node and the class

    monkeypatch.setattr(Actors, "_actor", note)
    path = write_tiny_llama(tmp_path)
    config = ClusterConfig(model=str(path), kv_cache_dtype=asked, port=0)
    checked = check_model(path)
    layout = kv_layout(checked, resolve_kv_dtype(asked), config.block_size)
    Actors(config, HERE, "token").create(
        Served(path=path, config=checked, layout=layout, blocks=8), {}
    )
    assert told["gateway-0"].kv_cache_dtype == named
    assert told["controller"].kv_cache_dtype == named
    assert told["worker-0"].config.block_bytes == layout.block_bytes
