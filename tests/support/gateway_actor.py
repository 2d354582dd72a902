"""What a ``GatewayActor`` needs beside it, without Ray: settings, a controller, a worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from deepinfer.gateway.actor import ControllerAccess, GatewaySettings
from deepinfer.proto import control_pb2_grpc
from deepinfer.text.load import load_tokenizer
from support.byte_tokenizer import EOS, VOCAB_SIZE
from support.gateway_world import (
    CLUSTER_TOKEN,
    SECRET,
    TOKEN,
    MinimalController,
    ScriptedWorker,
)


def gateway_settings(folder: Path, **changes: Any) -> GatewaySettings:
    """Settings of a gateway that serves the byte tokenizer in ``folder``."""
    settings = GatewaySettings(
        gateway="gateway-0",
        model="bytes",
        model_path=str(folder),
        max_context_tokens=512,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        kv_cache_dtype="fp16",
        token=TOKEN,
        cluster_token=CLUSTER_TOKEN,
        secret=SECRET,
    )
    return replace(settings, **changes)


@contextlib.asynccontextmanager
async def served_controller() -> AsyncIterator[tuple[MinimalController, ControllerAccess]]:
    """A controller on a port of its own, and how an actor gets at it."""
    controller = MinimalController()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    control_pb2_grpc.add_ControlServicer_to_server(controller, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def find() -> str:
        return address

    async def status() -> Mapping[str, object]:
        return {"swapped": 0}

    try:
        yield controller, ControllerAccess(find=find, status=status)
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def serving_worker(
    controller: MinimalController, link: str, folder: Path, answer: str
) -> AsyncIterator[ScriptedWorker]:
    """A worker that keeps a link to ``link`` and gets what the controller places."""
    worker = ScriptedWorker("w", link, load_tokenizer(folder), answer)
    controller.workers.append(worker)
    serving = asyncio.create_task(worker.serve())
    try:
        yield worker
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
