"""The ``deepinfer`` command. Parses and prints; the work is in the modules it calls.

Imports of heavy modules stay inside the commands, so that ``deepinfer --help`` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.deploy.bench.cli import MODEL_HELP, RESULTS, bench, result_folder
from deepinfer.deploy.chaos.cli import chaos
from deepinfer.deploy.console import err, out, plain_errors, standard_input
from deepinfer.deploy.fuzz.cli import fuzz
from deepinfer.deploy.interrupts import ending, exit_code, stop_signals
from deepinfer.deploy.operate_cli import drain, restart
from deepinfer.deploy.sampling import Sampling, sampling_options
from deepinfer.deploy.sim.cli import simulate

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Serve language models on cards with too little memory.",
)
model = typer.Typer(no_args_is_help=True, help="Get models.")
app.add_typer(bench, name="bench")
app.add_typer(model, name="model")
app.command()(drain)
app.command()(restart)
app.command()(chaos)
app.command()(fuzz)
app.command()(simulate)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the bearer token.")]
ConnectTimeout = Annotated[
    float,
    typer.Option(min=0.1, max=86_400, help="Seconds to try for until a gateway has answered."),
]
CONNECT_TIMEOUT_S = 15.0
KV_DTYPES = ("auto", "fp16", "int8", "fp8", "fp8_e5m2", "k16v8")


def one_of(*values: str) -> Callable[[str], list[str]]:
    """What a shell completes an option's value from."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def result_file(context: typer.Context, path: Path | None) -> Path | None:
    """See that the file's folder can be written, before anything is measured."""
    if path is not None:
        result_folder(context, path.parent)
    return path


def endpoints_here(incomplete: str) -> list[str]:
    """The gateways of the clusters that run here, for completion."""
    from deepinfer.deploy.running import alive

    return [e for cluster in alive() for e in cluster.endpoints if e.startswith(incomplete)]


Endpoint = Annotated[
    str | None,
    typer.Option(
        help="host:port of a gateway; default: the cluster running here.",
        autocompletion=endpoints_here,
    ),
]


@app.command()
def up(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes on each node.")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateway processes.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu or cuda.", autocompletion=one_of("auto", "cpu", "cuda")),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="auto, fp16, int8, fp8, fp8_e5m2 or k16v8.",
            autocompletion=one_of(*KV_DTYPES),
        ),
    ] = None,
    kv_quality: Annotated[
        str | None,
        typer.Option(
            help="strict, warn or off: what if the KV dtype costs the model too much.",
            autocompletion=one_of("strict", "warn", "off"),
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="auto or nested: FP16 and FP8 from one copy.",
            autocompletion=one_of("auto", "nested"),
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp16, fp8, threshold or slo: who decides when nested weights are read in FP8.",
            autocompletion=one_of("fp16", "fp8", "threshold", "slo"),
        ),
    ] = None,
    precision_threshold_tokens: Annotated[
        int | None, typer.Option(help="threshold: FP8 in steps of more tokens.")
    ] = None,
    ttft_target_ms: Annotated[
        float | None, typer.Option(help="slo: time to the first token.")
    ] = None,
    tpot_target_ms: Annotated[
        float | None, typer.Option(help="slo: mean time of each token after it.")
    ] = None,
    precision_dwell_ms: Annotated[
        int | None, typer.Option(help="slo: the level stays at least so long.")
    ] = None,
    precision_levels: Annotated[
        int | None, typer.Option(help="Levels of nested weights from FP16 to FP8, 2 to 6.")
    ] = None,
    fp8_products: Annotated[
        str | None,
        typer.Option(
            help="w8a16 or w8a8: activations of large FP8 steps are in FP8 too.",
            autocompletion=one_of("w8a16", "w8a8"),
        ),
    ] = None,
    shed: Annotated[
        bool | None,
        typer.Option("--shed/--no-shed", help="Lower planes of nested weights make way for KV."),
    ] = None,
    shed_head: Annotated[
        bool | None,
        typer.Option("--shed-head/--no-shed-head", help="Those of the LM head too."),
    ] = None,
    start_shed: Annotated[
        bool | None,
        typer.Option("--start-shed/--no-start-shed", help="Never load lower planes: all FP8."),
    ] = None,
    shed_exact_wait_ms: Annotated[
        int | None,
        typer.Option(help="Longest that an exact request waits for lower planes to return."),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="A request's tokens depend on the request alone.",
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None,
    max_cache: Annotated[
        str | None, typer.Option(help='KV pool of a worker: "512MiB", "3 blocks" or auto.')
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a card that its workers fill.")
    ] = None,
    gpu_probe: Annotated[
        bool | None,
        typer.Option("--gpu-probe/--no-gpu-probe", help="Measure a GPU worker's bus."),
    ] = None,
    prefill_chunk_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens of one request in one step, at most.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step, at most.")
    ] = None,
    cpu_offload: Annotated[
        bool | None,
        typer.Option("--cpu-offload/--no-cpu-offload", help="Swap KV to the store."),
    ] = None,
    max_cpu_offload_mb: Annotated[
        int | None, typer.Option(help="The store's budget in MiB; 0 refuses every swap.")
    ] = None,
    max_swapped_requests: Annotated[
        int | None, typer.Option(help="Requests swapped out at a time, at most.")
    ] = None,
    prefetch_mb: Annotated[
        int | None,
        typer.Option(help="Longest payload in MiB fetched ahead from another node; 0: none."),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Share equal prompt prefixes."),
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="growth or full.", autocompletion=one_of("growth", "full"))
    ] = None,
    victim_policy: Annotated[
        str | None,
        typer.Option(
            help="lru, youngest or cost.", autocompletion=one_of("lru", "youngest", "cost")
        ),
    ] = None,
    min_residency: Annotated[
        int | None, typer.Option(help="Tokens a resumed request makes before it may go again.")
    ] = None,
    store_path: Annotated[
        str | None,
        typer.Option(help="auto, memfd or grpc.", autocompletion=one_of("auto", "memfd", "grpc")),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads of a CPU worker.")] = None,
    max_live_requests: Annotated[
        int | None, typer.Option(help="Requests a gateway holds at a time, at most.")
    ] = None,
    orphan_grace: Annotated[
        float | None, typer.Option(help="Seconds a request outlives its client's stream.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request may take in all.")
    ] = None,
    step_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a worker whose step has not ended gives up."),
    ] = None,
    unread_timeout: Annotated[
        float | None, typer.Option(help="Seconds until the stream of an idle reader is ended.")
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(help="Seconds that running requests may take to finish at a stop."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address the gateways listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="First gateway's port.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics; default: --port + 10; 0: no metrics.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="File with the bearer token; made if missing.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="PEM certificate of the gateways; turns TLS on.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="Roots of the client certificates to ask for (mTLS).")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            help="debug, info, warning or error.",
            autocompletion=one_of("debug", "info", "warning", "error"),
        ),
    ] = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C or `deepinfer down`."""
    flags = {k: v for k, v in locals().items() if k != "config"}
    with plain_errors():
        from deepinfer.deploy.config import load_config
        from deepinfer.deploy.launch import serve

        serve(load_config(config, flags), console=out)


@app.command()
def down(
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="host:port it was started with; default: the only one.",
            autocompletion=endpoints_here,
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="Seconds that running requests may take to finish; default: what `up` was told.",
        ),
    ] = None,
) -> None:
    """Stop the cluster that `deepinfer up` started here, once its requests have finished."""
    with plain_errors():
        from deepinfer.deploy.launch import stop_running

        stop_running(endpoint, grace)
        out.print("stopped")


@app.command()
def status(
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole document, as JSON.")] = False,
) -> None:
    """Show the pools, the requests and their states, and the swap budget."""
    with plain_errors():
        from deepinfer.deploy.launch import connect
        from deepinfer.deploy.status import render_status

        with connect(endpoint, token_file) as client:
            document = client.status()
        if as_json:
            sys.stdout.write(json.dumps(document, indent=2, sort_keys=True) + "\n")
        else:
            out.print(render_status(document))


@app.command()
@sampling_options()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - for standard input.")],
    *,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
    sampling: Sampling,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which it ends with what there is.")
    ] = None,
    n: Annotated[int, typer.Option(help="Answers; above 1 only with --json.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Log-probabilities, with so many likeliest tokens; only with --json."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same of the prompt's tokens; only with --json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The finished answer and its figures, as JSON.")
    ] = False,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    connect_timeout: ConnectTimeout = CONNECT_TIMEOUT_S,
) -> None:
    """Stream one answer to standard output."""
    only_json = {
        "--n": n != 1,
        "--logprobs": logprobs is not None,
        "--prompt-logprobs": prompt_logprobs is not None,
    }
    if not as_json and (named := [flag for flag, used in only_json.items() if used]):
        raise typer.BadParameter(f"{', '.join(named)}: only with --json, which has room for it")
    with plain_errors():
        from deepinfer.deploy.generate import generate_json, stream_one
        from deepinfer.deploy.launch import connect

        text = standard_input().read() if prompt == "-" else prompt
        options = sampling.options() | {
            "deadline_s": deadline,
            "n": n,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
        run = generate_json if as_json else stream_one
        with connect(endpoint, token_file, connect_timeout_s=connect_timeout) as client:
            run(client, text, options, chat=chat, err=err)


@app.command()
@sampling_options(max_tokens=512, temperature=0.7, top_p=0.95)
def chat(
    *,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    sampling: Sampling,
    events: Annotated[bool, typer.Option(help="Tell of swaps while they happen.")] = False,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    connect_timeout: ConnectTimeout = CONNECT_TIMEOUT_S,
) -> None:
    """Talk with the model; /help lists what else can be typed. A pipe has one turn a line."""
    with plain_errors():
        from deepinfer.deploy.chat import Chat, chat_lines
        from deepinfer.deploy.launch import connect

        with connect(endpoint, token_file, connect_timeout_s=connect_timeout) as client:
            talk = Chat(client, sampling.options(), out, err, system=system, events=events)
            talk.run(chat_lines(err))
    # At a terminal the user has seen the error; a script sees the code.
    raise typer.Exit(1 if talk.failed and not sys.stdin.isatty() else 0)


@app.command()
def top(
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option(help="Look twice, an interval apart, print that and end.")
    ] = False,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
) -> None:
    """Watch pools, stores, requests and swaps; q or Ctrl-C ends it."""
    with plain_errors():
        from deepinfer.deploy.launch import connect
        from deepinfer.deploy.top import run_top

        with connect(endpoint, token_file) as client:
            run_top(client, interval_s=interval, once=once, console=out)


@app.command()
def demo(
    requests: Annotated[int, typer.Option(min=2, max=32, help="Chats sent at once.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=8, max=512, help="Tokens an answer.")] = 64,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV dtype of the pools.", autocompletion=one_of(*KV_DTYPES))
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or auto.", autocompletion=one_of("cpu", "cuda", "auto"))
    ] = "cpu",
    deterministic: Annotated[
        bool, typer.Option(help="Tokens depend on the request alone, on a card too.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Also write the table as JSON to this file.", callback=result_file),
    ] = None,
) -> None:
    """Local cluster, real model, pools too small on purpose: watch requests swap out and back."""
    with plain_errors():
        from deepinfer.deploy.demo import run_demo

        ok = run_demo(
            requests=requests,
            max_tokens=max_tokens,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            deterministic=deterministic,
            output=output,
            console=out,
        )
    raise typer.Exit(0 if ok else 1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP, show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")],
    weights: Annotated[
        str,
        typer.Option(
            help="w4a16 (4 bits) or nested (FP16 whose upper halves are FP8).",
            autocompletion=one_of("w4a16", "nested"),
        ),
    ] = "w4a16",
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Of w4a16: weights a scale: 32, 64 or 128; default: the most that fits.",
            autocompletion=one_of("32", "64", "128"),
        ),
    ] = None,
    row_scaling: Annotated[
        bool,
        typer.Option(
            "--row-scaling/--no-row-scaling",
            help="Of nested: shift rows with weights above 1.75, or leave their layer in FP16.",
        ),
    ] = True,
    measure_order: Annotated[
        bool, typer.Option(help="Of nested: find which layers suffer least from FP8; takes long.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of that.")] = 1,
) -> None:
    """Write a model with 4-bit or nested weights from a 16-bit or GGUF one."""
    with plain_errors():
        from deepinfer.deploy.convert import Recipe, run_convert

        recipe = Recipe(
            weights=weights,
            group_size=group_size,
            row_scaling=row_scaling,
            measure_order=measure_order,
            threads=threads,
        )
        for line in run_convert(source=source, target=target, recipe=recipe, console=err):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command("validate-kernels")
def validate_kernels(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help=MODEL_HELP + " Default: random weights."),
    ] = None,
    shape: Annotated[
        str,
        typer.Option(
            help="Random weights of this shape: smollm2 or qwen2.5-3b.",
            autocompletion=one_of("smollm2", "qwen2.5-3b"),
        ),
    ] = "smollm2",
    quick: Annotated[bool, typer.Option(help="Fewer shapes; about a quarter of the time.")] = False,
    ptx: Annotated[
        bool,
        typer.Option("--ptx/--no-ptx", help="Once more as the code for compute capability 8.6."),
    ] = True,
    output: Annotated[
        Path, typer.Option(help="Folder for the JSON.", callback=result_folder)
    ] = RESULTS,
) -> None:
    """Check every GPU kernel and KV dtype against float64, and whole models against torch."""
    with plain_errors():
        from deepinfer.deploy.validate.run import run_validation

        ok = run_validation(model, shape, quick=quick, ptx=ptx, output=output, console=out)
    raise typer.Exit(0 if ok else 1)


@model.command("get")
def model_get(
    name: Annotated[
        str, typer.Argument(help="demo, org/name of a hub, or a path to check.")
    ] = "demo",
) -> None:
    """Fetch a model into the cache and print where it lies."""
    with plain_errors():
        from deepinfer.deploy.generate import get_model
        from deepinfer.deploy.models import check_model

        path = get_model(name, console=err)
        check_model(path)
        sys.stdout.write(f"{path}\n")


def main() -> None:
    """Entry point of the console script."""
    # gRPC logs failed connections at INFO; what a command has to say of one, it says as its error.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        with stop_signals():
            app(prog_name="deepinfer")
    except KeyboardInterrupt:  # before the command had begun
        raise SystemExit(exit_code()) from None
    finally:
        ending()
