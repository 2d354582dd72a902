"""SentencePiece vocabularies of GGUF files, against the tokenizer.json that says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.errors import TokenizerError
from deepinfer.text.load import load_tokenizer
from deepinfer.text.tokenizer import Tokenizer
from text_samples import CORPUS, sentencepiece_spec, write_folder, write_metadata

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def parts(spec: dict[str, Any]) -> dict[str, Any]:
    """What a converter writes of a tokenizer.json: a piece's score is its place among merges."""
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    scores = dict.fromkeys(tokens, -1e6)
    for rank, merge in enumerate(spec["model"]["merges"]):
        piece = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        scores[piece] = max(scores[piece], -float(rank))
    types = [
        UNKNOWN if t == "<unk>" else CONTROL if t in ("<s>", "</s>") else
        BYTE if t.startswith("<0x") else NORMAL
        for t in tokens
    ]  # fmt: skip
    return {"tokens": tokens, "scores": [scores[t] for t in tokens], "token_type": types}


def write_pieces(
    path: Path, spec: dict[str, Any], *, architecture: str = "llama", **changes: Any
) -> Path:
    entries = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, **parts(spec), **changes}
    return write_metadata(path, entries, architecture=architecture)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    folder = tmp_path_factory.mktemp("pieces")
    spec = sentencepiece_spec()
    return (
        load_tokenizer(write_pieces(folder / "m.gguf", spec)),
        load_tokenizer(write_folder(folder / "hf", spec)),
    )


@given(st.text(st.sampled_from("the aLy.,!é\n \U0001f642 dno▁") | st.characters(codec="utf-8")))
def test_encodes_and_decodes_as_the_tokenizer_json(
    twins: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    pieces, other = twins
    ids = pieces.encode(text)
    assert ids == other.encode(text)
    assert pieces.decode(ids) == other.decode(ids)


def test_special_ids_and_the_beginning(twins: tuple[Tokenizer, Tokenizer]) -> None:
    pieces, _ = twins
    assert pieces.special_ids == {0, 1, 2}
    assert pieces.eos_ids == (2,)
    assert pieces.prefix_ids == (1,)
    assert pieces.encode("</s>the", add_special_tokens=False)[0] == 2


def test_goldens_of_a_real_vocabulary(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "stories260k"
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    pieces = load_tokenizer(write_pieces(tmp_path / "m.gguf", spec))
    other = load_tokenizer(folder)
    text = (shared_data / "prompts" / "shakespeare_300k.txt").read_text(encoding="utf-8")[:50_000]
    for line in [*text.splitlines(), CORPUS]:
        assert pieces.encode(line) == other.encode(line), line


def test_a_file_may_say_that_no_space_comes_first(tmp_path: Path) -> None:
    spec = sentencepiece_spec()
    bare = load_tokenizer(write_pieces(tmp_path / "m.gguf", spec, add_space_prefix=False))
    prefixed = load_tokenizer(write_pieces(tmp_path / "n.gguf", spec))
    assert bare.encode("the", add_special_tokens=False) == [bare.token_id("the")]
    assert prefixed.encode("the", add_special_tokens=False) == [bare.token_id("▁the")]
    assert bare.decode(bare.encode(" the")) == " the"
    without = load_tokenizer(write_pieces(tmp_path / "o.gguf", spec, add_bos_token=False))
    assert without.prefix_ids == ()


def test_phi3_takes_white_space_behind_its_control_tokens(tmp_path: Path) -> None:
    spec = sentencepiece_spec()
    wanted = [*parts(spec)["tokens"], "<|user|>", "<|endoftext|>"]
    changes: dict[str, Any] = {
        "tokens": wanted,
        "scores": [*parts(spec)["scores"], 0.0, 0.0],
        "token_type": [*parts(spec)["token_type"], CONTROL, CONTROL],
    }
    user, end = len(wanted) - 2, len(wanted) - 1
    phi3 = load_tokenizer(write_pieces(tmp_path / "p.gguf", spec, architecture="phi3", **changes))
    llama = load_tokenizer(write_pieces(tmp_path / "l.gguf", spec, **changes))
    the, line = llama.token_id("▁the"), llama.token_id("<0x0A>")
    assert the is not None
    assert line is not None
    assert phi3.encode("<|user|>\n the", add_special_tokens=False) == [user, the]
    assert line in llama.encode("<|user|>\n the", add_special_tokens=False)
    assert line in phi3.encode("<|endoftext|>\n the", add_special_tokens=False)
    assert phi3.eos_ids == (2, end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores is missing or not a list of"),
        ({"scores": [1.0]}, "scores is missing or not a list of"),
        ({"scores": [float("nan")] * 284}, "holds other things than finite numbers"),
        ({"token_type": [NORMAL] * 284}, "byte tokens are missing: <0x00>, <0x01>, <0x02>"),
        ({"tokens": ["a"] * 284}, "token 'a' is listed twice"),
        ({"add_space_prefix": 1}, "add_space_prefix = 1: must be true or false"),
        ({"bos_token_id": 9999}, "bos_token_id = 9999: must be between"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(write_pieces(tmp_path / "m.gguf", sentencepiece_spec(), **changes))
