"""One run on this worker: its tokens, how many of them have KV, and what its gateway holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.kvstore.core.ids import GatewayId, Run, Seq
from deepinfer.kvstore.core.messages import ResidentLevel, Usage
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token
from deepinfer.kvstore.core.states import State, move
from deepinfer.workers.core.attach import Attachment
from deepinfer.workers.core.purity import Purity
from deepinfer.workers.core.swap import Entering, Leaving

ENDS = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})
RUNNABLE = frozenset({State.PREFILL, State.DECODE})


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


def first_bare(tokens: Sequence[Token], start: int) -> int:
    """Place of the first token from ``start`` on without log-probabilities; else their number."""
    bare = (i for i in range(start, len(tokens)) if tokens[i].logprob is None)
    return next(bare, len(tokens))


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """A sequence that runs here, or is about to, or waits for its last acknowledgement.

    ``tokens`` is prompt + output; ``computed`` of them, from the first on, have KV in ``blocks``
    and chase ``len(tokens)``. That covers prefill, decode, a prefix found in the cache, a resumed
    payload and a recompute alike::

        |<------- computed ------->|<- remaining ->|
        |<-- prompt_tokens -->|<---- generated --->|
                              |<- acked ->|<-sent->|
    """

    seq: Seq
    run: Run
    gateway: GatewayId
    arrival: int
    """Counts admissions here: orders prefills."""
    order: Run
    """The highest order handled for this sequence: lower ones are late or doubled."""
    max_total_tokens: int
    since_ms: int
    """When it came here."""
    attachment: Attachment
    state: State
    promised: int = 0
    """Blocks kept aside until the gateway's answer shows what to compute."""
    record: RequestRecord | None = None
    tokens: list[int] = field(default_factory=list)
    generated: list[Token] = field(default_factory=list)
    scores: list[Token] = field(default_factory=list)
    """The prompt's tokens from the second on with their log-probabilities, if they are due: they
    come from the rows of the tokens before, so they lead ``computed`` until none is missing."""
    scores_acked: int = 0
    scores_sent: int = 0
    cached: int = 0
    """Prompt tokens that this run found in the prefix cache."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks whose KV was computed here, from the first on."""
    purity: Purity = field(default_factory=Purity)
    """Which of the computed tokens' KV no reduced precision has touched."""
    cacheable: bool = True
    """False after a fetch: KV from elsewhere is never shared."""
    acked: int = 0
    sent: int = 0
    sent_ms: int = 0
    """When tokens were last sent, or acknowledged with others still under way."""
    resent: bool = False
    """Sent again since the last acknowledgement."""
    finish: FinishReason | None = None
    finish_sent: bool = False
    in_step: bool = False
    """Part of the step in flight."""
    step_stale: bool = False
    """Blocks were given up since that step began: what it computes does not count."""
    leaving: Leaving | None = None
    entering: Entering | None = None
    swap_failures: int = 0
    last_step: int = 0
    advanced: int = 0
    notices: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) - len(self.generated)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def scores_due(self) -> int:
        """How many ``scores`` the sequence has to bring."""
        return self.record.scores_due(self.seq.choice) if self.record is not None else 0

    @property
    def exact(self) -> bool:
        """Nothing of it may be computed from or in reduced precision."""
        return self.record is not None and self.record.exact

    @property
    def computed_max(self) -> int:
        """How many tokens may have KV now: beyond, rows that have to be looked at would be missed.

        The last token is always computed for its logits; a prompt token is too if the
        log-probability of the one behind it is still missing.
        """
        if len(self.scores) < self.scores_due:
            return len(self.scores)
        return max(0, len(self.tokens) - 1)

    @property
    def ready(self) -> bool:
        """May take part in the next step."""
        return self.state in RUNNABLE and not self.attachment.orphan

    def go(self, state: State) -> None:
        """Move to another state; an illegal move raises."""
        self.state = move(self.seq, self.state, state)

    @property
    def stage(self) -> State:
        """PREFILL or DECODE, as the computed tokens say."""
        if self.generated and self.remaining == 1:
            return State.DECODE
        return State.PREFILL

    def settle(self) -> None:
        """Go on running, or start to. A sequence that decodes never goes back to PREFILL."""
        if self.state is State.WAITING:
            self.go(State.PREFILL)
        if self.state is not State.DECODE and self.state is not self.stage:
            self.go(self.stage)

    def ended_by(self, index: int) -> FinishReason | None:
        """Whether the generated token at ``index`` ends the sequence, and why."""
        assert self.record is not None
        sampling = self.record.sampling
        if index >= sampling.min_tokens and self.generated[index].id in self.record.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= sampling.max_tokens else None

    def accept(self, token: Token) -> None:
        """Append one token generated here."""
        self.tokens.append(token.id)
        self.generated.append(token)
        self.advanced += 1
        self.finish = self.ended_by(len(self.generated) - 1)

    def score(self, start: int, scores: tuple[Token, ...]) -> None:
        """Take the log-probabilities of prompt tokens, of which ``start`` come before."""
        known = len(self.scores) - start
        if known >= 0:
            self.scores += scores[known:]

    def adopt(self, record: RequestRecord, held: tuple[int, ...], scored: int = 0) -> int:
        """Take the gateway's word on the tokens; return how many of the old ones still stand.

        What the gateway holds is the truth. If our own tokens continue it, they stay and go out
        again from there; otherwise ours end where the two part. They also end before one that came
        from another gateway without its log-probabilities, if those are wanted: it is computed
        again. So are prompt tokens without theirs, behind the ``scored`` that the gateway holds.
        """
        truth = [*record.prompt_ids, *held]
        if self.record is not None and self.record.prompt_ids != record.prompt_ids:
            # Another prompt: nothing of ours answers it.
            self.tokens, self.generated, self.scores = [], [], []
        common = common_prefix(self.tokens, truth)
        prompt = len(record.prompt_ids)
        self.record = record
        if common < len(truth):
            kept = self.generated[: max(0, common - prompt)]
            self.generated = [*kept, *(Token(id) for id in held[len(kept) :])]
            self.tokens = truth
            self.finish = self.ended_by(len(held) - 1) if held else None
        elif record.sampling.logprobs is not None:
            bare = first_bare(self.generated, len(held))
            if bare < len(self.generated):
                del self.generated[bare:], self.tokens[prompt + bare :]
                self.finish = None
        self._adopt_scores(record, scored)
        self.acked = self.sent = len(held)
        self.finish_sent = False
        return common if common < len(truth) else len(self.tokens)

    def _adopt_scores(self, record: RequestRecord, scored: int) -> None:
        scored = min(scored, self.scores_due)
        del self.scores[min(self.scores_due, first_bare(self.scores, scored)) :]
        behind = record.prompt_ids[len(self.scores) + 1 : scored + 1]
        self.scores += (Token(token_id) for token_id in behind)
        self.scores_acked = self.scores_sent = scored

    def level(self) -> ResidentLevel:
        ticket = None
        if self.leaving is not None:
            ticket = self.leaving.order.ticket
        elif self.entering is not None:
            ticket = self.entering.order.ticket
        return ResidentLevel(
            self.seq, self.run, self.state, ticket, self.swap_failures, self.gateway
        )

    def usage(self, private_blocks: int) -> Usage:
        return Usage(self.seq, private_blocks, self.computed, self.last_step, self.advanced)

    def check(self, block_size: int) -> None:
        """Raise AssertionError if an invariant does not hold."""
        name = f"{self.seq} {self.run}"
        assert 0 <= self.computed <= len(self.blocks) * block_size, f"{name}: KV without blocks"
        assert len(self.chain) * block_size <= self.computed, f"{name}: hash of a block not full"
        assert 0 <= self.acked <= self.sent <= len(self.generated), f"{name}: outbox out of order"
        assert 0 <= self.scores_acked <= self.scores_sent <= len(self.scores) <= self.scores_due, (
            f"{name}: outbox of scores out of order"
        )
        self.purity.check(self.computed)
        assert not self.exact or self.purity.fp16 == self.computed, f"{name}: exact, {self.purity}"
        assert self.computed <= self.computed_max or self.state in ENDS, f"{name}: rows were missed"
        swapping = (self.state is State.SWAPPING_OUT, self.state is State.SWAPPING_IN)
        assert swapping == (self.leaving is not None, self.entering is not None), (
            f"{name}: {self.state} without its swap"
        )
        assert self.state not in RUNNABLE or self.record is not None, f"{name}: runs unattached"
        assert (self.state is State.FINISHED) == (self.finish is not None), (
            f"{name}: {self.state} with finish {self.finish}"
        )
        if self.state is State.FINISHED:
            assert not self.blocks, f"{name}: finished and still holds blocks"
