"""Tokenizers rebuilt from GGUF files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.errors import TokenizerError, UnsupportedTokenizerError
from deepinfer.text.gguf_metadata import read_gguf_metadata
from deepinfer.text.load import load_tokenizer
from deepinfer.text.tokenizer import Tokenizer
from text_samples import (
    CONTROL,
    CORPUS,
    NORMAL,
    SPECIALS,
    byte_level_parts,
    byte_level_spec,
    write_folder,
    write_gguf,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Tokenizer:
    return load_tokenizer(file)


def words_of(path: Path, text: str) -> list[str]:
    """Return what the rebuilt pre-tokenizer cuts ``text`` into, spaces as ``Ġ``."""
    backend: tokenizers.Tokenizer = load_tokenizer(path)._backend
    assert backend.pre_tokenizer is not None
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_control_tokens_keep_their_places(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>")[0] == 1
    assert [tokenizer.encode(token) for token in SPECIALS] == [[0], [1], [2]]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(byte_level_parts()[0])


def test_user_defined_tokens_are_text(tokenizer: Tokenizer) -> None:
    token_id = tokenizer.token_id("<tool call>")
    assert token_id is not None
    assert tokenizer.encode("a<tool call>b")[1] == token_id
    assert tokenizer.decode([token_id]) == "<tool call>"


def test_equals_the_tokenizer_json_of_the_same_vocabulary(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = load_tokenizer(write_folder(tmp_path / "hf", byte_level_spec()))
    text = f"{CORPUS}\n\n  12 345<|im_end|> <think>"
    assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It 's Ġ1234 ĠDON ' T !! Ġ Ġx Ċ Ċ y"),
        ("smollm", "It 's Ġ 1 2 3 4 ĠDON ' T !! Ġ Ġx Ċ Ċ y"),
        ("qwen2", "It 's Ġ 1 2 3 4 ĠDON 'T !! Ġ Ġx ĊĊ y"),
        ("llama-bpe", "It 's Ġ 123 4 ĠDON 'T !! Ġ Ġx ĊĊ y"),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(tmp_path: Path, pre: str, words: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", pre=pre)
    assert words_of(path, "It's 1234 DON'T!!  x\n\ny") == words.split(" ")


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    composed = load_tokenizer(write_gguf(tmp_path / "q.gguf", pre="qwen2"))
    assert composed.encode("cafe\u0301") == composed.encode("café")
    plain = load_tokenizer(write_gguf(tmp_path / "s.gguf", pre="smollm"))
    assert plain.encode("cafe\u0301") != plain.encode("café")


def test_llama_takes_a_whole_word_that_no_merge_reaches(tmp_path: Path) -> None:
    tokens, _ = byte_level_parts()
    tokens.append("Zyx")
    types = [NORMAL] * len(tokens)
    llama = load_tokenizer(
        write_gguf(tmp_path / "l.gguf", pre="llama-bpe", tokens=tokens, token_type=types)
    )
    qwen = load_tokenizer(
        write_gguf(tmp_path / "q.gguf", pre="qwen2", tokens=tokens, token_type=types)
    )
    assert llama.encode("Zyx", add_special_tokens=False) == [len(tokens) - 1]
    assert len(qwen.encode("Zyx", add_special_tokens=False)) == 3


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ],
)
def test_beginning_of_sequence(tmp_path: Path, pre: str, said: bool | None, adds: bool) -> None:
    without = ("add_bos_token",) if said is None else ()
    path = write_gguf(tmp_path / "m.gguf", without=without, pre=pre, add_bos_token=bool(said))
    tokenizer = load_tokenizer(path)
    assert tokenizer.adds_bos is adds
    assert tokenizer.encode("a")[:-1] == ([1] if adds else [])
    assert tokenizer.encode("a", add_special_tokens=False)[:-1] == []


def test_ends_are_the_declared_and_the_well_known(tmp_path: Path) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "a.gguf")).eos_ids == (0, 2)
    declared = load_tokenizer(write_gguf(tmp_path / "b.gguf", eos_token_id=5, eot_token_id=7))
    assert declared.eos_ids == (0, 2, 5, 7)
    types = [NORMAL] * len(byte_level_parts()[0])
    types[1] = CONTROL
    plain = load_tokenizer(write_gguf(tmp_path / "c.gguf", token_type=types, eos_token_id=9))
    assert plain.eos_ids == (9,)


def test_chat_template_comes_along(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "the"}])
    text = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 2


@pytest.mark.parametrize(
    ("changes", "without", "error", "words"),
    [
        ({"model": "llama"}, (), TokenizerError, r"tokenizer\.ggml\.scores is missing"),
        ({"model": "bert"}, (), UnsupportedTokenizerError, "tokenizer model 'bert' is not"),
        ({"model": "t5"}, (), UnsupportedTokenizerError, "'t5'"),
        ({"pre": "tekken"}, (), UnsupportedTokenizerError, "pre-tokenizer 'tekken' is not"),
        ({}, ("pre",), UnsupportedTokenizerError, "pre-tokenizer 'not named' is not"),
        ({}, ("model",), TokenizerError, "holds no tokenizer"),
        ({}, ("tokens",), TokenizerError, r"tokenizer\.ggml\.tokens is missing"),
        ({}, ("merges",), TokenizerError, r"tokenizer\.ggml\.merges is missing"),
        ({}, ("token_type",), TokenizerError, "token_type is missing"),
        ({"token_type": [1, 2]}, (), TokenizerError, "not a list of"),
        ({"tokens": [1, 2]}, (), TokenizerError, "other things than strings"),
        ({"tokens": ["a", "b", "a"]}, (), TokenizerError, "token 'a' is listed twice"),
        ({"merges": ["qq zz"]}, (), TokenizerError, "merges do not fit the tokens"),
        ({"merges": ["abc"]}, (), TokenizerError, "merge 'abc' is not two tokens"),
        ({"eos_token_id": 10**6}, (), TokenizerError, "eos_token_id = 1000000: must be between"),
        ({"add_bos_token": 1}, (), TokenizerError, "add_bos_token = 1: must be true or false"),
        ({"add_bos_token": True}, ("bos_token_id",), TokenizerError, "there is no bos_token_id"),
        ({"chat_template": 7}, (), TokenizerError, "chat_template is not a string"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path,
    changes: dict[str, object],
    without: tuple[str, ...],
    error: type[TokenizerError],
    words: str,
) -> None:
    if "tokens" in changes and isinstance(changes["tokens"], list):
        changes = {**changes, "token_type": [NORMAL] * len(changes["tokens"])}
    path = write_gguf(tmp_path / "bad.gguf", without=without, **changes)
    with pytest.raises(error, match=words) as caught:
        load_tokenizer(path)
    assert type(caught.value) is error


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file or folder"):
        load_tokenizer(tmp_path / "absent.gguf")
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match="4 bytes are too few"):
        load_tokenizer(tmp_path / "short.gguf")
    (tmp_path / "text.gguf").write_bytes(b"not a model at all, only text")
    with pytest.raises(TokenizerError, match="it begins with b'not '"):
        load_tokenizer(tmp_path / "text.gguf")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (struct.pack("<IQQ", 3, 0, 2**40), "metadata entries"),
        (struct.pack("<IQQQ", 3, 0, 1, 2**60), "a string of"),
        (struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "value type 99"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**61), "an array of"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 0), "value type 9"),
        (struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4), "utf-8"),
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, body: bytes, words: str) -> None:
    path = tmp_path / "lying.gguf"
    path.write_bytes(b"GGUF" + body)
    with pytest.raises(TokenizerError, match=words):
        read_gguf_metadata(path)


def test_metadata_equals_the_gguf_package(file: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(file)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert read_gguf_metadata(file) == expected


@given(st.data())
def test_damage_never_escapes_as_anything_else(file: Path, data: st.DataObject) -> None:
    original = file.read_bytes()
    damaged = bytearray(original[: data.draw(st.integers(0, len(original)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = file.with_name("damaged.gguf")
    path.write_bytes(damaged)
    try:
        tokenizer = load_tokenizer(path)
    except TokenizerError:
        return
    assert tokenizer.decode(tokenizer.encode("the time")) != ""
