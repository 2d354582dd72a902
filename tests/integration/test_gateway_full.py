"""A gateway that is full refuses before it has read what it is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deepinfer.client import Accepted, ResourceExhausted
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.service import InferenceService
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import World, run_in_world


def test_what_cannot_be_kept_is_not_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    record = InferenceService._record

    async def counted(self: InferenceService, *rest: object) -> object:
        read.append("one")
        return await record(self, *rest)  # type: ignore[arg-type]

    async def test(world: World) -> None:
        async with world.client() as client:
            kept = client.stream("hi", max_tokens=400)
            assert isinstance(await anext(kept), Accepted)
            with pytest.raises(ResourceExhausted, match="1 live requests, max_live_requests = 1"):
                await client.generate("a text that nobody reads", max_tokens=4)
            assert read == ["one"]
            shell = world.gateway.shell
            assert shell is not None
            name = 'deepinfer_requests_refused_total{reason="max_live_requests"}'
            assert shell.metrics()[name] == 1
            kept.abort()

    monkeypatch.setattr(InferenceService, "_record", counted)
    write_byte_tokenizer(tmp_path)
    with asyncio.Runner() as runner:
        config = GatewayConfig(max_live_requests=1)
        run_in_world(runner, tmp_path, test, answer="so it goes " * 40, config=config)
