"""Streaming text equals naive text: whatever the tokens, the stop strings and the resume point.

The naive reading has all tokens at hand: join their bytes, decode once, and look at every prefix
of the text, character by character, for one that ends with a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.load import load_tokenizer
from deepinfer.text.stop import StopMatcher
from deepinfer.text.stream import TextStream
from deepinfer.text.tokenizer import Tokenizer
from text_samples import CORPUS, byte_level_spec, sentencepiece_spec, write_folder

SAMPLES = ("the 🙂 time", "naïve café!", "aaaa", "東京は日本", " a  the, ")


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    spec = byte_level_spec() if request.param == "byte-level" else sentencepiece_spec()
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("hf"), spec))


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Draw pieces of real text between arbitrary ids: special, ill-formed, out of range."""
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            text = draw(st.sampled_from(SAMPLES))
            tokens += tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = st.integers(0, tokenizer.vocab_size + 3)
            tokens += draw(st.lists(ids, max_size=4))
    return tokens


def naive_text(tokenizer: Tokenizer, tokens: Sequence[int], skip: bool, continues: bool) -> str:
    kept = [t for t in tokens if not (skip and t in tokenizer.special_ids)]
    text = b"".join(map(tokenizer.token_bytes, kept)).decode(errors="replace")
    if tokenizer.form.leading_spaces and not continues:
        text = text.removeprefix(" ")
    return text


def naive_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, str] | None:
    """Return (end, stop) of the first, then longest, stop string that ends beyond ``after``."""
    for end in range(after + 1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            return end, max(ended, key=len)
    return None


@st.composite
def stop_lists(draw: st.DrawFn, text: str) -> list[str]:
    """Draw stop strings: pieces of ``text``, so that they occur, and near misses of them."""
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        piece = text[start : start + draw(st.integers(1, 6))]
        piece += draw(st.sampled_from(["", "", "x"]))
        # U+FFFD is how a cut character ends, which only `finish` may say: nobody stops at it.
        if piece and "\ufffd" not in piece:
            stops.append(piece)
    return stops


@given(st.data())
def test_equals_decoding_everything_and_looking(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(token_lists(tokenizer))
    skip, include, continues = (data.draw(st.booleans()) for _ in range(3))
    text = naive_text(tokenizer, tokens, skip, continues)
    stops = data.draw(stop_lists(text))
    found = naive_stop(text, stops)

    stream = TextStream(tokenizer, stops, skip, include, continues_text=continues)
    shown = stream.extend(tokens)
    if found is None:
        assert not stream.stopped
        assert stream.tokens == len(tokens)
        assert shown + stream.finish() == text
        return
    end, stop = found
    assert (stream.stopped, stream.stop_string) == (True, stop)
    assert shown == text[: end if include else end - len(stop)]
    assert stream.finish() == ""
    texts = (naive_text(tokenizer, tokens[:n], skip, continues) for n in range(len(tokens) + 1))
    assert stream.tokens == next(n for n, t in enumerate(texts) if t[:end] == text[:end])


@given(st.data())
def test_a_resumed_stream_continues_exactly(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(token_lists(tokenizer))
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    minimum = data.draw(st.integers(0, 3))
    stops = data.draw(stop_lists(naive_text(tokenizer, tokens, skip, False)))

    def new() -> TextStream:
        return TextStream(tokenizer, stops, skip, include, min_tokens=minimum)

    whole = new()
    pieces = [whole.push(token) for token in tokens]
    tail = whole.finish()
    cut = data.draw(st.integers(0, len(tokens)))
    resumed = new()
    assert resumed.extend(tokens[:cut]) == "".join(pieces[:cut])
    assert [resumed.push(token) for token in tokens[cut:]] == pieces[cut:]
    assert resumed.finish() == tail
    assert (resumed.stopped, resumed.tokens) == (whole.stopped, whole.tokens)


@given(st.data())
def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(token_lists(tokenizer))
    minimum = data.draw(st.integers(0, len(tokens)))
    stops = data.draw(stop_lists(naive_text(tokenizer, tokens, True, False)))
    stream = TextStream(tokenizer, stops, min_tokens=minimum)
    before = TextStream(tokenizer).extend(tokens[:minimum])
    found = naive_stop(naive_text(tokenizer, tokens, True, False), stops, after=len(before))
    shown = stream.extend(tokens)
    assert stream.stopped == (found is not None)
    assert not stream.stopped or stream.tokens > minimum
    if found is not None:
        assert shown == naive_text(tokenizer, tokens, True, False)[: found[0] - len(found[1])]


@given(st.data())
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    text = text.replace("\ufffd", "")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, skip_special_tokens=False)
    pieces = [stream.push(token) for token in tokens]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


@given(st.data())
def test_decode_agrees_with_the_tokenizers_package(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokens = data.draw(token_lists(tokenizer))
    skip = data.draw(st.booleans())
    theirs = tokenizer._backend.decode(tokens, skip_special_tokens=skip)
    ours = tokenizer.decode(tokens, skip_special_tokens=skip)
    if not tokenizer.form.byte_level and "\ufffd" in theirs:
        return  # they rewrite a whole run of bytes after the fact; see Detokenizer
    assert ours == theirs


@given(
    st.lists(st.text("ab", max_size=4)),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_matcher_does_not_mind_where_text_is_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.match is None:
            # What is held back might still begin a stop string, and nothing more is held.
            seen = text[: len(shown) + len(matcher._held)]
            held = seen[len(shown) :]
            assert held == "" or any(s.startswith(held) for s in stops)
            longer = [seen[i:] for i in range(len(shown))]
            assert not any(s.startswith(tail) for s in stops for tail in longer)
    found = naive_stop(text, stops)
    if found is None:
        assert shown + matcher.finish() == text
        assert matcher.finish() == ""
    else:
        assert matcher.match == found[1]
        assert shown == text[: found[0] if include else found[0] - len(found[1])]
        assert matcher.push("more") == matcher.finish() == ""


def test_corpus_round_trips(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "hf", byte_level_spec()))
    tokens = tokenizer.encode(CORPUS)
    assert TextStream(tokenizer).extend(tokens) == CORPUS
