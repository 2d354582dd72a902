"""Who runs next: budgets are kept, nobody starves, no block is used twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.kvstore.core.ids import GatewayId, RequestId, Run, Seq
from deepinfer.kvstore.core.requests import RequestRecord, SamplingParams, Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.attach import Attachment
from deepinfer.workers.core.batch import Batch, plan
from deepinfer.workers.core.blocks import BlockManager
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.sequence import Resident


def resident(arrival: int, prompt_tokens: int, max_tokens: int) -> Resident:
    prompt = tuple(range(100 * arrival, 100 * arrival + prompt_tokens))
    name = RequestId(f"r{arrival}")
    return Resident(
        seq=Seq(name, 0),
        run=Run(1, arrival),
        gateway=GatewayId("g"),
        arrival=arrival,
        order=Run(1, arrival),
        max_total_tokens=prompt_tokens + max_tokens,
        since_ms=0,
        attachment=Attachment(0, 0, answered=True),
        state=State.PREFILL,
        record=RequestRecord(
            request=name,
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_ms=0,
            seed=0,
        ),
        tokens=list(prompt),
    )


def config(
    *,
    blocks_total: int = 1000,
    max_batch_tokens: int = 16,
    max_batch_seqs: int = 3,
    prefill_chunk_tokens: int = 8,
) -> WorkerConfig:
    return WorkerConfig(
        blocks_total=blocks_total,
        block_size=4,
        block_bytes=1,
        max_batch_tokens=max_batch_tokens,
        max_batch_seqs=max_batch_seqs,
        prefill_chunk_tokens=prefill_chunk_tokens,
    )


def compute(batch: Batch, step: int) -> None:
    """Apply a step as the core does."""
    for chunk, member in zip(batch.chunks, batch.residents, strict=True):
        member.computed += len(chunk.token_ids)
        member.last_step = step
        if chunk.sample:
            member.accept(Token(7))
            if member.finish is None:
                member.settle()
            else:
                member.go(State.FINISHED)


@given(
    prompt_tokens=st.integers(1, 30),
    choices=st.integers(2, 5),
    limits=st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(1, 9)),
    arrivals=st.permutations(range(5)),
)
def test_choices_compute_what_they_share_once(
    prompt_tokens: int, choices: int, limits: tuple[int, int, int], arrivals: list[int]
) -> None:
    seats, extra, chunk_max = limits
    rules = config(
        max_batch_seqs=seats, max_batch_tokens=seats + extra, prefill_chunk_tokens=chunk_max
    )
    size = rules.block_size
    blocks = BlockManager(rules.blocks_total, size)
    members = []
    for choice in range(choices):
        member = resident(1, prompt_tokens, 2)
        member.seq = member.seq._replace(choice=choice)
        member.arrival = arrivals[choice]
        member.blocks = blocks.allocate(rules.blocks_for(prompt_tokens))
        members.append(member)
    computed: dict[int, int] = {}
    for step in range(1, 400):
        batch = plan(members, blocks, blocks.available, rules, step)
        if not batch.chunks:
            break
        tables = [member.blocks for member in members]
        blocks.check_tables(tables, [])
        written = [
            chunk.block_table[position // size] * size + position % size
            for chunk in batch.chunks
            for position in range(chunk.start, chunk.start + len(chunk.token_ids))
        ]
        assert len(set(written)) == len(written), "two write to one place"
        for chunk in batch.chunks:
            for position in range(
                chunk.start, min(chunk.start + len(chunk.token_ids), prompt_tokens)
            ):
                computed[position] = computed.get(position, 0) + 1
        compute(batch, step)
        for member in batch.residents:  # as Steps does
            while (len(member.chain) + 1) * size <= member.computed:
                index = len(member.chain)
                parent = member.chain[-1] if member.chain else blocks.root
                digest = blocks.digest(parent, member.tokens[index * size : (index + 1) * size])
                member.chain.append(digest)
                blocks.register(member.blocks[index], digest)
    assert all(member.finish is not None for member in members)
    shared = (prompt_tokens - 1) // size * size
    assert [computed[position] for position in range(shared)] == [1] * shared
    assert all(computed[position] == choices for position in range(shared, prompt_tokens))


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8)
limits = st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(1, 9))


@given(shapes=shapes, limits=limits)
def test_with_blocks_enough_everyone_finishes_in_bounded_time(
    shapes: list[tuple[int, int]], limits: tuple[int, int, int]
) -> None:
    seats, extra, chunk_max = limits
    rules = config(
        max_batch_seqs=seats, max_batch_tokens=seats + extra, prefill_chunk_tokens=chunk_max
    )
    blocks = BlockManager(rules.blocks_total, rules.block_size, prefix_cache=False)
    members = [resident(i, *shape) for i, shape in enumerate(shapes, 1)]
    last_run = {member.seq: 0 for member in members}
    # Each sequence needs at most one step a token; taking turns in pairs doubles that.
    steps_max = 2 * sum(prompt + output for prompt, output in shapes) + 2
    for step in range(1, steps_max + 1):
        batch = plan(members, blocks, blocks.available, rules, step)
        if not batch.chunks:
            break
        assert batch.blocks_short == 0
        assert len(batch.chunks) <= seats
        assert sum(len(chunk.token_ids) for chunk in batch.chunks) <= seats + extra
        for chunk, member in zip(batch.chunks, batch.residents, strict=True):
            assert chunk.seq == member.seq
            assert 1 <= len(chunk.token_ids) <= chunk_max
            assert list(chunk.token_ids) == member.tokens[chunk.start :][: len(chunk.token_ids)]
            assert chunk.sample == (chunk.start + len(chunk.token_ids) == len(member.tokens))
            assert chunk.index == len(member.generated)
            last_run[chunk.seq] = step
        compute(batch, step)
        for member in members:
            # A decode waits for its turn among the decodes, never longer.
            if member.state is State.DECODE:
                assert step - last_run[member.seq] <= 2 * len(members)
    assert all(member.state is State.FINISHED for member in members)
    tables = [block for member in members for block in member.blocks]
    assert len(tables) == len(set(tables))


@given(shapes=shapes, total=st.integers(1, 12))
def test_whoever_lacks_a_block_is_left_out_and_the_others_go_on(
    shapes: list[tuple[int, int]], total: int
) -> None:
    rules = config(blocks_total=total)
    blocks = BlockManager(total, rules.block_size, prefix_cache=False)
    members = [resident(i, *shape) for i, shape in enumerate(shapes, 1)]
    for step in range(1, 600):
        spare = blocks.available
        batch = plan(members, blocks, spare, rules, step)
        in_use = [block for member in members for block in member.blocks]
        assert len(in_use) == len(set(in_use)) == total - blocks.available
        for chunk in batch.chunks:
            assert len(chunk.block_table) * rules.block_size >= chunk.start + len(chunk.token_ids)
        if not batch.chunks:
            break
        compute(batch, step)
        for member in members:
            if member.state is State.FINISHED and member.blocks:
                blocks.release(member.blocks)
                member.blocks = []
    unfinished = [member for member in members if member.state is not State.FINISHED]
    if unfinished:
        assert blocks.available == 0, "somebody waits although there is a block"
        assert batch.blocks_short >= len(unfinished)


def test_decodes_come_first_and_a_prefill_keeps_a_seat() -> None:
    rules = config(max_batch_seqs=2, max_batch_tokens=4)
    blocks = BlockManager(50, 4, prefix_cache=False)
    prefill, *decodes = [resident(i, 30, 9) for i in (1, 2, 3, 4)]
    for i, member in enumerate(decodes):
        member.blocks = blocks.allocate(8)
        member.computed, member.last_step = 30, 10 - i
        member.accept(Token(1))
        member.settle()
    batch = plan([prefill, *decodes], blocks, blocks.available, rules, 11)
    assert [chunk.seq.request for chunk in batch.chunks] == ["r4", "r1"], "longest waiting first"
    assert [len(chunk.token_ids) for chunk in batch.chunks] == [1, 3]


def test_with_one_seat_a_prefill_and_a_decode_take_turns() -> None:
    rules = config(max_batch_seqs=1, max_batch_tokens=4, prefill_chunk_tokens=4)
    blocks = BlockManager(50, 4, prefix_cache=False)
    decode, prefill = resident(1, 1, 20), resident(2, 12, 4)
    order = []
    for step in range(1, 8):
        batch = plan([decode, prefill], blocks, blocks.available, rules, step)
        order.append(batch.chunks[0].seq.request)
        compute(batch, step)
    assert order[:6] == ["r2", "r1", "r2", "r1", "r2", "r1"]


def test_a_prefill_that_gets_no_block_does_not_hold_the_only_seat() -> None:
    rules = config(max_batch_seqs=1, max_batch_tokens=4)
    blocks = BlockManager(1, 4, prefix_cache=False)
    decode, prefill = resident(1, 1, 3), resident(2, 12, 4)
    compute(plan([decode], blocks, 1, rules, 5), 5)
    batch = plan([decode, prefill], blocks, blocks.available, rules, 6)
    assert [chunk.seq for chunk in batch.chunks] == [decode.seq]
    assert batch.blocks_short > 0
