"""Thousands of switches between FP16 and FP8 in one worker: what must be exact never drifts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import Ack, ReportReply, Tokens
from deepinfer.kvstore.core.precision import Policy, Precision, PrecisionRule, PrecisionSettings
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.events import FromGateway, ReportAnswered, RunStep, SendToGateway
from deepinfer.workers.engine import Engine
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool
from support.nested_models import LLAMA, half_model
from support.worker_bench import Bench, G
from support.worker_world import Request, make_request

BLOCKS, BLOCK_SIZE, AT_ONCE = 32, 4, 3
START = (7, 3, 40, 21, 21, 9, 0, 33, 5)
PROMPTS = [(*START[:shared], number, 17) for number, shared in enumerate((9, 9, 5, 5, 1))]
"""Most of them begin as another does, so that the prefix cache is of use."""
MAX_TOKENS = 5

Answer = list[tuple[int, float | None]]


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Worker:
    """A worker's core and its engine, and a gateway that takes what comes."""

    def __init__(self, model: LoadedModel, levels: int) -> None:
        layout = KvLayout(
            resolve_kv_dtype("fp16"), LLAMA.layers, LLAMA.kv_heads, LLAMA.head_dim, BLOCK_SIZE
        )
        backend = CpuBackend()
        decoder = Decoder(model, backend, levels)
        self.engine = Engine(ModelRunner(decoder, PagedPool(layout, BLOCKS), backend))
        self.bench = Bench(blocks_total=BLOCKS, block_size=BLOCK_SIZE, levels=self.engine.levels)
        self.answers: dict[str, Answer] = {}
        self.precisions: Counter[Precision] = Counter()
        self.open: dict[str, Request] = {}

    def ask(self, name: str, prompt: int, *, exact: bool) -> None:
        """Send a greedy request."""
        request = make_request(name, PROMPTS[prompt], MAX_TOKENS, "g")
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
        request.record = replace(request.record, sampling=sampling, stop_token_ids=(), exact=exact)
        self.open[name] = request
        run = self.bench.admit(request)
        step = self._step()
        self.bench.attached(request, run)
        self._run(step or self._step())

    def step(self) -> None:
        """Run the step in flight."""
        plan = self.bench.core._steps.in_flight
        assert plan is not None
        self._run(RunStep(plan))

    def _step(self) -> RunStep | None:
        return next((e for e in self.bench.out if isinstance(e, RunStep)), None)

    def _run(self, step: RunStep | None) -> None:
        if step is None:
            return
        self.bench.do(self.engine.run(step.plan))
        said = [e.message for e in self.bench.out if isinstance(e, SendToGateway)]
        for message in said:
            if isinstance(message, Tokens):
                self._take(message)

    def _take(self, said: Tokens) -> None:
        answer = self.answers.setdefault(said.seq.request, [])
        assert said.index == len(answer)
        answer += ((token.id, token.logprob) for token in said.tokens)
        self.precisions.update(token.precision for token in said.tokens)
        finished = said.finish is not None
        if finished:
            del self.open[said.seq.request]
        self.bench.do(FromGateway(G, Ack(said.seq, said.run, len(answer), finished)))

    def rule(self, policy: Policy) -> None:
        """The controller changes its mind."""
        report = self.bench.report
        assert report is not None
        said = PrecisionRule(settings=PrecisionSettings(policy=policy))
        reply = ReportReply(epoch=1, number=report.number, resync=False, precision=said)
        self.bench.do(ReportAnswered(reply))


def plain_answers(model: LoadedModel) -> list[Answer]:
    """What the model answers without any of this, each prompt alone."""
    worker = Worker(model, 1)
    for number in range(len(PROMPTS)):
        worker.ask(f"plain-{number}", number, exact=False)
        while worker.open:
            worker.step()
    return [worker.answers[f"plain-{number}"] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("switches", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_is_exact_stays_bit_for_bit_plain(switches: int) -> None:
    model = half_model(LLAMA)
    wanted = plain_answers(model)
    worker, rng = Worker(nest(model), 3), Random(switches)
    exact: list[tuple[str, int]] = []
    others: list[tuple[str, int]] = []
    asked = 0
    while worker.bench.core.counters.precision_switches < switches:
        while len(worker.open) < AT_ONCE:
            asked += 1
            name, prompt = f"r{asked}", rng.randrange(len(PROMPTS))
            # Now and then; or there would be no step that may give way.
            is_exact = asked % 8 == 0
            worker.ask(name, prompt, exact=is_exact)
            (exact if is_exact else others).append((name, prompt))
        # Always the other one: a change is announced with one step and made with the next.
        worker.rule(Policy.FP16 if worker.bench.core._levels.level else Policy.FP8)
        worker.step()
    for name, prompt in exact:
        if name not in worker.open:
            assert worker.answers[name] == wanted[prompt], name
    assert len(exact) > switches // 60
    same = sum(worker.answers.get(name) == wanted[prompt] for name, prompt in others)
    assert same < len(others) / 2, "or there was nothing to keep apart"
    metrics = worker.bench.core.metrics()
    assert metrics["prefix_hit_tokens"] > switches
    assert worker.precisions[Precision.FP8] > switches // 4
    assert worker.precisions[Precision.FP16] > switches // 4
    assert sum(len(a) for a in worker.answers.values()) == sum(worker.precisions.values())
    # And where nobody asks for it: alone, in FP16, on what FP16 has left.
    worker.rule(Policy.FP16)
    while worker.open:
        worker.step()
    worker.ask("last", 0, exact=True)
    while worker.open:
        worker.step()
    assert worker.answers["last"] == wanted[0]
