"""`deepinfer bench quality`: what each KV dtype changes in what a model says.

The reference is transformers with the same weights, everything in float32, its KV cache too.
Beside it our model runner computes the same tokens as it serves them: prompts in chunks, K and V
written to the paged pool in the dtype and read back from there. Two things are compared:

* the text is given (teacher forcing): perplexity, KL divergence and the top token at each position
  of a number of windows;
* the text is the model's own (greedy, through the worker's engine): how many tokens of an answer
  are the reference's before the first that differs.

The positions of a window are not independent, so every standard error is over windows (or answers).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.prompts import read_text
from deepinfer.deploy.bench.quality_report import Window, figures_of, plot, spread, table
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.config import ConfigError, check_kv_dtypes
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.models import ModelUnavailableError

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.text.tokenizer import Tokenizer
    from deepinfer.workers.model.runner import ModelRunner

SONNETS: Final = Path(__file__).with_name("data") / "sonnets.txt"
"""The first 43 of Shakespeare's sonnets (public domain), letters and digits only."""
DTYPES: Final = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")
BLOCK_SIZE: Final = 16
CHUNK_TOKENS: Final = 256
"""Prompt tokens in a step, as `deepinfer up` has it by default."""
ROWS: Final = 128
"""Positions whose distributions are compared at once: bounds the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is computed.

    Raises:
        ConfigError: a number out of range, or an unknown KV dtype.
    """

    dtypes: tuple[str, ...] = DTYPES
    windows: int = 8
    window_tokens: int = 512
    answers: int = 8
    prompt_tokens: int = 64
    answer_tokens: int = 64
    threads: int = 1

    def __post_init__(self) -> None:
        check_kv_dtypes(self.dtypes)
        for name, least in (
            ("windows", 2),
            ("window_tokens", 2),
            ("answers", 2),
            ("prompt_tokens", 1),
            ("answer_tokens", 1),
            ("threads", 1),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")
        if self.prompt_tokens > self.window_tokens or self.answers > self.windows:
            raise ConfigError(
                f"prompt_tokens = {self.prompt_tokens}, answers = {self.answers}: must be at most "
                f"window_tokens = {self.window_tokens} and windows = {self.windows}, for prompts "
                f"are the beginnings of windows"
            )


def run_quality(
    *, model: str, plan: Plan, text: Path | None, output: Path, console: Console
) -> dict[str, Any]:
    """Measure every dtype; write ``quality.json`` and ``quality.png``; return the figures.

    Raises:
        ConfigError: the text is too short or not UTF-8, the windows are longer than the model's
            context, or what draws plots or computes the reference is not installed.
        ModelUnavailableError: no such model, or one whose logits are NaN.
    """
    check_plots()
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed: pip install 'deepinfer-cluster[bench]'")
    words = read_text(text or SONNETS)
    path = get_model(model, console=console)
    total = (plan.windows + 1) * (1 + len(plan.dtypes))
    with counted(console, total, "loading") as steps:

        def advance(doing: str, done: int = 1) -> None:
            steps.tell(doing)
            steps.advance(done)

        figures = _measure(path, plan, words, advance)
    named = "" if text is None else f" --text {text}"
    dtypes = "".join(f" --kv-cache-dtype {dtype}" for dtype in plan.dtypes)
    command = (
        f"deepinfer bench quality --model {model}{dtypes} --windows {plan.windows} "
        f"--window-tokens {plan.window_tokens} --answers {plan.answers} --prompt-tokens "
        f"{plan.prompt_tokens} --answer-tokens {plan.answer_tokens} --threads {plan.threads}{named}"
    )
    source = {"name": (text or SONNETS).name, "sha256": hashlib.sha256(words.encode()).hexdigest()}
    figures = {"model": path.name, "text": source | figures.pop("text")} | figures
    write_result(output / "quality.json", command, figures)
    plot(figures, output / "quality.png")
    console.print(table(figures))
    return figures


def cut_windows(tokenizer: Tokenizer, text: str, plan: Plan) -> tuple[list[list[int]], int]:
    """The windows, spread evenly over the text, and how many tokens the text has.

    Each begins with what the tokenizer puts before any text (such as a BOS token).

    Raises:
        ConfigError: the text has too few tokens for so many windows.
    """
    first = list(tokenizer.prefix_ids)
    ids = tokenizer.encode(text, add_special_tokens=False)
    own = plan.window_tokens - len(first)
    if own < 2 or len(ids) < plan.windows * own:
        raise ConfigError(
            f"text: has {len(ids)} tokens; {plan.windows} windows of {plan.window_tokens} tokens "
            f"need {plan.windows * max(own, 2)}"
        )
    gap = (len(ids) - own) / (plan.windows - 1)
    starts = [round(index * gap) for index in range(plan.windows)]
    return [first + ids[start : start + own] for start in starts], len(ids)


def _measure(path: Path, plan: Plan, text: str, advance: Callable[..., None]) -> dict[str, Any]:
    import torch

    from deepinfer.deploy.bench.peers import EnginePeer
    from deepinfer.deploy.bench.transformers_peer import transformers_model
    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.backends.cpu import CpuBackend
    from deepinfer.workers.model.decoder import Decoder
    from deepinfer.workers.model.load import load_model
    from deepinfer.workers.model.runner import ModelRunner
    from deepinfer.workers.pool import PagedPool

    loaded = load_model(path)
    longest = max(plan.window_tokens, plan.prompt_tokens + plan.answer_tokens)
    if longest > loaded.config.max_positions:
        raise ConfigError(
            f"window_tokens, prompt_tokens + answer_tokens: up to {longest}; the model has "
            f"{loaded.config.max_positions} positions"
        )
    windows, text_tokens = cut_windows(load_tokenizer(path), text, plan)
    backend = CpuBackend(threads=plan.threads)
    decoder = Decoder(loaded, backend)
    reference = transformers_model(loaded)
    layouts = {
        dtype: decoder.kv_layout(resolve_kv_dtype(dtype), BLOCK_SIZE) for dtype in plan.dtypes
    }
    runners = {
        dtype: ModelRunner(decoder, PagedPool(layout, layout.blocks_for(longest)), backend)
        for dtype, layout in layouts.items()
    }
    right: list[Window] = []
    scored: dict[str, list[Window]] = {dtype: [] for dtype in plan.dtypes}
    saturated = dict.fromkeys(plan.dtypes, 0)
    for number, window in enumerate(windows, start=1):
        targets = torch.tensor(window[1:])
        advance(f"window {number}: float32")
        with torch.inference_mode():
            logits = reference(torch.tensor([window])).logits[0, :-1]
        expected = torch.log_softmax(logits.double(), dim=-1)
        right.append(compare(logits, targets, expected))
        for dtype, runner in runners.items():
            advance(f"window {number}: {dtype}")
            before = backend.kv_saturations
            scored[dtype].append(compare(served_logits(runner, window)[:-1], targets, expected))
            saturated[dtype] += backend.kv_saturations - before
    prompts = [
        windows[index * plan.windows // plan.answers][: plan.prompt_tokens]
        for index in range(plan.answers)
    ]
    advance("answers: float32")
    expected_answers = _greedy_reference(reference, prompts, plan.answer_tokens)
    results: dict[str, Any] = {"fp32": figures_of(right, right)}
    for dtype in plan.dtypes:
        advance(f"answers: {dtype}")
        peer = EnginePeer(
            decoder,
            kv_cache_dtype=dtype,
            blocks=plan.answers * layouts[dtype].blocks_for(longest),
            block_size=BLOCK_SIZE,
            prefill_chunk_tokens=CHUNK_TOKENS,
        )
        answers = peer.together(prompts, plan.answer_tokens).token_ids
        alike = [common(a, b) for a, b in zip(answers, expected_answers, strict=True)]
        results[dtype] = figures_of(scored[dtype], right) | {
            "greedy_tokens_alike": spread(alike).figures(),
            "greedy_answers_alike": sum(count == plan.answer_tokens for count in alike),
            "kv_bytes_a_token": layouts[dtype].block_bytes // BLOCK_SIZE,
            "kv_elements_clamped": saturated[dtype],
        }
    return {
        "text": {"tokens": text_tokens},
        "reference": f"transformers {version('transformers')}, weights and KV cache in float32",
        "windows": plan.windows,
        "window_tokens": plan.window_tokens,
        "positions": sum(len(window) - 1 for window in windows),
        "prefill_chunk_tokens": CHUNK_TOKENS,
        "block_size": BLOCK_SIZE,
        "greedy": {
            "answers": plan.answers,
            "prompt_tokens": plan.prompt_tokens,
            "answer_tokens": plan.answer_tokens,
        },
        "results": results,
    }


def served_logits(
    runner: ModelRunner, tokens: Sequence[int], chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Logits of every position, float32 ``[tokens, vocab]``, computed as a prompt is: in chunks."""
    import torch

    from deepinfer.workers.model.runner import SequenceSlice

    table = list(range(runner.pool.layout.blocks_for(len(tokens))))
    chunks = [
        runner.forward_all(
            [SequenceSlice(tokens[start : start + chunk_tokens], start, table, logits=False)]
        )
        for start in range(0, len(tokens), chunk_tokens)
    ]
    return torch.cat(chunks)


def compare(logits: Tensor, targets: Tensor, expected: Tensor) -> Window:
    """Score one window.

    ``logits`` ``[positions, vocab]``; ``targets`` int64 ``[positions]``, the tokens that follow;
    ``expected`` the reference's log-probabilities, float64 as ``logits``. The divergence is
    KL(reference || logits), computed in float64: in float32 its rounding would be the result.

    Raises ModelUnavailableError where the reference itself is NaN.
    """
    import torch

    if bool(expected.isnan().any()):
        raise ModelUnavailableError(
            "the reference's logits are NaN: the model's weights hold NaN, infinities or values "
            "that overflow"
        )
    nll, kl, same = [], [], 0
    for begin in range(0, len(targets), ROWS):
        rows = slice(begin, begin + ROWS)
        log_q = torch.log_softmax(logits[rows].double(), dim=-1)
        log_p = expected[rows]
        nll.append(-log_q.gather(1, targets[rows, None])[:, 0])
        kl.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
        same += int((log_q.argmax(dim=-1) == log_p.argmax(dim=-1)).sum())
    return Window(
        nll=float(torch.cat(nll).mean()),
        agreement=same / len(targets),
        kl=tuple(torch.cat(kl).tolist()),
    )


def common(answer: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (ours, theirs) in enumerate(zip(answer, expected, strict=True)):
        if ours != theirs:
            return index
    return len(expected)


def _greedy_reference(reference: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What the reference answers, an end of sequence or not; all prompts are of one length."""
    import torch

    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return answers
