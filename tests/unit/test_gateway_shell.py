"""The gateway's shell: a bug in the core is not survived, and links have a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deepinfer.gateway import shell as shell_module
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import Code, EndStream, StreamReady, Tick, ToStream
from deepinfer.gateway.intake import ModelCard
from deepinfer.gateway.keys import is_resume_key, mint_request_id, resume_key, seed_of
from deepinfer.gateway.shell import Shell, WorkerLink, wall_clock
from deepinfer.kvstore.core.ids import GatewayId, Incarnation
from deepinfer.kvstore.core.messages import Ack, Attach, Delta, Tokens
from deepinfer.kvstore.core.requests import FinishReason, SamplingParams, Token
from deepinfer.text.load import load_tokenizer
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_bench import R1, SEQ, W1
from support.requests import record


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    tokenizer = load_tokenizer(write_byte_tokenizer(tmp_path / "tokenizer"))
    card = ModelCard(
        model="bytes",
        tokenizer=tokenizer,
        max_context_tokens=512,
        vocab_size=tokenizer.vocab_size,
        kv_cache_dtype="fp16",
        eos_token_ids=tokenizer.eos_ids,
    )
    return Shell(GatewayId("g"), Incarnation(1), GatewayConfig(), card)


def test_a_bug_in_the_core_ends_the_tick(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise AssertionError("an invariant does not hold")

    with monkeypatch.context() as patch:
        patch.setattr(shell.core, "handle", bug)
        with pytest.raises(AssertionError, match="invariant"):
            shell.tell(Tick())
    with pytest.raises(AssertionError, match="invariant"):
        asyncio.run(asyncio.wait_for(shell.tick(), 5))


def test_an_idle_core_is_checked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise AssertionError("it was checked")

    monkeypatch.setattr(shell.core, "check", check)
    with pytest.raises(AssertionError, match="it was checked"):
        asyncio.run(asyncio.wait_for(shell.tick(), 5))


def test_stop_strings_are_found_where_tokens_split_them(shell: Shell) -> None:
    async def test() -> None:
        stops = record("r1", sampling=SamplingParams(stop=("é!",)))
        stream = shell.generate(stops, "key", continues_text=True, include_events=False)
        link = shell.open_link(W1)
        shell.from_worker(link, Attach(SEQ, R1, W1))
        ids = shell.card.tokenizer.encode("café! and more", add_special_tokens=False)
        for index, token_id in enumerate(ids):
            shell.from_worker(link, Tokens(SEQ, R1, index, (Token(token_id),), None))
        await stream.next()  # Accepted
        shell.tell(StreamReady(stream.stream))
        effect = await stream.next()
        assert isinstance(effect, ToStream)
        assert isinstance(effect.message, Delta)
        sent = tuple(token.id for token in effect.message.tokens)
        assert sent == tuple(ids[: len("café!".encode())])
        assert stream.texts[0].push(sent) + stream.texts[0].finish() == "caf"
        assert stream.texts[0].stop_string == "é!"
        assert stream.texts[0].stop_token(FinishReason.STOP) is None
        shell.close_stream(stream)
        shell.close_link(link)

    asyncio.run(test())


def test_a_link_that_takes_nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "LINK_QUEUE_MAX", 3)

    async def test() -> None:
        link = WorkerLink(W1)
        for index in range(3):
            link.put(Ack(SEQ, R1, index, False))
        before = link.broken
        link.put(Ack(SEQ, R1, 3, False))
        assert (before, link.broken) == (False, True)
        assert await link.next() is None

    asyncio.run(test())


def test_a_newer_link_of_a_worker_replaces_the_older(shell: Shell) -> None:
    async def test() -> None:
        older, newer = shell.open_link(W1), shell.open_link(W1)
        assert await older.next() is None
        shell.close_link(older)
        shell.from_worker(older, Attach(SEQ, R1, W1))
        assert shell.snapshot()["worker_links"] == 1
        shell.close_link(newer)
        assert shell.snapshot()["worker_links"] == 0

    asyncio.run(test())


def test_keys_and_seeds_are_functions_of_the_id() -> None:
    first, second = mint_request_id(GatewayId("g")), mint_request_id(GatewayId("g"))
    assert first != second
    key = resume_key(b"secret", first)
    assert len(key) == 64
    assert is_resume_key(b"secret", first, key)
    assert not is_resume_key(b"secret", second, key)
    assert not is_resume_key(b"other", first, key)
    assert not is_resume_key(b"secret", first, "é")
    assert seed_of(first) == seed_of(first) != seed_of(second)
    assert 0 <= seed_of(first) < 2**63
    # RFC 2104 with SHA-256, computed by another implementation (openssl dgst -sha256 -hmac).
    assert resume_key(b"key", "r") == (
        "40aae029c37ca6ca5eb0d7830336dc93d8d1e89aba66758fd2a8add314240f4c"
    )


def test_the_clock_only_goes_forward() -> None:
    clock = wall_clock()
    times = [clock() for _ in range(100)]
    assert times == sorted(times)
    assert times[0] > 1_600_000_000_000


def test_a_cluster_that_stops_ends_every_stream_for_good(shell: Shell) -> None:
    async def test() -> None:
        stream = shell.generate(record("r1"), "key", continues_text=True, include_events=False)
        closing = asyncio.create_task(shell.close("the cluster was stopped"))
        assert isinstance(await stream.next(), ToStream)  # Accepted, which was under way
        end = EndStream(stream.stream, Code.FAILED_PRECONDITION, "the cluster was stopped")
        assert await stream.next() == end
        await asyncio.sleep(0.05)
        assert not closing.done()
        shell.close_stream(stream)
        await asyncio.wait_for(closing, 5)
        late = shell.generate(record("r2"), "key", continues_text=True, include_events=False)
        assert await late.next() == end._replace(stream=late.stream)

    asyncio.run(test())
