"""What a worker says to its gateways, and what it makes of their answers."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import GatewayId, StoreId, WorkerRef
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Departure,
    Drop,
    Notice,
    NoticeKind,
    Scores,
    ToGateway,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.batch import adopt
from deepinfer.workers.core.events import FetchPayload, FromGateway, SendToGateway
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.sequence import Resident
from deepinfer.workers.core.swap import InPhase

TOKENS_PER_MESSAGE = 512


class Talk:
    """Attaching, sending tokens until they are acknowledged, and notices."""

    def __init__(self, ref: WorkerRef, roster: Roster) -> None:
        self._ref = ref
        self._roster = roster
        self._config = roster.config

    # ---- out -------------------------------------------------------------------------------

    def attach(self, resident: Resident, now_ms: int) -> None:
        """Ask whether the run may speak; its tokens wait for the answer."""
        resident.attachment.restart(now_ms)
        self._ask(resident)

    def flush(self, resident: Resident, now_ms: int) -> None:
        """Send what the gateway has not been sent yet, if it listens."""
        if not resident.attachment.answered:
            return
        while resident.scores_sent < len(resident.scores):
            start, end = resident.scores_sent, resident.scores_sent + TOKENS_PER_MESSAGE
            scores = tuple(resident.scores[start:end])
            self._send(resident, Scores(resident.seq, resident.run, start + 1, scores))
            resident.scores_sent, resident.sent_ms = start + len(scores), now_ms
        total = len(resident.generated)
        while resident.sent < total or (resident.finish and not resident.finish_sent):
            end = min(total, resident.sent + TOKENS_PER_MESSAGE)
            finish = resident.finish if end == total else None
            tokens = tuple(resident.generated[resident.sent : end])
            self._send(
                resident,
                Tokens(resident.seq, resident.run, resident.sent, tokens, finish, resident.cached),
            )
            resident.sent, resident.sent_ms = end, now_ms
            resident.finish_sent = finish is not None

    def notice(
        self,
        resident: Resident,
        kind: NoticeKind,
        *,
        store: StoreId | None = None,
        blocks: int = 0,
        payload_bytes: int = 0,
        copy_us: int = 0,
    ) -> None:
        number = resident.notices
        resident.notices += 1
        if resident.attachment.answered:
            self._send(
                resident,
                Notice(
                    resident.seq,
                    resident.run,
                    number,
                    kind,
                    self._ref.worker,
                    store,
                    blocks,
                    payload_bytes,
                    copy_us,
                ),
            )

    # ---- in --------------------------------------------------------------------------------

    def hear(self, event: FromGateway, now_ms: int) -> None:
        message = event.message
        if isinstance(message, Drop):
            resident = self._roster.residents.get(message.seq)
            if resident is not None and resident.run <= message.run:
                self._roster.depart(resident, Departure.DROPPED)
            self._roster.end(message.seq, message.run)
            return
        resident = self._roster.find(message.seq, message.run)
        if resident is None or resident.gateway != event.gateway:
            return
        if isinstance(message, Attached):
            self._attached(resident, message, now_ms)
        elif isinstance(message, AttachRefused):
            self._refused(resident, message)
        else:
            self._acknowledged(resident, message, now_ms)

    def gateway_up(self, gateway: GatewayId, now_ms: int) -> None:
        for resident in self._roster.residents.values():
            if resident.gateway == gateway:
                self.attach(resident, now_ms)

    def gateway_down(self, gateway: GatewayId, now_ms: int) -> None:
        for resident in self._roster.residents.values():
            if resident.gateway == gateway:
                resident.attachment.restart(now_ms)

    def tick(self, resident: Resident, now_ms: int) -> None:
        """Ask again, send again, or give up a run that has nothing to lose."""
        attachment = resident.attachment
        if not attachment.answered:
            if self._has_nothing(resident) and attachment.unreachable(
                now_ms, self._config.unreachable_ms
            ):
                self._roster.depart(resident, Departure.UNREACHABLE)
            elif attachment.repeat_due(now_ms, self._config.attach_timeout_ms):
                attachment.asked_ms = now_ms
                self._roster.counters.attaches_repeated += 1
                self._ask(resident)
            return
        waiting = (
            resident.scores_acked < resident.scores_sent
            or resident.acked < resident.sent
            or resident.finish_sent
        )
        if waiting and now_ms - resident.sent_ms >= self._config.resend_ms:
            if resident.resent:
                # Twice without an answer: the gateway may have forgotten that this run speaks.
                resident.resent = False
                self.attach(resident, now_ms)
                return
            self._roster.counters.resends += 1
            resident.scores_sent = resident.scores_acked
            resident.sent, resident.finish_sent = resident.acked, False
            resident.resent = True
            self.flush(resident, now_ms)

    # ---- the answers -----------------------------------------------------------------------

    def _attached(self, resident: Resident, message: Attached, now_ms: int) -> None:
        if resident.attachment.answered:
            return  # Doubled: its tokens are older than the acknowledgements since.
        fresh = resident.record is None
        finished = resident.state is State.FINISHED
        standing = resident.adopt(message.record, message.tokens, message.scored)
        unscored = len(resident.scores) < resident.scores_due
        failed = resident.finish is FinishReason.ERROR
        if finished and (resident.finish is None or (unscored and not failed)):
            # What the gateway holds is not what ended here, and the KV is gone.
            self._roster.depart(resident, Departure.DROPPED)
            return
        resident.attachment.answered = True
        resident.attachment.orphan = False
        standing = min(standing, resident.computed_max)
        if resident.exact:
            standing = min(standing, resident.purity.fp16)
        self._roster.truncate(resident, standing)
        if finished or resident.finish is not None:
            self._finish(resident, now_ms)
            return
        if resident.state is State.WAITING:
            self._begin(resident, fresh)
        elif resident.entering is not None and resident.entering.phase is InPhase.ATTACH:
            self._fetch(resident, now_ms)
        self.flush(resident, now_ms)

    def _finish(self, resident: Resident, now_ms: int) -> None:
        if resident.state is not State.FINISHED:
            self._roster.finish(resident)
        self.flush(resident, now_ms)

    def _begin(self, resident: Resident, fresh: bool) -> None:
        """Allocate what was promised and go on from what the prefix cache, or this worker, has."""
        roster = self._roster
        roster.redeem(resident)
        if not resident.blocks:
            known = resident.tokens[: resident.computed_max + 1]
            resident.blocks, resident.chain = roster.blocks.match(
                known, roster.spare, pure=resident.exact
            )
            adopt(resident, resident.blocks, roster.blocks)
            resident.cached = min(resident.computed, resident.prompt_tokens)
            resident.cacheable = True
        missing = self._config.blocks_for(len(resident.tokens)) - len(resident.blocks)
        # More tokens than the order said leave a rest for growth, block by block.
        resident.blocks += roster.blocks.allocate(max(0, min(missing, roster.spare)))
        resident.settle()
        roster.changed = True
        if fresh:
            self.notice(resident, NoticeKind.PLACED, blocks=len(resident.blocks))

    def _fetch(self, resident: Resident, now_ms: int) -> None:
        roster, entering = self._roster, resident.entering
        assert entering is not None
        count = resident.promised
        roster.redeem(resident)
        resident.blocks = roster.blocks.allocate(count)
        order = entering.order
        wanted = resident.blocks[: order.blocks]
        roster.copies.begin((order.ticket, resident.run), wanted)
        entering.enter(InPhase.FETCH, now_ms)
        roster.changed = True
        roster.out.append(
            FetchPayload(
                order.ticket,
                order.store,
                resident.seq,
                resident.run,
                tuple(wanted),
                entering.ahead,
            )
        )

    def _refused(self, resident: Resident, message: AttachRefused) -> None:
        if message.highest is None and not self._has_nothing(resident):
            resident.attachment.answered = False
            resident.attachment.orphan = True
            return
        self._roster.depart(resident, Departure.DROPPED)

    def _acknowledged(self, resident: Resident, message: Ack, now_ms: int) -> None:
        if message.finished and resident.finish is not None:
            self._roster.depart(resident, Departure.FINISHED)
            return
        if resident.acked < message.next_index <= len(resident.generated):
            resident.acked = message.next_index
            resident.sent = max(resident.sent, resident.acked)
            resident.sent_ms = now_ms
            resident.resent = False
        if resident.scores_acked < message.scored <= len(resident.scores):
            resident.scores_acked = message.scored
            resident.scores_sent = max(resident.scores_sent, resident.scores_acked)
            resident.sent_ms = now_ms
            resident.resent = False

    def _ask(self, resident: Resident) -> None:
        self._send(resident, Attach(resident.seq, resident.run, self._ref))

    def _send(self, resident: Resident, message: ToGateway) -> None:
        self._roster.out.append(SendToGateway(resident.gateway, message))

    @staticmethod
    def _has_nothing(resident: Resident) -> bool:
        """No KV and no tokens of its own: nothing is lost when it leaves."""
        return resident.computed == 0 and resident.state is not State.FINISHED
