"""`deepinfer bench streams`: very many streams at one gateway, most of them waiting.

One worker whose pool holds two requests. The first of them is measured: the times between its
tokens. The second runs beside it, and is read as fast as it comes, or not at all until the first
has ended. Meanwhile a crowd in processes of its own opens its streams and waits for blocks.

========================  ===================  ==========
phase                     the second request   the crowd
========================  ===================  ==========
alone                     is read              is absent
crowd                     is read              waits
crowd and slow reader     is not read          waits
========================  ===================  ==========

A phase is as it should be if every stream of the crowd was accepted and has ended well, and both
requests brought the same tokens as in every other phase.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from deepinfer.client import AsyncClient, Choice, Delta, Finished
from deepinfer.deploy.bench import streams_report
from deepinfer.deploy.bench.crowd import Footprint, Orders
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.bench.streams_report import (
    BLOCK_SIZE,
    PHASES,
    PROMPT_TOKENS,
    Load,
    Phase,
    Second,
)
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.generate import get_model
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from deepinfer.proto.bearer import bearer

if TYPE_CHECKING:
    SlowCall = grpc.aio.UnaryStreamCall[
        inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
    ]

CROWD_PROMPT_TOKENS, CROWD_TOKENS = 2, 1
"""What a request is does not matter while it waits; its turn should come soon then."""
SMALL_WINDOW = (
    # So few bytes are taken before they are asked for: the gateway soon cannot write any more.
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_http_proxy", 0),
)
WARM_UP_TOKENS = 64
SETTLE_S = 20.0
POLL_S = 0.1
REPORT_S = 2.0
"""Longer than a gateway takes to report what it has accepted."""


def run_streams(*, model: str, load: Load, output: Path, console: Console) -> bool:
    """Run all; write ``streams.json`` and ``.png``; True if every phase was as it should be."""
    check_plots()
    path = get_model(model, console=console)
    config = ClusterConfig(
        model=str(path),
        block_size=BLOCK_SIZE,
        max_cache=f"{load.blocks} blocks",
        cpu_offload=False,  # nobody makes room for the crowd
        reserve="full",
        max_live_requests=max(4096, 2 * load.streams),
        port=0,
    )
    done: list[Phase] = []
    with (
        counted(console, load.rounds * len(PHASES)) as steps,
        Cluster(config, say=steps.tell) as cluster,
    ):
        steps.tell("warming up")  # a cluster that has just started is still busy with that
        asyncio.run(measure_phase(cluster, replace(load, tokens=WARM_UP_TOKENS), "alone"))
        for _ in range(load.rounds):
            for name in PHASES:
                steps.tell(name)
                done.append(asyncio.run(measure_phase(cluster, load, name)))
                steps.advance()
    figures = streams_report.summary(load, done)
    command = (
        f"deepinfer bench streams --model {model} --streams {load.streams} "
        f"--processes {load.processes} --tokens {load.tokens} --rounds {load.rounds}"
    )
    write_result(output / "streams.json", command, figures)
    streams_report.plot(figures, done, output / "streams.png")
    console.print(streams_report.table(figures))
    return bool(figures["as_it_should_be"])


# ---- one phase -----------------------------------------------------------------------------


async def measure_phase(cluster: Cluster, load: Load, name: str) -> Phase:
    """Run one phase on a cluster that holds nothing, and wait until it holds nothing again.

    Raises:
        ConfigError: the measured request had ended before the crowd's streams were all open.
        DeepInferError: one of the two requests failed.
    """
    with_crowd, slow = PHASES[name]
    gateway = await asyncio.to_thread(cluster.pid, "gateway-0")
    before = Footprint.of(gateway)
    endpoints = list(cluster.endpoints)
    async with (
        AsyncClient(endpoints, token=cluster.token) as client,
        grpc.aio.insecure_channel(endpoints[0], options=SMALL_WINDOW) as channel,
    ):
        started, marks = asyncio.Event(), [0, 0]
        received = 0

        async def measured() -> Choice:
            nonlocal received
            stream = client.stream(
                [7] * PROMPT_TOKENS, max_tokens=load.tokens, temperature=0.0, ignore_eos=True
            )
            async for event in stream:
                if isinstance(event, Delta):
                    received += len(event.token_ids)
                    started.set()
                elif isinstance(event, Finished):
                    return event.choice
            raise AssertionError("a stream ends with Finished, or raises")

        call = _second_call(channel, cluster.token, load)
        second = None if slow else asyncio.create_task(_read(call))
        first = asyncio.create_task(measured())
        began = asyncio.create_task(started.wait())
        # A first request that fails must end the bench, not leave it waiting for a token.
        await asyncio.wait((first, began), return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        marks[0] = received
        crowd = [await _start(endpoints, cluster.token, n) for n in _shares(load, with_crowd)]
        try:
            opened = [json.loads(await _line(process)) for process in crowd]
            waiting = await _in_line(client, load.streams if with_crowd else 0)
            marks[1] = received
            with_all = Footprint.of(gateway)
            choice = await first
            got = await (second or _read(call))
            ended = [json.loads(await _line(process)) for process in crowd]
        finally:
            for process in crowd:
                if process.returncode is None:
                    process.kill()
                await process.wait()
        await _settled(client)
    intervals_ms = tuple(s * 1e3 for s in choice.timings.intervals_s)
    if marks[1] >= len(intervals_ms):
        raise ConfigError(
            f"tokens = {load.tokens}: they came before {load.streams} streams were open: ask for "
            "more tokens or fewer streams"
        )
    ends: dict[str, int] = {}
    for line in ended:
        for reason, count in line["ends"].items():
            ends[reason] = ends.get(reason, 0) + count
    return Phase(
        name=name,
        # Interval i lies between tokens i and i + 1.
        intervals_ms=intervals_ms[marks[1] :],
        opening_ms=intervals_ms[marks[0] : marks[1]] if with_crowd else (),
        token_ids=choice.token_ids,
        second=got,
        waiting=waiting,
        opening_s=max((line["opening_s"] for line in opened), default=0.0),
        ends=ends,
        before=before,
        with_all=with_all,
        after=Footprint.of(gateway),
        clients=tuple(
            (Footprint(**line["before"]), Footprint(**line["with_all"])) for line in opened
        ),
    )


def _second_call(channel: grpc.aio.Channel, token: str, load: Load) -> SlowCall:
    request = inference_pb2.GenerateRequest()
    request.tokenized.input_ids.extend([9] * PROMPT_TOKENS)
    sampling = request.sampling_params
    sampling.max_tokens, sampling.temperature, sampling.ignore_eos = load.second_tokens, 0.0, True
    sampling.logprobs = 20  # long messages
    stub = inference_pb2_grpc.InferenceStub(channel)
    call: SlowCall = stub.Generate(request, metadata=bearer(token))
    return call


async def _read(call: SlowCall) -> Second:
    ids: list[int] = []
    messages = 0
    async for response in call:
        messages += response.HasField("chunk")
        ids += response.chunk.token_ids
    return Second(token_ids=tuple(ids), messages=messages)


def _shares(load: Load, with_crowd: bool) -> list[int]:
    """Streams of each process."""
    if not with_crowd:
        return []
    share, rest = divmod(load.streams, load.processes)
    return [share + (i < rest) for i in range(load.processes)]


async def _start(endpoints: list[str], token: str, streams: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deepinfer.deploy.bench.crowd", stdin=PIPE, stdout=PIPE
    )
    orders = Orders(
        endpoints=tuple(endpoints),
        token=token,
        streams=streams,
        prompt_tokens=CROWD_PROMPT_TOKENS,
        max_tokens=CROWD_TOKENS,
    )
    assert process.stdin is not None, "it was asked for"
    process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
    await process.stdin.drain()
    return process


async def _line(process: Process) -> bytes:
    assert process.stdout is not None, "it was asked for"
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the crowd has ended with code {await process.wait()}")
    return line


async def _in_line(client: AsyncClient, expected: int) -> int:
    """Sequences that the controller has in line, once it has heard of as many as are expected."""
    for _ in range(round(REPORT_S / POLL_S)):
        waiting = int((await client.status())["waiting"])
        if waiting >= expected:
            break
        await asyncio.sleep(POLL_S)
    return waiting


async def _settled(client: AsyncClient) -> None:
    """Wait until nothing is held any more, or for ``SETTLE_S``."""
    for _ in range(round(SETTLE_S / POLL_S)):
        if not (await client.status())["sequences"]:
            return
        await asyncio.sleep(POLL_S)
