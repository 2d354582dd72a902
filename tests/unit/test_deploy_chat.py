"""A conversation: what is sent, kept and shown, whatever happens to an answer."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from deepinfer.client import (
    Choice,
    Client,
    Delta,
    Event,
    Finished,
    Notice,
    ResourceExhausted,
    Retrying,
    SwapStats,
    Timings,
    Usage,
)
from deepinfer.deploy.chat import Chat, printable


def delta(text: str) -> Delta:
    return Delta(choice=0, position=0, token_ids=(1,), text=text, logprobs=())


def finished(text: str, *, swaps: int = 0) -> Finished:
    timings = Timings(
        ttft_s=0.25,
        intervals_s=(0.1, 0.1),
        total_s=0.5,
        reconnects=0,
        gateway_ttft_s=None,
        gateway_tpot_s=None,
    )
    choice = Choice(
        index=0,
        text="",
        token_ids=(1, 2, 3),
        finish_reason="stop",
        message="",
        matched_stop=None,
        logprobs=(),
        usage=Usage(prompt_tokens=4, completion_tokens=3),
        swaps=SwapStats(swaps=swaps, resumes=swaps, stall_s=0.5 * swaps),
        timings=timings,
    )
    return Finished(choice=choice, text=text)


def notice(kind: str, *, worker: str = "worker-0", store: str = "store-local") -> Notice:
    return Notice(
        kind=kind,
        choice=0,
        worker=worker,
        store=store,
        blocks=3,
        payload_bytes=3 << 20,
        copy_s=0.002,
    )


class FakeStream:
    """Plays events; an exception among them is raised."""

    def __init__(self, events: list[Event | BaseException]) -> None:
        self._events = events
        self.closed = False

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, BaseException):
                raise event
            yield event


class FakeClient(Client):
    """Answers each request with the next script; remembers what it was asked."""

    def __init__(self, *scripts: list[Event | BaseException]) -> None:
        self.streams = [FakeStream(script) for script in scripts]
        self.asked: list[tuple[list[dict[str, str]], dict[str, Any]]] = []

    def stream(self, prompt: Any, **options: Any) -> Any:
        self.asked.append((prompt, options))
        return self.streams[len(self.asked) - 1]


def talk(client: FakeClient, *lines: str, **settings: Any) -> tuple[Chat, str, str]:
    out, err = io.StringIO(), io.StringIO()
    chat = Chat(client, {"seed": 7}, Console(file=out), Console(file=err, width=200), **settings)
    chat.run(iter(lines))
    return chat, out.getvalue(), err.getvalue()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_without_events_only_a_silent_cluster_is_told_of() -> None:
    retrying = Retrying(accepted=True, patience_s=60.0, detail="a:1: [x] refused")
    client = FakeClient([delta("fo"), notice("swapped_out"), retrying, finished("ur")])
    _, out, err = talk(client, "2 + 2?")
    assert out == "four\n"
    first, _ = err.splitlines()
    assert first == "no answer yet: a:1: [x] refused; trying again for up to 60 s"


def test_each_turn_is_sent_with_all_before_it() -> None:
    client = FakeClient([delta("four"), finished("!")], [finished("nine")])
    chat, out, err = talk(client, "2 + 2?\n", "\n", "and 4 + 5?\n", "/quit", "never asked")
    assert out == "four!\nnine\n"
    assert client.asked == [
        ([user("2 + 2?")], {"seed": 7, "include_events": True}),
        (
            [user("2 + 2?"), model("four!"), user("and 4 + 5?")],
            {"seed": 7, "include_events": True},
        ),
    ]
    assert "[stop, 3 tokens, first after 0.25 s, 10.0 tok/s]" in err
    assert not chat.failed


def test_ctrl_c_ends_the_answer_and_keeps_the_chat_and_what_was_read() -> None:
    client = FakeClient([delta("once upon"), KeyboardInterrupt()], [finished("b")])
    chat, out, err = talk(client, "a story", "go on")
    assert out == "once upon\nb\n"
    assert "[aborted]" in err
    assert client.streams[0].closed
    assert client.asked[1][0] == [user("a story"), model("once upon"), user("go on")]
    assert not chat.failed


def test_a_refused_turn_is_told_and_forgotten() -> None:
    client = FakeClient([ResourceExhausted("needs 9 blocks, has 8")], [finished("yes")])
    chat, _, err = talk(client, "long", "short")
    assert "error: needs 9 blocks, has 8" in err
    assert client.asked[1][0] == [user("short")]
    assert not chat.failed
    assert "/reset" not in err
    client = FakeClient([finished("a")], [ResourceExhausted("needs 9 blocks, has 8")])
    _, _, err = talk(client, "short", "long")
    assert "too long: /reset forgets it" in err
    chat, _, _ = talk(FakeClient([ResourceExhausted("no")]), "long")
    assert chat.failed


def test_reset_and_system_begin_anew() -> None:
    client = FakeClient([finished("1")], [finished("2")], [finished("3")])
    talk(client, "a", "/reset", "b", "/system  Be brief. ", "c", system="Old.")
    system = [messages[0]["content"] for messages, _ in client.asked]
    assert system == ["Old.", "Old.", "Be brief."]
    assert [messages[1:] for messages, _ in client.asked] == [[user("a")], [user("b")], [user("c")]]


def test_swaps_are_told_when_asked_for_and_counted_always() -> None:
    events: list[Event | BaseException] = [
        notice("placed"),
        delta("a"),
        notice("swapped_out"),
        notice("resumed", worker="worker-1"),
        finished("b", swaps=1),
    ]
    client = FakeClient(events, [finished("c")])
    _, out, err = talk(client, "x", "y", "/stats", events=True)
    assert client.asked[0][1]["include_events"] is True
    assert out == "ab\nc\n"
    assert "swapped out of worker-0 to store-local: 3 blocks, 3.0 MiB in 2.0 ms" in err
    assert "back on worker-1 from store-local" in err
    assert "placed" not in err
    assert "swapped out 1 times (0.50 s)" in err
    assert "all: 2 answers, 6 tokens, swapped out 1 times, 0.50 s in swaps; 4 messages" in err


def test_a_mistyped_command_is_not_sent() -> None:
    client = FakeClient()
    _, _, err = talk(client, "/rest", "/stats", "/help")
    assert "unknown command /rest" in err
    assert "no answer yet" in err
    assert "/system TEXT" in err
    assert client.asked == []


def test_a_terminal_is_not_steered_by_a_model() -> None:
    assert printable("a\x1b[2Jb\n\tc\r\x9b") == "a\ufffd[2Jb\n\tc\ufffd\ufffd"
    assert printable("né \N{FAMILY}\u200d ") == "né \N{FAMILY}\u200d "
