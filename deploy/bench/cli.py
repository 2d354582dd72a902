"""``deepinfer bench``: parses and prints; each experiment is a module beside this one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.deploy.console import out, plain_errors

bench = typer.Typer(no_args_is_help=True, help="Experiments; each writes JSON and a plot.")

MODEL_HELP = "Model folder, GGUF file, org/name of a hub, or demo."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Rounds = Annotated[int, typer.Option(min=1, max=1000)]
BenchDevice = Annotated[
    str, typer.Option(help="What workers and peers compute on: auto, cpu or cuda.")
]
PromptTokens = Annotated[
    int, typer.Option(min=1, help="Mean length of a prompt; they are of unlike length.")
]
AnswerTokens = Annotated[int, typer.Option(min=2, help="Tokens of every answer.")]
PromptText = Annotated[
    Path | None, typer.Option(help="UTF-8 file to make prompts of; default: ours.")
]


def result_folder(context: typer.Context, folder: Path) -> Path:
    """Make the folder, so that what cannot be written is told before it is measured."""
    if not context.resilient_parsing:  # of a command line that is being completed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise typer.BadParameter(f"{folder} cannot be written: {error}") from error
    return folder


Output = Annotated[
    Path, typer.Option(help="Folder for the JSON and the plot.", callback=result_folder)
]
RESULTS = Path("docs/results")


@bench.command("offload")
def bench_offload(
    model: Model = "demo",
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: all four.")
    ] = None,
    device: BenchDevice = "auto",
    rounds: Rounds = 5,
    output: Output = RESULTS,
) -> None:
    """Force one swap a round: a pool of exactly 3 blocks, two requests that need 3 each."""
    with plain_errors():
        from deepinfer.deploy.bench.hosts import find_host
        from deepinfer.deploy.bench.offload import run_offload

        ok = run_offload(
            model=model,
            dtypes=tuple(kv_cache_dtype or ("fp16", "int8", "fp8", "fp8_e5m2")),
            rounds=rounds,
            output=output,
            console=out,
            host=find_host(device, out.print),
        )
    raise typer.Exit(0 if ok else 1)


@bench.command("controller")
def bench_controller(
    output: Output = RESULTS,
) -> None:
    """The controller's core alone: events a second, and how the cost grows."""
    with plain_errors():
        from deepinfer.deploy.bench.controller import main as run_controller

        run_controller(output)


@bench.command("concurrency")
def bench_concurrency(
    model: Model = "demo",
    device: BenchDevice = "auto",
    levels: Annotated[str, typer.Option(help="Numbers of streams, by commas.")] = "1,2,4,8",
    prompt_tokens: PromptTokens = 64,
    max_tokens: AnswerTokens = 32,
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: fp16.")
    ] = None,
    rounds: Rounds = 3,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of everybody.")] = 1,
    peers: Annotated[bool, typer.Option(help="Measure transformers in the same run.")] = True,
    text: PromptText = None,
    output: Output = RESULTS,
) -> None:
    """Speed by the number of streams, beside the bare engine loop and transformers."""
    with plain_errors():
        from deepinfer.deploy.bench.concurrency import Load, parse_levels, run_concurrency
        from deepinfer.deploy.bench.hosts import find_host

        load = Load(
            levels=parse_levels(levels),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            rounds=rounds,
            threads=threads,
            kv_cache_dtypes=tuple(kv_cache_dtype or ("fp16",)),
            peers=peers,
            host=find_host(device, out.print),
        )
        run_concurrency(model=model, load=load, text=text, output=output, console=out)


@bench.command("jitter")
def bench_jitter(
    model: Model = "demo",
    device: BenchDevice = "auto",
    streams: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 8,
    prompt_tokens: PromptTokens = 64,
    max_tokens: AnswerTokens = 64,
    rounds: Rounds = 2,
    share: Annotated[
        float, typer.Option(help="The small pool, as a share of what all streams need at once.")
    ] = 0.55,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of the worker.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="The pools' dtype.")] = "fp16",
    text: PromptText = None,
    output: Output = RESULTS,
) -> None:
    """Times between tokens, without swaps and with them."""
    with plain_errors():
        from deepinfer.deploy.bench.hosts import find_host
        from deepinfer.deploy.bench.jitter import Load, run_jitter

        load = Load(
            streams=streams,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            rounds=rounds,
            share=share,
            threads=threads,
            kv_cache_dtype=kv_cache_dtype,
            host=find_host(device, out.print),
        )
        ok = run_jitter(model=model, load=load, text=text, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("handoff")
def bench_handoff(
    mb: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, max=4096, help="Payload in MB (10^6 bytes). May be repeated; default: four."
        ),
    ] = None,
    rounds: Rounds = 9,
    redis_server: Annotated[
        Path | None, typer.Option(help="Redis's server program; default: the one on PATH.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """KV through the store's two paths, beside memcpy, Ray's object store and Redis."""
    with plain_errors():
        from deepinfer.deploy.bench.handoff import SIZES_MB, run_handoff

        run_handoff(
            sizes_mb=tuple(mb or SIZES_MB),
            rounds=rounds,
            redis_server=redis_server,
            output=output,
            console=out,
        )


@bench.command("prefetch")
def bench_prefetch(
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65536, help="Of a payload. May be repeated; default: three."),
    ] = None,
    rounds: Rounds = 20,
    output: Output = RESULTS,
) -> None:
    """A swap-in's copy from another node's store, fetched ahead and not."""
    with plain_errors():
        from deepinfer.deploy.bench.prefetch import TOKENS, run_prefetch

        run_prefetch(tokens=tuple(tokens or TOKENS), rounds=rounds, output=output, console=out)


@bench.command("memory")
def bench_memory(
    model: Model = "demo",
    workers: Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")] = 2,
    output: Output = RESULTS,
) -> None:
    """Memory of every process of an idle cluster, after its start and after a short load."""
    with plain_errors():
        from deepinfer.deploy.bench.memory import run_memory

        run_memory(model=model, workers=workers, output=output, console=out)


@bench.command("streams")
def bench_streams(
    model: Model = "demo",
    streams: Annotated[int, typer.Option(min=1, max=100_000, help="How many wait.")] = 1_000,
    processes: Annotated[int, typer.Option(min=1, max=16, help="That open them.")] = 1,
    tokens: Annotated[
        int, typer.Option(min=16, max=100_000, help="Of the request that is measured.")
    ] = 144,
    rounds: Rounds = 2,
    output: Output = RESULTS,
) -> None:
    """Very many streams at one gateway: memory a stream, and whether they slow another one."""
    with plain_errors():
        from deepinfer.deploy.bench.streams import run_streams
        from deepinfer.deploy.bench.streams_report import Load

        load = Load(streams=streams, processes=processes, tokens=tokens, rounds=rounds)
        ok = run_streams(model=model, load=load, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("soak")
def bench_soak(
    model: Model = "demo",
    duration: Annotated[float, typer.Option(min=1, help="Seconds of load.")] = 7200.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    burst: Annotated[int, typer.Option(min=2, help="Requests at once and worker, at most.")] = 5,
    swaps_per_s: Annotated[
        float, typer.Option(min=0, help="Wait while there have been more; 0: never wait.")
    ] = 1.2,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Draws the requests and what becomes of them.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Hours of swaps, cancels and slow readers: is every answer right, and does nothing grow?"""
    with plain_errors():
        from deepinfer.deploy.bench.soak import Plan, run_soak

        plan = Plan(
            seconds=duration,
            workers=workers,
            burst=burst,
            swaps_per_s=swaps_per_s,
            every_s=every,
            seed=seed,
        )
        ok = run_soak(model=model, plan=plan, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("stops")
def bench_stops(
    model: Model = "demo",
    times: Annotated[int, typer.Option(min=1, max=10_000, help="Clusters to stop.")] = 100,
    rolling: Annotated[
        int, typer.Option(min=0, max=10_000, help="Of these restart everything first.")
    ] = 10,
    grace: Annotated[float, typer.Option(min=1, max=3600, help="Seconds of grace.")] = 20.0,
    streams: Annotated[int, typer.Option(min=1, max=1000, help="Clients of each.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each worker.")] = 16,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Clusters at a time.")] = 1,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no cluster is started.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the requests and the moments.")] = 0,
    output: Output = RESULTS,
) -> None:
    """SIGTERM and rolling restarts under load: does every request finish, and in time?"""
    with plain_errors():
        from deepinfer.deploy.bench.stops import Plan, run_stops

        plan = Plan(
            model=model,
            times=times,
            rolling=min(rolling, times),
            grace_s=grace,
            streams=streams,
            max_tokens=max_tokens,
            blocks=blocks,
            seed=seed,
        )
        ok = run_stops(plan, jobs=jobs, budget_s=budget, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("cancels")
def bench_cancels(
    model: Model = "demo",
    cancels: Annotated[int, typer.Option(min=1, help="That count.")] = 1000,
    seed: Annotated[int, typer.Option(help="Draws the requests and the moments.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Cancels in every state of a request: how soon is all that it held free?"""
    with plain_errors():
        from deepinfer.deploy.bench.cancels import run_cancels

        ok = run_cancels(model=model, cancels=cancels, seed=seed, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("corruption")
def bench_corruption(
    payloads: Annotated[int, typer.Option(min=1, max=10_000_000, help="To damage.")] = 100_000,
    processes: Annotated[int, typer.Option(min=1, max=256, help="That share them.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=1_000_000, help="Of the damage.")] = 0,
    model: Model = "demo",
    rounds: Annotated[
        int, typer.Option(min=0, max=10_000, help="Swaps of a cluster that are damaged as well.")
    ] = 20,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no payloads are begun.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Damaged, foreign and stale payloads between worker and store: is any ever used?"""
    with plain_errors():
        from deepinfer.deploy.bench.corruption import run_corruption

        ok = run_corruption(
            payloads=payloads,
            processes=processes,
            seed=seed,
            model=model,
            rounds=rounds,
            budget_s=budget,
            output=output,
            console=out,
        )
    raise typer.Exit(0 if ok else 1)


@bench.command("deterministic")
def bench_deterministic(
    model: Model = "demo",
    kv_cache_dtype: Annotated[str, typer.Option(help="KV dtype of the pools.")] = "fp16",
    device: BenchDevice = "auto",
    streams: Annotated[int, typer.Option(min=1, max=1_000_000, help="To compare.")] = 2000,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Different ones.")] = 500,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Clusters, one after another.")] = 4,
    kills: Annotated[int, typer.Option(min=0, max=10_000, help="Of workers, by SIGKILL.")] = 20,
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="That compute what requests answer alone.")
    ] = 1,
    speed_rounds: Annotated[
        int, typer.Option(min=0, max=100, help="To measure speed in; 0: not measured.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of requests, their order, and kills.")] = 0,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no stream begins.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Streams over swaps, moves and kills beside each request alone; what the mode costs."""
    with plain_errors():
        from deepinfer.deploy.bench.deterministic import Plan, run_deterministic
        from deepinfer.deploy.bench.hosts import find_host

        ok = run_deterministic(
            model=model,
            kv_cache_dtype=kv_cache_dtype,
            plan=Plan(
                streams=streams,
                requests=requests,
                workers=workers,
                rounds=rounds,
                kills=kills,
                processes=processes,
                speed_rounds=speed_rounds,
                seed=seed,
                budget_s=budget,
            ),
            output=output,
            console=out,
            host=find_host(device, out.print),
        )
    raise typer.Exit(0 if ok else 1)


@bench.command("overload")
def bench_overload(
    model: Model = "demo",
    duration: Annotated[float, typer.Option(min=5, help="Seconds of the overload.")] = 300.0,
    factor: Annotated[
        float, typer.Option(min=1, help="Times the requests a second that are served at best.")
    ] = 10.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    processes: Annotated[int, typer.Option(min=1, max=32, help="That send requests.")] = 2,
    levels: Annotated[
        str, typer.Option(help="Requests at once and worker, by commas; the best is taken.")
    ] = "8,16,32,64",
    max_live_requests: Annotated[int, typer.Option(min=1, help="At the gateway.")] = 1024,
    seed: Annotated[int, typer.Option(help="Draws the requests and their times.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Ten times the load that a cluster can bear: speed, refusals, memory."""
    with plain_errors():
        from deepinfer.deploy.bench.concurrency import parse_levels
        from deepinfer.deploy.bench.overload import Plan, run_overload

        plan = Plan(
            seconds=duration,
            factor=factor,
            workers=workers,
            processes=processes,
            levels=parse_levels(levels),
            max_live_requests=max_live_requests,
            seed=seed,
        )
        ok = run_overload(model=model, plan=plan, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("quality")
def bench_quality(
    model: Model = "demo",
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: all five.")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Pieces of the text that are scored.")] = 8,
    window_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 512,
    answers: Annotated[int, typer.Option(min=2, help="Greedy answers, one a window.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a window that an answer goes on from.")
    ] = 64,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file to score; default: Shakespeare's sonnets.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Perplexity, divergence and greedy agreement of each KV dtype beside float32."""
    with plain_errors():
        from deepinfer.deploy.bench.quality import DTYPES, Plan, run_quality

        plan = Plan(
            dtypes=tuple(kv_cache_dtype or DTYPES),
            windows=windows,
            window_tokens=window_tokens,
            answers=answers,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            threads=threads,
        )
        run_quality(model=model, plan=plan, text=text, output=output, console=out)


@bench.command("precision")
def bench_precision(
    model: Model = "demo",
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: all five.")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Pieces of the text that are scored.")] = 8,
    window_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 256,
    answers: Annotated[int, typer.Option(min=2, help="Greedy answers, one a window.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a window that an answer goes on from.")
    ] = 64,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Draws the levels of mixed mode.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file to score; default: Shakespeare's sonnets.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """What nested, mixed, 4-bit and plain FP8 weights cost with each KV dtype; each layer alone."""
    with plain_errors():
        from deepinfer.deploy.bench.precision import run_precision
        from deepinfer.deploy.bench.quality import DTYPES, Plan

        plan = Plan(
            dtypes=tuple(kv_cache_dtype or DTYPES),
            windows=windows,
            window_tokens=window_tokens,
            answers=answers,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            threads=threads,
        )
        run_precision(model=model, plan=plan, seed=seed, text=text, output=output, console=out)


@bench.command("trace")
def bench_trace(
    trace: Annotated[
        Path, typer.Option(help="An Azure LLM inference CSV, or Mooncake's JSON lines.")
    ],
    where: Annotated[
        str,
        typer.Option(
            help="simulate: the production cores, steps as long as --costs says; cpu: a cluster "
            "here; card: one worker on this machine's card, random weights."
        ),
    ] = "simulate",
    rates: Annotated[
        str | None,
        typer.Option(
            help="Requests/s and worker, by commas; default: shares of what FP16 can serve."
        ),
    ] = None,
    policies: Annotated[str, typer.Option(help="By commas.")] = "fp16,fp8,threshold,slo",
    seeds: Annotated[int, typer.Option(help="Parts of the trace that are replayed.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The first of these.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long requests come.")] = 10.0,
    max_context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt and its answer: longer traces are scaled down. Default: "
            "32768, on the CPU 512."
        ),
    ] = None,
    alone: Annotated[
        int, typer.Option(help="Requests served one at a time, for the targets.")
    ] = 24,
    workers: Annotated[int, typer.Option(help="Of the simulated cluster.")] = 1,
    costs: Annotated[
        Path | None,
        typer.Option(help="JSON with the times of simulated steps; default: an H200's."),
    ] = None,
    text: PromptText = None,
    model: Model = "demo",
    shape: Annotated[str, typer.Option(help="On a card: qwen2.5-3b or smollm2.")] = "qwen2.5-3b",
    output: Output = RESULTS,
) -> None:
    """Recorded arrivals against each precision policy: TTFT, TPOT and how many hold targets."""
    with plain_errors():
        from deepinfer.deploy.bench.trace import Plan, parse_rates, run_trace

        plan = Plan(
            trace=trace,
            where=where,
            rates=parse_rates(rates),
            policies=tuple(policies.split(",")),
            seeds=seeds,
            first_seed=first_seed,
            seconds=seconds,
            max_context=max_context,
            alone=alone,
            workers=workers,
            costs=costs,
            text=text,
            model=model,
            shape=shape,
        )
        ok = run_trace(plan, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("kernel-resources")
def bench_kernel_resources(
    output: Output = RESULTS,
) -> None:
    """Registers, shared memory and occupancy of every GPU kernel; needs CuPy, but no GPU."""
    with plain_errors():
        from deepinfer.deploy.bench.kernel_resources import run_kernel_resources

        ok = run_kernel_resources(output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@bench.command("kernels")
def bench_kernels(
    shape: Annotated[str, typer.Option(help="qwen2.5-3b or smollm2.")] = "qwen2.5-3b",
    part: Annotated[
        str,
        typer.Option(
            help="By commas: decode, prefill, linear, pointwise, model, nested-model, swap, "
            "transformers, projection."
        ),
    ] = "decode,prefill,linear,pointwise,model,nested-model,swap,transformers,projection",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="By commas.")
    ] = "fp16,int8,fp8,fp8_e5m2,k16v8",
    weights: Annotated[str, typer.Option(help="Of the model part, by commas.")] = "fp16,w4a16",
    batches: Annotated[str, typer.Option(help="Sequences, by commas.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Of attention, by commas.")] = "512,2048,8192",
    model_contexts: Annotated[
        str, typer.Option(help="Of the model part, by commas.")
    ] = "512,1024,2048,8192",
    peers: Annotated[bool, typer.Option(help="Measure others in the same run.")] = True,
    peer_seconds: Annotated[
        float, typer.Option(min=0, help="What others' compilations may take.")
    ] = 120.0,
    switches: Annotated[
        int, typer.Option(min=1, help="Of a nested model's level of precision.")
    ] = 10_000,
    redraw: Annotated[bool, typer.Option(help="Only draw again from the JSON.")] = False,
    output: Output = RESULTS,
) -> None:
    """Kernels and whole steps on a GPU, random weights, beside cuBLAS, SDPA and FlashInfer."""
    with plain_errors():
        from deepinfer.deploy.bench.concurrency import parse_levels
        from deepinfer.deploy.bench.kernels import Plan, draw, run_kernels

        if redraw:
            draw(output, out)
            return
        plan = Plan(
            shape=shape,
            parts=tuple(part.split(",")),
            kv_dtypes=tuple(kv_cache_dtype.split(",")),
            weights=tuple(weights.split(",")),
            batches=parse_levels(batches, "batches"),
            contexts=parse_levels(contexts, "contexts"),
            model_contexts=parse_levels(model_contexts, "model_contexts"),
            peers=peers,
            peer_seconds=peer_seconds,
            switches=switches,
        )
        ok = run_kernels(plan, output=output, console=out)
    raise typer.Exit(0 if ok else 1)
