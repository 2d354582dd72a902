"""What a worker's core hears and what it asks its shell to do.

Orders come as ``messages.Order``; everything else that a core hears is here. A shell owes two
answers whatever happens: one ``StepDone`` for each ``RunStep``, and one ``PutDone`` or
``FetchDone`` for each copy **when the copy no longer touches the blocks**, aborted or not: until
then the core keeps those blocks out of use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from deepinfer.kvstore.core.ids import GatewayId, Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.messages import (
    Order,
    ReportReply,
    StoreStatus,
    ToGateway,
    ToWorker,
    WorkerReport,
)
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.requests import RequestRecord, Token
from deepinfer.kvstore.core.states import State

# ---- events --------------------------------------------------------------------------------


class FromGateway(NamedTuple):
    gateway: GatewayId
    message: ToWorker


class GatewayUp(NamedTuple):
    """The link to a gateway works (again): whatever was sent before may be lost."""

    gateway: GatewayId


class GatewayDown(NamedTuple):
    """The link to a gateway broke: nothing sent from here on arrives, until ``GatewayUp``."""

    gateway: GatewayId


class StepOutput(NamedTuple):
    """The token sampled for one chunk that had ``sample`` set."""

    seq: Seq
    run: Run
    token: Token


class StepScores(NamedTuple):
    """Log-probabilities of a chunk's ``score_ids``, in their order."""

    seq: Seq
    run: Run
    tokens: tuple[Token, ...]


class StepDone(NamedTuple):
    step: int
    outputs: tuple[StepOutput, ...]
    failed: tuple[Seq, ...] = ()
    """Sequences that cannot be computed (positions beyond the model's) or whose logits allow no
    choice (NaN): they end with an error, and the others' results stand."""
    scores: tuple[StepScores, ...] = ()


class PutDone(NamedTuple):
    """The copy out of the pool has ended. ``ok``: the store holds every byte and its hash fits."""

    ticket: Ticket
    ok: bool
    payload_bytes: int
    copy_us: int
    detail: str = ""


class CommitReply(NamedTuple):
    ticket: Ticket
    status: StoreStatus


class ResolveReply(NamedTuple):
    ticket: Ticket
    status: StoreStatus


REFUSALS: Final = (
    "bytes",
    "manifest",
    "dtype",
    "encoding",
    "layout",
    "block_bytes",
    "model",
    "run",
    "blocks",
    "precision",
)
"""Why a payload is of no use: its bytes are not what was hashed, its manifest is none, or it names
something that does not belong here."""


class FetchDone(NamedTuple):
    """The copy into the pool has ended. OK: the bytes copied were verified against the manifest.

    ``token_ids`` are the manifest's: the tokens whose KV lies in the ``blocks`` first blocks.
    """

    ticket: Ticket
    run: Run
    status: StoreStatus
    token_ids: tuple[int, ...]
    blocks: int
    copy_us: int
    payload_bytes: int = 0
    detail: str = ""
    precision: Precision = Precision.FP16
    """The manifest's: the worst that computed any of it."""
    ahead: bool | None = None
    """Whether the bytes came from what had been fetched ahead; None if nothing had."""
    refused: str = ""
    """What was wrong with a payload that came, one of ``REFUSALS``; empty: none was refused."""


class StoreGone(NamedTuple):
    """The store's connection broke or it restarted: calls under way there get no answer."""

    store: StoreId


class ReportAnswered(NamedTuple):
    reply: ReportReply


class ReportsUp(NamedTuple):
    """A new report stream is open: the next report is complete."""


class StartDrain(NamedTuple):
    """Take nobody new; the controller moves the residents away."""


class PlanesShed(NamedTuple):
    """Nothing on the device reads the lower planes any more: their bytes may be overwritten."""


class PlanesRestored(NamedTuple):
    """The copy back has ended. ``ok``: every plane is whole; otherwise they are still away."""

    ok: bool
    detail: str = ""


class Tick(NamedTuple):
    """Time has passed; sent every 50 ms or so."""


WorkerEvent = (
    Order
    | FromGateway
    | GatewayUp
    | GatewayDown
    | StepDone
    | PutDone
    | CommitReply
    | ResolveReply
    | FetchDone
    | StoreGone
    | ReportAnswered
    | ReportsUp
    | StartDrain
    | PlanesShed
    | PlanesRestored
    | Tick
)

# ---- effects -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + len(token_ids))`` of one sequence, to be computed in one step."""

    seq: Seq
    run: Run
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    """Blocks for every token below ``start + len(token_ids)``, at least."""
    sample: bool
    """The chunk reaches the sequence's end: its last row's logits choose the next token."""
    index: int
    """Position of that next token among the generated ones (0 is the first)."""
    record: RequestRecord
    output_ids: tuple[int, ...]
    """Tokens generated so far where ``sample`` is set and a penalty counts them; otherwise ()."""
    score_from: int = 0
    """Position of the first row whose logits say how likely the prompt's next token was."""
    score_ids: tuple[int, ...] = ()
    """The prompt's tokens behind that row and those after it, whose log-probabilities are due."""


class StepPlan(NamedTuple):
    """One forward pass. Steps are numbered from 1; one is in flight at a time."""

    step: int
    chunks: tuple[Chunk, ...]
    level: int = 0
    """The mode of a nested model's weights: 0 is FP16 in every layer (kvstore.core.precision)."""
    moves: tuple[tuple[int, int], ...] = ()
    """(from, to): blocks whose contents are copied before anything is computed. The chunks' tables
    name the new ones. There may be moves and no chunk."""
    next_level: int | None = None
    """Announced for the step after this one, which may be computed before it is planned; None: the
    same."""


class ShedPlanes(NamedTuple):
    """Every step from here on runs at the top level: give up the lower planes. ``PlanesShed``
    follows when their bytes may be overwritten."""


class RestorePlanes(NamedTuple):
    """The tail is empty: copy the lower planes back into it. ``PlanesRestored`` follows."""


class SendToGateway(NamedTuple):
    """Send, opening the link if there is none. What cannot be sent is dropped."""

    gateway: GatewayId
    message: ToGateway


class RunStep(NamedTuple):
    plan: StepPlan


class PutPayload(NamedTuple):
    """Copy the blocks to the store under the ticket and hash them; do not commit."""

    ticket: Ticket
    store: StoreId
    seq: Seq
    run: Run
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Tokens with KV in those blocks, from the first on."""
    state: State
    """PREFILL or DECODE: where the sequence was."""
    precision: Precision = Precision.FP16
    """The worst that computed any of it."""


class AbortPut(NamedTuple):
    """The payload is not wanted: stop the copy, tell the store. ``PutDone`` still follows."""

    ticket: Ticket
    store: StoreId


class Commit(NamedTuple):
    ticket: Ticket
    store: StoreId


class Resolve(NamedTuple):
    ticket: Ticket
    store: StoreId


class FetchPayload(NamedTuple):
    """Copy the payload into the blocks and verify the bytes that were copied."""

    ticket: Ticket
    store: StoreId
    seq: Seq
    run: Run
    block_ids: tuple[int, ...]
    ahead: bool = False
    """A ``PrefetchPayload`` of this very ticket is under way or done; this is the end of it. Bytes
    that it has not brought, or that are not right any more, are fetched from the store."""


class CancelFetch(NamedTuple):
    """The payload is not wanted any more: stop early. ``FetchDone`` still follows."""

    ticket: Ticket
    run: Run


class PrefetchPayload(NamedTuple):
    """Copy the payload into host memory, where a ``FetchPayload`` will look for it.

    Nothing is owed for it; it ends with that fetch or with ``CancelPrefetch``.
    """

    ticket: Ticket
    store: StoreId
    blocks: int


class CancelPrefetch(NamedTuple):
    """The payload is not wanted here: stop, and give its memory back."""

    ticket: Ticket


class Report(NamedTuple):
    report: WorkerReport


class ForgetSeq(NamedTuple):
    """The run has left: drop what the shell keeps for it."""

    seq: Seq
    run: Run


class GiveUp(NamedTuple):
    """This life is over: what it waits for will never come. Its successor begins anew."""

    why: str


WorkerEffect = (
    SendToGateway
    | RunStep
    | PutPayload
    | AbortPut
    | Commit
    | Resolve
    | FetchPayload
    | CancelFetch
    | PrefetchPayload
    | CancelPrefetch
    | Report
    | ForgetSeq
    | ShedPlanes
    | RestorePlanes
    | GiveUp
)
