"""Planted bugs: each a patch to a production file that the stories or the simulator must catch.

``python tests/sim/mutants.py [--seeds-only] [--jobs N] [--output FILE] [NAME ...]`` runs all of
them, or those named: each in a copy of the five cores and the simulator, first the story that is
written against it (all of them if none is; none at all with ``--seeds-only``), then seeds, until
something fails. A mutant that survives, or a patch that no longer fits its file, is an error.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "tests" / "traces"
AREAS = ("controller", "workers", "kvstore", "gateway", "client")
SEEDS = 1000
"""Within so many seeds a mutant has to be found."""

_HUNT = """
import sys
from pathlib import Path
from deepinfer.deploy.sim import simulate
from deepinfer.deploy.sim.story import tell

seeds, stories = int(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
for path in stories:
    try:
        tell(path)
    except Exception as error:
        print("story", path.stem, type(error).__name__, str(error)[:150].replace(chr(10), " "))
        raise SystemExit(0)
summary = simulate.sweep(seeds, failures_max=1) if seeds else None
if summary is not None and summary.failures:
    failed = summary.failures[0]
    print("seed", failed.seed, failed.error[:150].replace(chr(10), " "))
    raise SystemExit(0)
raise SystemExit(3)
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug: ``old`` occurs exactly once in ``file`` and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    why: str
    story: str | None = None
    """The story that must catch it; None: the simulator's seeds must."""


MUTANTS = (
    Mutant(
        "free_before_copy",
        "workers/core/swaps.py",
        "                resident.purity.at(resident.computed),\n            )\n        )\n",
        "                resident.purity.at(resident.computed),\n            )\n        )\n"
        "        roster.copies.end(key)\n        self._apply(resident, Outcome.GONE)\n",
        "a victim's blocks are freed when its copy has only been asked for",
    ),
    Mutant(
        "resume_evicts",
        "controller/core/placement.py",
        "        for rank in (Rank.RECOVERING, Rank.WAITING):\n"
        "            sequence = line.first(capacity, rank)\n"
        "            if sequence is not None and sequence.queued is not None:\n"
        "                heads.append((sequence.queued, sequence, index))\n"
        "                break\n"
        "    high = len(capacities)\n"
        "    for place, sequence, low in sorted(heads, key=lambda head: head[0]):\n"
        "        if place.rank is Rank.WAITING:\n",
        "        for rank in Rank:\n"
        "            sequence = line.first(capacity, rank)\n"
        "            if sequence is not None and sequence.queued is not None:\n"
        "                heads.append((sequence.queued, sequence, index))\n"
        "                break\n"
        "    high = len(capacities)\n"
        "    for place, sequence, low in sorted(heads, key=lambda head: head[0]):\n"
        "        if place.rank is not Rank.RECOVERING:\n",
        "room is made for somebody who was swapped out: two take turns for ever",
        "resume_evicts_nobody",
    ),
    Mutant(
        "stuck_step_is_waited_for",
        "workers/core/steps.py",
        "or waited_ms < limit_ms:",
        "or waited_ms < 1000 * limit_ms:",
        "a device that never answers holds its requests for ever",
    ),
    Mutant(
        "report_before_membership",
        "controller/core/residents.py",
        "        worker = world.pools.get(report.worker)  # which forgets who is no member yet\n",
        "",
        "what a worker reports before it is a member goes into a forgotten record",
    ),
    Mutant(
        "no_epoch_check_at_the_worker",
        "workers/core/orders.py",
        "if order.order.epoch < self.epoch_seen:",
        "if order.order.epoch < 0:",
        "an order of a dead controller is carried out",
        "hole_late_order_of_dead_controller",
    ),
    Mutant(
        "lower_run_attaches",
        "gateway/core/runs.py",
        "elif attach.run < highest or choice.worker != worker:",
        "elif attach.run == highest and choice.worker != worker:",
        "a run that has been replaced is told that it may speak",
        "hole_late_order_before_new_epoch_is_known",
    ),
    Mutant(
        "replaced_run_speaks",
        "gateway/core/runs.py",
        "if said.run < choice.attached or worker != choice.worker:",
        "if said.run < Run(0, 0):",
        "tokens of a run that has been replaced are taken",
        "hole_replaced_run_speaks",
    ),
    Mutant(
        "free_before_commit",
        "workers/core/swap.py",
        "        self.enter(OutPhase.COMMIT, now_ms)\n",
        "        self.enter(OutPhase.COMMIT, now_ms)\n        return self._gone(now_ms)\n",
        "blocks are freed when the copy has arrived but nothing is committed",
        "hole_commit_after_unknown",
    ),
    Mutant(
        "lost_commit_reply_is_a_failure",
        "workers/core/swap.py",
        "return self._gone(now_ms) if status is StoreStatus.COMMITTED else Outcome.FAILED",
        "return Outcome.FAILED",
        "a payload that was committed is thrown away with its blocks kept",
        "hole_commit_reply_lost",
    ),
    Mutant(
        "copied_blocks_are_not_pinned",
        "workers/core/swap.py",
        "        self._blocks.pin(blocks)\n",
        "        self._pinned[key] = []\n",
        "blocks are used again while a copy reads or writes them",
        "abort_while_swapping_in",
    ),
    Mutant(
        "step_blocks_are_not_pinned",
        "workers/core/roster.py",
        "        if resident.in_step:\n            self.blocks.pin(freed)\n",
        "        if resident.in_step and not freed:\n            self.blocks.pin(freed)\n",
        "blocks are used again while a step writes them",
        "abort_during_a_step",
    ),
    Mutant(
        "payload_adopted_under_other_tokens",
        "workers/core/swaps.py",
        "standing = common_prefix(list(event.token_ids), resident.tokens)",
        "standing = len(event.token_ids)",
        "KV of other tokens than the gateway's is used",
        "hole_payload_of_other_tokens",
    ),
    Mutant(
        "payload_ahead_of_an_older_run",
        "workers/core/prefetch.py",
        "if self.held is None or self.held.ticket != ticket:",
        "if self.held is None or self.held.ticket.seq != ticket.seq:",
        "what was fetched ahead under an older ticket of the request is taken for the new one's",
        "prefetched_under_an_older_ticket",
    ),
    Mutant(
        "payload_ahead_outlives_its_request",
        "controller/core/reconcile.py",
        "    prefetch.over(world, sequence)\n",
        "",
        "a worker keeps what it has fetched ahead for a request that was aborted",
        "prefetched_and_cancelled",
    ),
    Mutant(
        "payload_ahead_is_kept_for_ever",
        "workers/core/prefetch.py",
        "now_ms - held.named_ms >= self._config.prefetch_keep_ms",
        "now_ms < held.named_ms",
        "what nobody names any more stays in a worker's memory",
        "prefetched_and_forgotten",
    ),
    Mutant(
        "claimed_payload_ahead_outlives_its_run",
        "workers/core/roster.py",
        "        elif entering.ahead:\n",
        "        elif entering.ahead and not self.residents:\n",
        "a run that ends before its fetch leaves its payload in memory",
        "prefetched_and_never_attached",
    ),
    Mutant(
        "attached_tokens_ignored",
        "workers/core/sequence.py",
        "        if common < len(truth):\n            kept",
        "        if common < len(truth) and not self.tokens:\n            kept",
        "a worker goes on with its own tokens where the gateway's differ",
        "hole_own_tokens_differ_from_the_gateways",
    ),
    Mutant(
        "prefix_hash_without_parent",
        "workers/core/blocks.py",
        "return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()",
        "return blake2b(content, digest_size=DIGEST_BYTES).digest()",
        "a block is shared because its own tokens are equal",
    ),
    Mutant(
        "resolve_does_not_seal",
        "kvstore/core/store.py",
        "            self._drop(entry, effects)\n        elif entry in",
        "            pass\n        elif entry in",
        "a commit that comes after the answer to Resolve succeeds",
        "hole_commit_after_unknown",
    ),
    Mutant(
        "reservations_never_expire",
        "kvstore/core/store.py",
        "while self._expiry and self._expiry[0][0] <= now_ms:",
        "while self._expiry and self._expiry[0][0] < 0:",
        "bytes that were set aside for a swap that never came are lost",
        "hole_reservation_never_used",
    ),
    Mutant(
        "commit_keeps_the_difference",
        "kvstore/core/store.py",
        "        self._memory.keep_only(entry, entry.manifest.payload_bytes)\n",
        "",
        "what was reserved beyond the payload is lost",
        "hole_victim_grows_before_copy",
    ),
    Mutant(
        "no_quarantine",
        "kvstore/core/holdings.py",
        "        put.parked = True\n        return put\n",
        "        put.parked = True\n        self.let_go(put.id)\n        return put\n",
        "pages are lent again while their writer may still write",
        "hole_stopped_writer_wakes",
    ),
    Mutant(
        "dead_writers_pages_are_never_freed",
        "kvstore/core/holdings.py",
        "            if put.writer == writer and put.shared:\n",
        "            if put.writer == writer and not put.shared:\n",
        "quarantine without end",
        "hole_dead_writer",
    ),
    Mutant(
        "commit_before_checksum",
        "kvstore/core/store.py",
        "            call.hash_ok\n            and ",
        "            ",
        "a payload is committed that is not what its writer hashed",
        "store_refuses_wrong_bytes",
    ),
    Mutant(
        "numbers_without_an_epoch",
        "controller/core/world.py",
        "return Run(self.epoch, self._counter)",
        "return Run(1, self._counter)",
        "a restarted controller mints the same numbers again",
        "hole_ticket_minted_twice",
    ),
    Mutant(
        "garbage_before_all_have_reported",
        "controller/core/reconcile.py",
        "if ticket.order.epoch != world.epoch and not world.all_reported:",
        "if ticket.order.epoch != world.epoch and not world.ready:",
        "live payloads are released by a controller that does not know their owners",
        "hole_garbage_before_everyone_reported",
    ),
    Mutant(
        "growth_reserve_on_an_empty_worker",
        "controller/core/pools.py",
        "blocks - growth_reserve * self.neighbours()",
        "blocks - growth_reserve * max(1, self.neighbours())",
        "a prompt that just fits is never admitted",
        "hole_reserve_on_empty_worker",
    ),
    Mutant(
        "placed_by_prompt_alone",
        "controller/core/sequences.py",
        "        return max(self.tokens_max, self.capacity_min_tokens)",
        "        return max(self.tokens, self.capacity_min_tokens)",
        "a request is placed where it can never finish",
        "hole_placed_where_it_cannot_finish",
    ),
    Mutant(
        "newcomers_overtake_the_swapped",
        "controller/core/pools.py",
        "in_hand = worker.cold or worker.earmarks or worker.jobs or worker.pending",
        "in_hand = worker.earmarks or worker.jobs or worker.pending",
        "room is made for newcomers while others wait to come back",
        "hole_newcomers_overtake_the_swapped",
    ),
    Mutant(
        "ties_by_id",
        "controller/core/victims.py",
        "return (candidate.last_step, -candidate.arrival_ms, candidate.seq)",
        "return (candidate.last_step, 0, candidate.seq)",
        "the id decides who suffers",
        "hole_ties_by_latest_arrival",
    ),
    Mutant(
        "shared_blocks_counted_as_freed",
        "workers/core/reports.py",
        "usage=tuple(r.usage(roster.blocks.private(r.blocks)) for r in residents),",
        "usage=tuple(r.usage(len(r.blocks)) for r in residents),",
        "victims are chosen for blocks that do not come free",
        "hole_shared_blocks_counted_as_freed",
    ),
    Mutant(
        "no_min_residency",
        "controller/core/swaps.py",
        "protected = place.protected and advanced < residency",
        "protected = False",
        "what has just come back is swapped out again",
        "hole_min_residency",
    ),
    Mutant(
        "shortage_said_once",
        "workers/core/reports.py",
        "            blocks_short=self._steps.blocks_short,\n",
        "            blocks_short=0\n"
        "            if self.__dict__.get('said') == self._steps.blocks_short\n"
        "            else self.__dict__.update(said=self._steps.blocks_short)\n"
        "            or self._steps.blocks_short,\n",
        "a new controller does not hear of a shortage",
        "hole_controller_forgets_relief",
    ),
    Mutant(
        "takeover_starts_afresh",
        "workers/core/orders.py",
        "        return isinstance(order, Admit) or resident.computed > 0\n",
        "        return False\n",
        "the run of a dead gateway loses its KV",
        "hole_gateway_dies_live_run_outranked",
    ),
    Mutant(
        "ticket_released_before_reload",
        "controller/core/reconcile.py",
        "    if place.withdrawn or (not place.confirmed and place.order is not None):\n"
        '        return getattr(place.order, "ticket", None) == ticket\n',
        "    if place.withdrawn or (not place.confirmed and place.order is not None):\n"
        "        return False\n",
        "the payload goes as soon as somebody has been told to load it",
        "payload_outlives_its_reload",
    ),
    Mutant(
        "orders_are_not_sent_again",
        "controller/core/reconcile.py",
        "world.send(place.worker, place.order, again=True)",
        "pass",
        "an order that was lost is never missed",
        "order_lost_is_sent_again",
    ),
    Mutant(
        "lost_workers_requests_stay",
        "controller/core/residents.py",
        "        _vanish(world, worker, sequence)\n        if sequence.place is None:\n",
        "        if sequence.place is None:\n",
        "who ran on a lost worker is forgotten",
    ),
    Mutant(
        "cached_prefix_hides_scores",
        "workers/core/talk.py",
        "known = resident.tokens[: resident.computed_max + 1]",
        "known = resident.tokens",
        "prompt tokens found in the prefix cache get no log-probabilities",
    ),
    Mutant(
        "tokens_passed_on_without_their_numbers",
        "workers/core/sequence.py",
        "elif record.sampling.logprobs is not None:",
        "elif record.sampling.logprobs is not None and self.record is None:",
        "tokens that only a dead gateway had the log-probabilities of go to the next one bare",
    ),
    Mutant(
        "client_forgets_its_scores",
        "client/core/resume.py",
        "                    self._scored,\n",
        "                    0,\n",
        "a resuming client is told the prompt's log-probabilities twice",
    ),
    Mutant(
        "refusal_is_forgotten",
        "client/core/resume.py",
        'code = self._refusal.code or "INTERNAL"',
        'code = "INTERNAL"',
        "a refusal whose stream broke before its status came is called a failure",
    ),
    Mutant(
        "client_forgets_what_it_has",
        "client/core/resume.py",
        "                    tuple(tuple(tokens) for tokens in self._tokens),\n",
        "                    tuple(() for _ in self._tokens),\n",
        "a resuming client asks for everything again",
    ),
    Mutant(
        "exact_is_forgotten_by_the_valve",
        "workers/core/valve.py",
        "        if any(chunk.record.exact for chunk in chunks):\n",
        "        if any(chunk.record.exact for chunk in ()):\n",
        "an exact request takes part in steps of reduced precision",
        "exact_holds_a_step_at_fp16",
    ),
    Mutant(
        "exact_reuses_tagged_blocks",
        "workers/core/blocks.py",
        "if found is None or (pure and self._tags[found] is not Precision.FP16):",
        "if found is None:",
        "an exact request goes on from KV that FP8 steps have computed",
        "exact_takes_no_fp8_block",
    ),
    Mutant(
        "tags_are_not_inherited",
        "workers/core/purity.py",
        "if tag is Precision.FP16 and self.fp16 == start:",
        "if tag is Precision.FP16:",
        "KV of an FP16 step that attended FP8 history is taken for pure",
    ),
    Mutant(
        "payloads_lose_their_tags",
        "workers/core/swaps.py",
        "                resident.purity.at(resident.computed),\n",
        "                Precision.FP16,\n",
        "KV of FP8 steps comes back from a store as pure",
    ),
    Mutant(
        "shares_are_lost_with_their_gateway",
        "gateway/core/record.py",
        "        for index, precision in enumerate(said):\n",
        "        for index, precision in enumerate(said[:0]):\n",
        "tokens that only the client knows the mode of count as FP16",
        "shares_outlive_worker_and_gateway",
    ),
    Mutant(
        "closing_tail_is_handed_out",
        "workers/core/blocks.py",
        "        if self.tail is Tail.OPEN:\n            count += len(self._free_tail)",
        "        if self.tail is not Tail.SHUT:\n            count += len(self._free_tail)",
        "blocks of the tail are handed out while it is being emptied",
    ),
    Mutant(
        "planes_return_onto_a_step",
        "workers/core/blocks.py",
        "return self.tail_held == 0 and self._quarantined_tail == 0",
        "return self.tail_held == 0",
        "planes are copied over blocks that a step, or a copy, still reads",
        "shed_moves_what_is_in_the_tail",
    ),
    Mutant(
        "fp16_step_without_planes",
        "workers/core/shedding.py",
        "return 0 if self.state is ShedState.HELD else self._top",
        "return 0",
        "a step reads lower planes that are away",
        "shed_for_a_request_that_did_not_fit",
    ),
    Mutant(
        "moved_block_stays_in_the_table",
        "workers/core/shedding.py",
        "                owner.blocks[owner.blocks.index(block)] = target\n",
        "",
        "a table names a block whose contents have moved",
        "shed_moves_what_is_in_the_tail",
    ),
    Mutant(
        "exact_request_starves",
        "workers/core/shedding.py",
        "elif self.state is ShedState.OPEN and not wanted and now_ms",
        "elif self.state is ShedState.OPEN and not (wanted or self._exact_here()) and now_ms",
        "planes do not return to where an exact request waits for them",
        "shed_exact_request_forces_the_return",
    ),
    Mutant(
        "exact_request_computed_in_fp8",
        "workers/core/shedding.py",
        "return self.state is ShedState.HELD or not _exact(resident)",
        "return True",
        "an exact request takes steps while the planes are away",
        "shed_exact_request_forces_the_return",
    ),
    Mutant(
        "failed_return_taken_for_done",
        "workers/core/shedding.py",
        "        if event.ok:\n",
        "        if event.ok or event.detail:\n",
        "steps read planes whose copy has failed",
        "shed_return_fails_and_is_tried_again",
    ),
    Mutant(
        "waiting_exact_keeps_its_blocks",
        "workers/core/shedding.py",
        "            self._trim()\n",
        "            pass\n",
        "exact requests without KV hold the tail for which they wait",
        "shed_exact_requests_wait_without_blocks",
    ),
    Mutant(
        "promises_of_the_tail_stand",
        "workers/core/shedding.py",
        "            self._cut_promises()\n",
        "",
        "blocks of a closing tail are promised",
    ),
    Mutant(
        "exact_placed_by_the_tail",
        "controller/core/shedding.py",
        "    return worker.ordinary_tokens >= sequence.capacity_needed\n",
        "    return worker.capacity_tokens >= sequence.capacity_needed\n",
        "an exact request is placed where it can never end",
    ),
)


def copy_cores(target: Path) -> None:
    """Copy the five cores and the simulator to ``target`` as a package without any shell."""
    package = target / "deepinfer"
    ignore = shutil.ignore_patterns("__pycache__")
    for area in AREAS:
        shutil.copytree(ROOT / area / "core", package / area / "core", ignore=ignore)
        (package / area / "__init__.py").touch()
    shutil.copytree(ROOT / "deploy" / "sim", package / "deploy" / "sim", ignore=ignore)
    (package / "deploy" / "__init__.py").touch()


def hunt(mutant: Mutant, *, seeds: int = SEEDS, stories: bool = True) -> str | None:
    """Plant the mutant in a copy and return what caught it, or None if it survived."""
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its text occurs {text.count(mutant.old)} times")
    told: list[Path] = []
    if stories:
        told = sorted(STORIES.glob(f"{mutant.story or '*'}.story"))
    with tempfile.TemporaryDirectory() as folder:
        copy_cores(Path(folder))
        (Path(folder) / "deepinfer" / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        done = subprocess.run(
            [sys.executable, "-c", _HUNT, str(seeds), *map(str, told)],
            env={"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{mutant.name}: {done.stderr}")
    return done.stdout.strip() or None


def main(arguments: list[str]) -> int:
    """Hunt every mutant, or those named; return how many survived."""
    parser = argparse.ArgumentParser(description="Plant bugs in the cores and look for them.")
    parser.add_argument("--seeds-only", action="store_true", help="without stories")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--output", type=Path, help="write what caught each as JSON")
    parser.add_argument("names", nargs="*", help="which; default: all")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    caught: dict[str, str | None] = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        hunts = pool.map(lambda mutant: hunt(mutant, stories=not given.seeds_only), chosen)
        for mutant, found in zip(chosen, hunts, strict=True):
            caught[mutant.name] = found
            sys.stdout.write(f"{mutant.name:40s} {found or 'SURVIVED'}\n")
            sys.stdout.flush()
    survivors = [name for name, found in caught.items() if found is None]
    if given.output is not None:
        from deepinfer.deploy.bench.results import write_result

        command = "python tests/sim/mutants.py" + " --seeds-only" * given.seeds_only
        figures = {
            "mutants": len(caught),
            "caught": len(caught) - len(survivors),
            "survivors": survivors,
            "seeds_at_most": SEEDS,
            "caught_by": caught,
        }
        write_result(given.output, command, figures)
    return len(survivors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
