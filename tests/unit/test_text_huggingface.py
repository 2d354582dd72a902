"""Tokenizers of Hugging Face folders, and what decoding and encoding promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.text.errors import ChatTemplateError, TokenizerError, UnsupportedTokenizerError
from deepinfer.text.load import load_tokenizer
from text_samples import CHATML, byte_level_spec, sentencepiece_spec, write_folder

BYTE = byte_level_spec()
PIECE = sentencepiece_spec()


def test_bos_comes_from_the_post_processor_unless_the_config_says_otherwise(
    tmp_path: Path,
) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    plain = load_tokenizer(write_folder(tmp_path / "a", PIECE, tokenizer_config=config))
    assert plain.prefix_ids == (1,)
    assert plain.adds_bos
    assert plain.encode("the")[0] == 1
    assert plain.encode("the", add_special_tokens=False) == plain.encode("the")[1:]
    without = {**config, "add_bos_token": False}
    assert not load_tokenizer(
        write_folder(tmp_path / "b", PIECE, tokenizer_config=without)
    ).adds_bos
    asked = {"bos_token": "<|im_start|>", "add_bos_token": True}
    added = load_tokenizer(write_folder(tmp_path / "c", BYTE, tokenizer_config=asked))
    assert added.prefix_ids == (1,)


def test_ends_come_from_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "a",
        PIECE,
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"eos_token_id": [1, 5]},
        config={"eos_token_id": 9},
    )
    assert load_tokenizer(folder).eos_ids == (1, 2, 5)
    folder = write_folder(tmp_path / "b", PIECE, config={"eos_token_id": 9})
    assert load_tokenizer(folder).eos_ids == (9,)
    assert load_tokenizer(write_folder(tmp_path / "c", PIECE)).eos_ids == ()


def test_added_tokens_of_the_config_keep_their_declared_ids(tmp_path: Path) -> None:
    size = load_tokenizer(write_folder(tmp_path / "a", BYTE)).vocab_size
    new = {str(size): {"content": "<new>", "special": True}, "1": {"content": "<|im_start|>"}}
    folder = write_folder(tmp_path / "b", BYTE, tokenizer_config={"added_tokens_decoder": new})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<new>") == [size]
    assert size in tokenizer.special_ids
    assert tokenizer.vocab_size == size + 1


def test_an_added_token_that_cannot_keep_its_id_is_an_error(tmp_path: Path) -> None:
    moved = json.loads(json.dumps(BYTE))
    moved["added_tokens"][1]["id"] = 49_136
    with pytest.raises(TokenizerError, match=r"'<\|im_start\|>' is declared as id 49136, but is 1"):
        load_tokenizer(write_folder(tmp_path / "a", moved))
    other = {"added_tokens_decoder": {"1": {"content": "<|other|>"}}}
    with pytest.raises(TokenizerError, match=r"id 1 is '<\|im_start\|>' in tokenizer.json and"):
        load_tokenizer(write_folder(tmp_path / "b", BYTE, tokenizer_config=other))


def test_chat_templates(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    inline = write_folder(tmp_path / "a", BYTE, tokenizer_config={"chat_template": CHATML})
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]
    several = write_folder(tmp_path / "b", BYTE, tokenizer_config={"chat_template": named})
    own = write_folder(tmp_path / "c", BYTE, tokenizer_config={"chat_template": "unused"})
    (own / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    for folder in (inline, several, own):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode_chat(message) == tokenizer.encode(expected)
    bare = load_tokenizer(write_folder(tmp_path / "d", BYTE))
    assert bare.chat is None
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        bare.encode_chat(message)


def test_missing_and_foreign_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer \(no tokenizer.json\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedTokenizerError, match="a SentencePiece tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match="not readable JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": "\xff"}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not UTF-8"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]", encoding="utf-8")
    with pytest.raises(TokenizerError, match="holds list, not an object"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 2}, "'stop': 2"),
        ({"type": "Fuse"}, "Fuse"),
        (None, "None"),
        (
            {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "ByteFallback"}]},
            "mixes ByteLevel",
        ),
    ],
)
def test_decoders_that_cannot_stream_are_refused_by_name(
    tmp_path: Path, decoder: object, named: str
) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=named):
        load_tokenizer(write_folder(tmp_path / "a", {**BYTE, "decoder": decoder}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"eos_token": "</never>"}, "eos_token = '</never>' is not in the vocabulary"),
        ({"eos_token": 7}, "eos_token = 7"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "'x' is malformed"),
        ({"chat_template": 7}, "chat_template is not a string"),
        ({"chat_template": "{% for %}"}, "chat template, line 1"),
        ({"eos_token": "\ud800"}, "a token has no UTF-8 form"),
    ],
)
def test_bad_configs_are_named(tmp_path: Path, config: dict[str, object], named: str) -> None:
    with pytest.raises((TokenizerError, ChatTemplateError), match=named):
        load_tokenizer(write_folder(tmp_path / "a", BYTE, tokenizer_config=config))


def test_files_beyond_any_real_size_are_not_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", BYTE)
    with (folder / "tokenizer_config.json").open("wb") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(TokenizerError, match="1073741824 bytes; at most 268435456 are read"):
        load_tokenizer(folder)


def test_end_ids_outside_the_vocabulary_are_an_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", BYTE, generation_config={"eos_token_id": 9999})
    with pytest.raises(TokenizerError, match=r"eos_ids: \[9999\] are not in the vocabulary"):
        load_tokenizer(folder)
    folder = write_folder(tmp_path / "a", BYTE, generation_config={"eos_token_id": "2"})
    with pytest.raises(TokenizerError, match="eos_token_id = '2': must be ids"):
        load_tokenizer(folder)
    for absurd in (-1, 10**12):
        folder = write_folder(tmp_path / "a", BYTE, generation_config={"eos_token_id": [1, absurd]})
        with pytest.raises(TokenizerError, match=rf"eos_ids: \[{absurd}\] are not in the vocab"):
            load_tokenizer(folder)
    folder = write_folder(tmp_path / "a", BYTE, generation_config={"eos_token_id": True})
    with pytest.raises(TokenizerError, match="eos_token_id = True: must be ids"):
        load_tokenizer(folder)


def test_ids_beyond_the_vocabulary_are_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "a", BYTE))
    assert tokenizer.decode([tokenizer.vocab_size, 10**6, -1]) == ""
    assert tokenizer.token(10**6) is None
    assert tokenizer.token(10**12) is None
    assert tokenizer.token(-1) is None


def test_text_without_utf8_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "a", BYTE))
    with pytest.raises(ValueError, match="no UTF-8 form at character 2"):
        tokenizer.encode("ab\ud800")


def test_goldens(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "models" / "stories260k")
    assert tokenizer.eos_ids == (1, 2)
    goldens = json.loads((shared_data / "goldens.json").read_text(encoding="utf-8"))
    for case in goldens["stories260k"]["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"]) == case["output_text"]


def test_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, deepinfer.text.load, deepinfer.text.stream; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "numpy", "ray"}.isdisjoint(done.stdout.split())
