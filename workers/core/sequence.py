"""One run on this worker: its tokens, how many of them have KV, and what its gateway holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.kvstore.core.ids import GatewayId, Run, Seq
from deepinfer.kvstore.core.messages import ResidentLevel, Usage
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token
from deepinfer.kvstore.core.states import State, move
from deepinfer.workers.core.attach import Attachment
from deepinfer.workers.core.swap import Entering, Leaving

ENDS = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})
RUNNABLE = frozenset({State.PREFILL, State.DECODE})


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


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
    attachment: Attachment
    state: State
    promised: int = 0
    """Blocks kept aside until the gateway's answer shows what to compute."""
    record: RequestRecord | None = None
    tokens: list[int] = field(default_factory=list)
    generated: list[Token] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks whose KV was computed here, from the first on."""
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

    def adopt(self, record: RequestRecord, held: tuple[int, ...]) -> int:
        """Take the gateway's word on the tokens; return how many of the old ones still stand.

        What the gateway holds is the truth. If our own tokens continue it, they stay and go out
        again from there; otherwise ours end where the two part.
        """
        truth = [*record.prompt_ids, *held]
        if self.record is not None and self.record.prompt_ids != record.prompt_ids:
            self.tokens, self.generated = [], []  # Another prompt: nothing of ours answers it.
        common = common_prefix(self.tokens, truth)
        self.record = record
        if common < len(truth):
            prompt = len(record.prompt_ids)
            kept = self.generated[: max(0, common - prompt)]
            self.generated = [*kept, *(Token(id) for id in held[len(kept) :])]
            self.tokens = truth
            self.finish = self.ended_by(len(held) - 1) if held else None
        self.acked = self.sent = len(held)
        self.finish_sent = False
        return common if common < len(truth) else len(self.tokens)

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
        assert self.computed <= max(0, len(self.tokens) - 1) or self.state in ENDS, (
            f"{name}: KV beyond the tokens"
        )
        assert len(self.chain) * block_size <= self.computed, f"{name}: hash of a block not full"
        assert 0 <= self.acked <= self.sent <= len(self.generated), f"{name}: outbox out of order"
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
