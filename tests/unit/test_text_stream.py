"""Streams of text by example: cut characters, leading spaces, stop strings, the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deepinfer.text.detokenizer import Detokenizer
from deepinfer.text.load import load_tokenizer
from deepinfer.text.stop import StopMatcher
from deepinfer.text.stream import TextStream
from deepinfer.text.tokenizer import Tokenizer
from text_samples import byte_level_spec, sentencepiece_spec, write_folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("hf"), byte_level_spec()))


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("hf"), sentencepiece_spec()))


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_id(token) for token in tokens]
    assert None not in found
    return [token_id for token_id in found if token_id is not None]


def test_a_character_is_held_until_it_is_whole(piece: Tokenizer) -> None:
    tokens = ids(piece, "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a")
    text = Detokenizer(piece)
    assert [text.push(token) for token in tokens] == ["", "", "", "🙂", "a"]
    assert text.finish() == ""


def test_a_cut_character_becomes_one_replacement(piece: Tokenizer) -> None:
    text = Detokenizer(piece)
    assert [text.push(t) for t in ids(piece, "a", "<0xF0>", "<0x9F>")] == ["a", "", ""]
    assert text.finish() == "\ufffd"
    text = Detokenizer(piece)
    assert [text.push(t) for t in ids(piece, "<0xF0>", "<0x9F>", "b")] == ["", "", "\ufffdb"]


def test_only_the_first_leading_space_is_the_encoders(piece: Tokenizer) -> None:
    tokens = ids(piece, "▁the", "▁the")
    assert piece.decode(tokens) == "the the"
    assert TextStream(piece, continues_text=True).extend(tokens) == " the the"
    assert piece.decode(ids(piece, "▁▁", "a")) == " a"
    assert piece.decode(ids(piece, "a", "▁the")) == "a the"


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("the<|im_end|>time")
    assert TextStream(byte_level).extend(tokens) == "thetime"
    assert TextStream(byte_level, skip_special_tokens=False).extend(tokens) == "the<|im_end|>time"


def test_a_character_goes_on_after_a_skipped_token(piece: Tokenizer) -> None:
    tokens = ids(piece, "<0xC3>", "</s>", "<0xA9>")
    assert TextStream(piece).extend(tokens) == "é"
    assert TextStream(piece, skip_special_tokens=False).extend(tokens) == "\ufffd</s>\ufffd"


def test_stop_string_across_tokens(piece: Tokenizer) -> None:
    stream = TextStream(piece, ["ehe"], continues_text=True)
    # "thethe" does not hold "ehe", but both of its "e" might have begun it.
    assert [stream.push(t) for t in ids(piece, "the", "the")] == ["th", "eth"]
    stream = TextStream(piece, ["ehe"])
    assert [stream.push(t) for t in ids(piece, "the", "h", "e", "a")] == ["th", "", "", ""]
    assert (stream.stopped, stream.stop_string, stream.tokens) == (True, "ehe", 3)
    assert stream.finish() == ""


def test_stop_string_may_be_included(piece: Tokenizer) -> None:
    stream = TextStream(piece, ["ehe"], include_stop=True)
    assert stream.extend(ids(piece, "the", "h", "e", "a")) == "thehe"


def test_what_was_held_comes_out_at_the_end(piece: Tokenizer) -> None:
    stream = TextStream(piece, ["the end"])
    assert stream.extend(ids(piece, "a", "▁the", "<0xF0>")) == "a "
    assert stream.finish() == "the\ufffd"
    assert stream.finish() == ""
    with pytest.raises(RuntimeError, match="push after finish"):
        stream.push(0)


def test_the_first_to_end_wins_and_then_the_longest() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("xabc") == "xa"
    assert matcher.match == "b"
    matcher = StopMatcher(["bc", "abc"])
    assert matcher.push("xabc") == "x"
    assert matcher.match == "abc"


def test_unarmed_matches_are_passed_over_but_followed() -> None:
    matcher = StopMatcher(["b", "abc"])
    assert matcher.push("xab", armed=False) == "x"
    assert matcher.push("c") == ""
    assert matcher.match == "abc"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must be non-empty"):
        StopMatcher(["a", ""])


def test_hostile_stop_strings_cost_no_more_than_their_length() -> None:
    stops = ["a" * 50_000 + chr(ord("b") + i) for i in range(2)]
    matcher = StopMatcher(stops)
    started = time.process_time()
    for _ in range(100):
        matcher.push("a" * 1000)
    # Linear work is some 0.1 s; quadratic would be hours.
    assert time.process_time() - started < 10
    assert len(matcher.finish()) == 50_000


def test_streams_of_a_real_vocabulary(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "models" / "stories260k")
    tokens = tokenizer.encode("Once upon a time", add_special_tokens=False)
    assert TextStream(tokenizer).extend(tokens) == "Once upon a time"
    assert TextStream(tokenizer, ["upon"]).extend(tokens) == "Once "
